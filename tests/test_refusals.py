"""What can't be honoured ends in one sentence, before any process group, without a traceback, with exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_asyncpp.arguments import add_arguments, check
from megatron_asyncpp.errors import AsyncPPError
from megatron_asyncpp.refusals import REFUSALS
from tests import rows
from tests.harness.flags import tiny_flags
from tests.harness.forkserver import ROOT
from tests.harness.run import run

# What triggers each row of the table; those that aren't here have tests of their own.
TRIGGERS = {
    "--fp16": ["--fp16"],
    "--fp8-format": ["--fp8-format", "e4m3"],
    "--fp4-format": ["--fp4-format", "e2m1"],
    "--num-layers-per-virtual-pipeline-stage": ["--num-layers-per-virtual-pipeline-stage", "1"],
    "--num-virtual-stages-per-pipeline-rank": ["--num-virtual-stages-per-pipeline-rank", "2"],
    "--use-megatron-fsdp": ["--use-megatron-fsdp"],
    "--use-torch-fsdp2": ["--use-torch-fsdp2"],
    "--use-precision-aware-optimizer": ["--use-precision-aware-optimizer"],
    "--optimizer-cpu-offload": ["--optimizer-cpu-offload"],
    "--overlap-param-gather": ["--overlap-param-gather", "--optimizer", "muon"],
    "--tensor-parallel-num-weight-shards": ["--tensor-parallel-num-weight-shards", "4"],
    "--cuda-graph-impl": ["--cuda-graph-impl", "local"],
    "--enable-cuda-graph": ["--enable-cuda-graph"],
    "--external-cuda-graph": ["--external-cuda-graph"],
    "--optimizer-cuda-graph": ["--optimizer-cuda-graph"],
    "--rerun-mode": ["--rerun-mode", "validate_results"],
    "--rampup-batch-size": ["--rampup-batch-size", "4", "4", "16"],
    "--use-checkpoint-args": ["--use-checkpoint-args"],
    "--moe-expert-rank-capacity-factor": ["--moe-expert-rank-capacity-factor", "1.5"],
    "--moe-paged-stash": ["--moe-paged-stash"],
    "--moe-enable-routing-replay": ["--moe-enable-routing-replay"],
    "--moe-routing-trace-path": ["--moe-routing-trace-path", "somewhere"],
    "--experimental-attention-variant gated_delta_net": [
        *("--experimental-attention-variant", "gated_delta_net", "--linear-attention-freq", "2"),
        *("--tensor-model-parallel-size", "2"),
    ],
    "--moe-single-grouped-weight": ["--moe-single-grouped-weight"],
    "--moe-single-grouped-bias": ["--moe-single-grouped-bias"],
    "--transformer-impl inference_optimized": ["--transformer-impl", "inference_optimized"],
    "--moe-flex-dispatcher-backend ncclep": ["--moe-flex-dispatcher-backend", "ncclep"],
    "--ckpt-format": ["--ckpt-format", "torch_dcp"],
    "--ckpt-assume-constant-structure": ["--ckpt-assume-constant-structure"],
    "--non-persistent-ckpt-type": ["--non-persistent-ckpt-type", "local"],
    "--dist-ckpt-strictness": ["--dist-ckpt-strictness", "raise_all"],
    "--ckpt-convert-format": ["--ckpt-convert-format", "torch"],
    "--mtp-num-layers": ["--mtp-num-layers", "1"],
    "--qk-clip": ["--qk-clip"],
    "--dsa-indexer-loss-coeff": ["--dsa-indexer-loss-coeff", "0.1"],
    "--log-max-attention-logit": ["--log-max-attention-logit"],
    "--delay-wgrad-compute": ["--delay-wgrad-compute"],
    "--defer-embedding-wgrad-compute": ["--defer-embedding-wgrad-compute"],
    "--overlap-moe-expert-parallel-comm": ["--overlap-moe-expert-parallel-comm"],
    "--overlap-dispatch-backward-with-experts-wgrad": ["--overlap-dispatch-backward-with-experts-wgrad"],
    "--fine-grained-activation-offloading": ["--fine-grained-activation-offloading"],
    "--save-activations-interval": ["--save-activations-interval", "5"],
    "--save-dgrads-interval": ["--save-dgrads-interval", "5"],
    "--save-tokens-per-expert-interval": ["--save-tokens-per-expert-interval", "5"],
    "--logits-save-dir": ["--logits-save-dir", "somewhere"],
    "--logits-load-dir": ["--logits-load-dir", "somewhere"],
    "--sft": ["--sft"],
    "--dataloader-inter-document-masking": ["--dataloader-inter-document-masking"],
    "--hybrid-context-parallel": ["--hybrid-context-parallel"],
    "--perform-rl-step": ["--perform-rl-step"],
    "--inprocess-restart": ["--inprocess-restart"],
    "--vision-pretraining": ["--vision-pretraining"],
    "--freeze-all-layers": ["--freeze-all-layers"],
}
DERIVED = {"--iterations-to-skip", "a pipeline layout with several chunks per stage"}


def leave_at_once() -> None:
    """A hook: a rank that leaves doesn't wait, and making a process group is an error."""
    import torch

    from megatron_asyncpp import errors

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process group was made")

    errors.HEAD_START = 0.0
    torch.distributed.init_process_group = refuse


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    """Megatron's own parser with the plugin's flags."""
    from megatron_asyncpp.integration import cpu

    cpu.install()
    from megatron.training.arguments import add_megatron_arguments

    return add_arguments(add_megatron_arguments(ArgumentParser(allow_abbrev=False)))


@pytest.fixture
def parse(parser: ArgumentParser) -> Callable[..., Namespace]:
    """Parses flags, and checks them as the plugin does before Megatron validates them."""

    def parse(flags: list[str], world_size: int = 1) -> Namespace:
        args = parser.parse_args(flags)
        args.world_size = world_size  # Megatron's parse_args takes it from the environment
        check(args, flags)
        return args

    return parse


def test_every_row_of_the_table_is_triggered_here() -> None:
    assert {row.flag for row in REFUSALS} == TRIGGERS.keys() | DERIVED


@pytest.mark.parametrize("flag", TRIGGERS)
def test_refused_by_name_and_allowed_without_a_schedule(flag: str, parse: Callable[..., Namespace]) -> None:
    flags = tiny_flags(extra=TRIGGERS[flag])
    parse(flags)
    with pytest.raises(AsyncPPError) as error:
        parse([*flags, *rows.TWO_BW])
    assert str(error.value).startswith(f"{flag} can't be used with --asyncpp-schedule: ")
    assert "; " in str(error.value), "no way out"


def test_skipping_is_refused_where_megatron_fails(parse: Callable[..., Namespace]) -> None:
    skip = [*rows.TWO_BW, "--iterations-to-skip", "3"]
    parse([*tiny_flags(2, 4), *skip], world_size=2)
    with pytest.raises(AsyncPPError, match=r"--iterations-to-skip .* more than two stages"):
        parse([*tiny_flags(4, 4), *skip], world_size=4)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--asyncpp-error-feedback"], "--asyncpp-error-feedback needs a schedule: add --asyncpp-schedule 2bw"),
        (["--asyncpp-eval-weights", "newest"], "--asyncpp-eval-weights needs a schedule"),
        (["--asyncpp-schedule", "1f1b", "--asyncpp-eval-weights", "stale"], "1f1b has one"),
        (["--asyncpp-lead", "tight"], "--asyncpp-lead needs a schedule"),
        (["--asyncpp-schedule", "1f1b", "--asyncpp-lead", "wide"], "1f1b runs none ahead"),
        (["--asyncpp-check-versions"], "--asyncpp-check-versions needs a schedule"),
        (["--asyncpp-trace", "x"], "--asyncpp-trace needs a schedule"),
        (["--asyncpp-trace-iters", "3-5"], "--asyncpp-trace-iters needs a schedule"),
        ([*rows.TWO_BW, "--asyncpp-trace-iters", "3-5"], "says what to trace, and nothing is: add --asyncpp-trace DIR"),
        *(
            ([*rows.TWO_BW, "--asyncpp-trace", "x", "--asyncpp-trace-iters", bad], f"-iters {bad} doesn't say which")
            for bad in ("5-3", "3", "0-4", "3-", "a-b", "3:5")
        ),
        (
            [*rows.TWO_BW, "--asyncpp-trace", "x", "--asyncpp-trace-iters", "13-20"],
            "-iters 13-20 begins after the last iteration, 12: give earlier ones",
        ),
        (
            [*rows.TWO_BW, "--asyncpp-trace", __file__],
            r"can't be written to \(File exists\): give a folder",
        ),
        ([*rows.TWO_BW, "--save", "x"], "--save needs --save-interval"),
        ([*rows.TWO_BW, "--save", __file__, "--save-interval", "5"], r"--save .* can't be written to \(File exists\)"),
        ([*rows.TWO_BW, "--save", "/proc/x", "--save-interval", "5"], "--save /proc/x can't be written to"),
        (
            [*rows.TWO_BW, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "/nowhere"],
            "--tokenizer-model /nowhere isn't there: give the tokenizer's file or folder",
        ),
        ([*rows.TWO_BW, "--vocab-file", "./nothing.json"], "--vocab-file ./nothing.json isn't there"),
        ([*rows.TWO_BW, "--asyncpp-error-feedback", "-1"], "-1.0 is no strength"),
        ([*rows.TWO_BW, "--asyncpp-error-feedback", "nan"], "nan is no strength"),
        (["--asyncpp-schedule", "1f1b", "--asyncpp-error-feedback"], "1f1b has none"),
        (["--asyncpp-error-feedback", "0"], "--asyncpp-error-feedback needs a schedule"),
        (["--asyncpp-error-feedback-dtype", "fp32"], "--asyncpp-error-feedback-dtype needs a schedule"),
        (["--asyncpp-error-feedback-on", "update"], "--asyncpp-error-feedback-on needs a schedule"),
        (["--asyncpp-delay-compensation", "1"], "--asyncpp-delay-compensation needs a schedule"),
        (["--asyncpp-muon-preset", "megatron"], "--asyncpp-muon-preset needs a schedule"),
        ([*rows.TWO_BW, "--asyncpp-error-feedback-dtype", "bf16"], "-dtype says how Error Feedback works, and there"),
        ([*rows.TWO_BW, "--asyncpp-error-feedback-on", "gradient"], "-on says how Error Feedback works, and there is"),
        ([*rows.TWO_BW, "--asyncpp-delay-compensation", "-0.5"], "--asyncpp-delay-compensation -0.5 is no strength"),
        ([*rows.TWO_BW, "--asyncpp-delay-compensation", "inf"], "inf is no strength"),
        (
            ["--asyncpp-schedule", "1f1b", "--asyncpp-delay-compensation", "1"],
            "--asyncpp-delay-compensation corrects a delay, and --asyncpp-schedule 1f1b has none",
        ),
        (
            [*rows.TWO_BW, "--asyncpp-error-feedback", "--asyncpp-delay-compensation", "0"],
            "--asyncpp-error-feedback and --asyncpp-delay-compensation both correct",
        ),
        (
            [*rows.TWO_BW, "--asyncpp-delay-compensation", "1", "--asyncpp-error-feedback-dtype", "bf16"],
            "--asyncpp-error-feedback-dtype says how Error Feedback works, and there is none",
        ),
        (
            [*rows.TWO_BW, "--asyncpp-muon-preset", "paper"],
            "--asyncpp-muon-preset sets Muon's settings, and the optimizer is adam: use --optimizer muon",
        ),
    ],
)
def test_flags_that_make_no_sense_together(extra: list[str], message: str, parse: Callable[..., Namespace]) -> None:
    with pytest.raises(AsyncPPError, match=message):
        parse([*tiny_flags(), *extra])


def test_evaluations_are_counted_even_where_there_are_none(parse: Callable[..., Namespace]) -> None:
    flags = tiny_flags()
    at = flags.index("--eval-interval")
    with pytest.raises(AsyncPPError, match="--eval-iters 0 makes none: add it, such as --eval-interval 1000"):
        parse([*flags[:at], *flags[at + 2 :], "--eval-iters", "0", *rows.TWO_BW])


def test_a_tokenizer_of_hugging_face_needs_their_package(
    parse: Callable[..., Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*tiny_flags(), *rows.TWO_BW, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "a/name"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(AsyncPPError, match="needs transformers, which isn't installed: pip install transformers"):
        parse(flags)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    parse(flags)


def test_what_is_no_path_is_left_to_who_knows_it(
    parse: Callable[..., Namespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parse([*tiny_flags(), *rows.TWO_BW, "--save", "msc://bucket/run", "--save-interval", "5"])
    assert list(tmp_path.iterdir()) == []


def test_a_trace_needs_matplotlib(
    parse: Callable[..., Namespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = [*tiny_flags(), *rows.TWO_BW, "--asyncpp-trace", str(tmp_path / "new"), "--asyncpp-trace-iters", "12-20"]
    parse(trace)
    assert (tmp_path / "new").is_dir()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(AsyncPPError, match="--asyncpp-trace draws with matplotlib: pip install matplotlib"):
        parse(trace)


def test_flags_of_corrections_that_do_make_sense(parse: Callable[..., Namespace]) -> None:
    feedback = ["--asyncpp-error-feedback", "--asyncpp-error-feedback-on", "gradient"]
    parse([*tiny_flags(), *rows.TWO_BW, *feedback, "--asyncpp-error-feedback-dtype", "bf16"])
    parse([*tiny_flags(), *rows.TWO_BW, "--asyncpp-delay-compensation", "0.04"])
    for schedule in ("2bw", "1f1b"):  # synchronous runs need the same Muon, to be compared with
        preset = ["--optimizer", "muon", "--asyncpp-muon-preset", "paper"]
        parse([*tiny_flags(), "--asyncpp-schedule", schedule, *preset])


def test_bare_error_feedback_is_one(parse: Callable[..., Namespace]) -> None:
    assert parse([*tiny_flags(), *rows.TWO_BW, "--asyncpp-error-feedback"]).asyncpp_error_feedback == 1.0


def test_a_world_that_holds_no_replica(parse: Callable[..., Namespace]) -> None:
    with pytest.raises(AsyncPPError, match="takes 4 processes .* but 1 were started: launch a multiple of 4"):
        parse([*tiny_flags(4, 4), *rows.TWO_BW])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--num-layers", "3"], "3 layers can't be divided over --pipeline-model-parallel-size 2: give a divisor"),
        (["--num-layers", "4", "--decoder-first-pipeline-num-layers", "5"], "with that first or last stage"),
        (
            ["--pipeline-model-parallel-layout", "Et*2|t*3L"],
            r"layout Et\*2\|t\*3L isn't E, 4 times t and L on 2 stages",
        ),
        (["--pipeline-model-parallel-layout", "Et|t|t*2L"], "on 2 stages: give each stage its layers"),
    ],
)
def test_layers_that_do_not_fit_on_the_stages(extra: list[str], message: str, parse: Callable[..., Namespace]) -> None:
    parse([*tiny_flags(2, 4), *rows.TWO_BW, "--pipeline-model-parallel-layout", "Et|t*3L"], world_size=2)
    parse([*tiny_flags(2, 4), *extra], world_size=2)  # without a schedule it is Megatron's business
    with pytest.raises(AsyncPPError, match=message):
        parse([*tiny_flags(2, 4), *rows.TWO_BW, *extra], world_size=2)


def test_a_wide_lead_needs_more_microbatches(parse: Callable[..., Namespace]) -> None:
    wide = [*rows.TWO_BW, "--asyncpp-lead", "wide"]
    parse([*tiny_flags(4, 7), *wide], world_size=4)
    with pytest.raises(AsyncPPError, match="needs at least 2P-1 .* are 6 .* 4 stages: raise .* to at least 7, leave"):
        parse([*tiny_flags(4, 6), *wide], world_size=4)


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_fewer_microbatches_than_stages(microbatches: int) -> None:
    flags = tiny_flags(4, microbatches, extra=rows.TWO_BW)
    done = run(flags, 4, hooks=leave_at_once, check=False)
    assert [rank.exit_code for rank in done.ranks] == [2, 2, 2, 2]
    (line,) = [line for line in done.ranks[0].stderr.splitlines() if line.startswith("megatron_asyncpp:")]
    assert f"{microbatches} microbatches for 4 stages: raise --global-batch-size to at least 4" in line
    for rank in done.ranks:
        assert "Traceback" not in rank.stderr
        assert rank.rank == 0 or "megatron_asyncpp:" not in rank.stderr, "only rank 0 prints"


def test_chunks_that_only_a_layout_asks_for() -> None:
    flags = tiny_flags(2, 4, extra=(*rows.TWO_BW, "--pipeline-model-parallel-layout", "Et|t|t|tL"))
    done = run(flags, 2, hooks=leave_at_once, check=False)
    assert [rank.exit_code for rank in done.ranks] == [2, 2]
    assert "a pipeline layout with several chunks per stage can't be used" in done.ranks[0].stderr
    assert "Traceback" not in done.ranks[0].stderr


def test_flags_that_a_yaml_file_would_swallow() -> None:
    with pytest.raises(AsyncPPError, match=r"in place of --yaml-cfg, .*install\(\) before the arguments are parsed"):
        check(Namespace(), ["--yaml-cfg", "file", *rows.TWO_BW])
    check(Namespace(), ["--yaml-cfg", "file"])


def test_an_unknown_megatron(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import megatron_asyncpp
    from megatron_asyncpp.integration import patching

    monkeypatch.setattr(patching, "megatron_version", lambda: "0.20.0")
    with pytest.raises(SystemExit) as left:
        megatron_asyncpp.install()
    assert left.value.code == 2
    message = capsys.readouterr().err
    assert "this is Megatron 0.20.0, but " in message
    assert "install one of those versions" in message


def test_a_changed_megatron() -> None:
    from megatron_asyncpp.integration import patching

    record = patching.Patch("megatron_asyncpp.errors:Gone.attribute", lambda original: original, "to see it fail")
    with pytest.raises(AsyncPPError, match=r"Gone\.attribute does not exist in the installed version"):
        patching.apply([record])


def test_under_torchrun_the_launcher_prints_one_sentence() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command = [*launcher, "-m", "megatron_asyncpp", "run", "--cpu", "pretrain_gpt"]
    flags = tiny_flags(2, 1, extra=rows.TWO_BW)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *flags], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
    assert done.returncode != 0
    ours, _, torchruns = done.stderr.partition("torch.distributed.elastic")
    assert [line for line in ours.splitlines() if line.startswith("megatron_asyncpp:")] == [
        "megatron_asyncpp: --asyncpp-schedule 2bw needs at least as many microbatches as pipeline stages, but there "
        "are 1 microbatches for 2 stages: raise --global-batch-size to at least 2, or lower --micro-batch-size or "
        "--pipeline-model-parallel-size"
    ]
    assert "ChildFailedError" in torchruns
    assert f'File "{ROOT / "megatron_asyncpp"}' not in done.stderr, "a traceback of ours"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--asyncpp-sync-start-iters", "2"], "--asyncpp-sync-start-iters needs a schedule"),
        ([*rows.TWO_BW, "--asyncpp-sync-start-iters", "-1"], "-1 is no number of iterations"),
        (["--asyncpp-schedule", "1f1b", "--asyncpp-sync-cooldown-iters", "2"], "all of --asyncpp-schedule 1f1b is"),
        (
            [*rows.TWO_BW, "--asyncpp-sync-start-iters", "8", "--asyncpp-sync-cooldown-iters", "4"],
            "leave no asynchronous iteration of 12",
        ),
    ],
)
def test_synchronous_parts_that_make_no_sense(extra: list[str], message: str, parse: Callable[..., Namespace]) -> None:
    with pytest.raises(AsyncPPError, match=message):
        parse([*tiny_flags(), *extra])


def test_a_ramp_up_must_reach_the_stages_before_the_first_delayed_batch(parse: Callable[..., Namespace]) -> None:
    flags = [*tiny_flags(4, ramp_up=((2, 3), (4, 3))), *rows.TWO_BW]
    with pytest.raises(AsyncPPError, match="2 microbatches for 4 stages: begin --step-batch-size-schedule"):
        parse(flags, world_size=4)
    with pytest.raises(AsyncPPError, match="2 microbatches for 4 stages"):
        parse([*flags, "--asyncpp-sync-start-iters", "2"], world_size=4)
    parse([*flags, "--asyncpp-sync-start-iters", "3"], world_size=4)
