"""The `plan` command: figures of published models, of this project's measurements, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from typing import Any

import pytest

from megatron_asyncpp import __main__ as command_line
from megatron_asyncpp.errors import AsyncPPError
from megatron_asyncpp.planning.activations import stage_activations
from megatron_asyncpp.planning.flags import Request, read, shape
from megatron_asyncpp.planning.layout import Layout
from megatron_asyncpp.planning.memory import memory
from megatron_asyncpp.planning.parameters import active_parameters, stage_parameters, total_parameters
from megatron_asyncpp.planning.speed import flops_per_token
from megatron_asyncpp.predictions import predict
from megatron_asyncpp.stage_layers import stages_of
from tests.harness.forkserver import ROOT

ROPE = ("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear")
UNTIED = ("--untie-embeddings-and-output-weights",)
# arXiv:2407.21783, table 3; the first and the last stage have a layer less, section 3.3.2.
LLAMA3_405B = (
    *("--num-layers", "126", "--hidden-size", "16384", "--ffn-hidden-size", "53248", "--num-attention-heads", "128"),
    *("--group-query-attention", "--num-query-groups", "8", "--vocab-size", "128256", "--seq-length", "8192"),
    *(*ROPE, *UNTIED, "--tensor-model-parallel-size", "8", "--sequence-parallel"),
    *("--pipeline-model-parallel-size", "16", "--decoder-first-pipeline-num-layers", "7"),
    *("--decoder-last-pipeline-num-layers", "7"),
)
# arXiv:2412.19437, section 4.2.
DEEPSEEK_V3 = (
    *("--num-layers", "61", "--hidden-size", "7168", "--ffn-hidden-size", "18432", "--num-attention-heads", "128"),
    *("--multi-latent-attention", "--q-lora-rank", "1536", "--kv-lora-rank", "512", "--qk-head-dim", "128"),
    *("--qk-pos-emb-head-dim", "64", "--v-head-dim", "128", "--qk-layernorm", "--vocab-size", "129280"),
    *("--seq-length", "4096", "--num-experts", "256", "--moe-router-topk", "8", "--moe-ffn-hidden-size", "2048"),
    *("--moe-shared-expert-intermediate-size", "2048", "--moe-layer-freq", "([0]*3+[1]*58)", *ROPE, *UNTIED),
    *("--pipeline-model-parallel-size", "16", "--decoder-last-pipeline-num-layers", "1"),
    *("--expert-model-parallel-size", "64"),
)
ASYNCHRONOUS = ("--asyncpp-schedule", "2bw", "--asyncpp-error-feedback", "--bf16")
SMALL = (
    *("--num-layers", "4", "--hidden-size", "128", "--num-attention-heads", "4", "--vocab-size", "128"),
    *("--seq-length", "32", *ROPE, *UNTIED, "--pipeline-model-parallel-size", "4"),
)


def plan(*words: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert command_line.main(["plan", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def refused(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as leaving:
        command_line.main(["plan", *words])
    assert leaving.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return str(line).removeprefix("megatron_asyncpp: ")


def per_gpu(flags: tuple[str, ...], world: int) -> tuple[Request, list[int]]:
    request = read([*flags, *ASYNCHRONOUS], world, microbatches=16)
    return request, [count.total for count in stage_parameters(request.model, request.layout)]


def test_llama3_has_3_16b_parameters_on_a_gpu_on_average() -> None:
    """405B over 128 GPUs. The model has 405.85B, hence 3.17B; over TP 8 only the norms are whole on each."""
    request, counts = per_gpu(LLAMA3_405B, 128)
    assert total_parameters(request.model) == 405_853_388_800
    assert active_parameters(request.model) == total_parameters(request.model) - 128256 * 16384
    assert sum(counts) / 16 == pytest.approx(3.16e9, rel=0.005)
    assert request.layout.stages == (7, *(8,) * 14, 7)


def test_deepseek_v3_has_1_7b_parameters_on_a_gpu_on_average() -> None:
    """Of its 58 x 256 experts of 44.0M each GPU of 16 x 64 holds 639M; of the other 17.1B, 1.07B: 16 stages, no TP."""
    request, counts = per_gpu(DEEPSEEK_V3, 2048)
    expert = 3 * 7168 * 2048
    assert total_parameters(request.model) == pytest.approx(671.0e9, rel=0.001)
    assert active_parameters(request.model) == pytest.approx(37e9, rel=0.02)  # "37B activated for each token"
    dense = total_parameters(request.model) - 58 * 256 * expert
    assert sum(counts) / 16 == pytest.approx(58 * 256 * expert / 1024 + dense / 16)
    assert sum(counts) / 16 == pytest.approx(1.71e9, rel=0.005)
    assert (request.layout.data, request.layout.expert_replicas) == (128, 2)


def test_one_fp32_state_of_200m_weights_is_800_mb() -> None:
    rows = memory(read([*LLAMA3_405B, *ASYNCHRONOUS], 128, 16))
    for row in rows:
        assert row.error_feedback * 200e6 / row.masters == 800e6


@pytest.mark.parametrize(
    ("extra", "world", "per_parameter"),
    [  # README, "Extra memory": bytes per parameter that last, on the rank that needs most
        (("--clip-grad", "0"), 4, 2.0),
        (("--clip-grad", "0", "--asyncpp-error-feedback", "--asyncpp-error-feedback-dtype", "bf16"), 4, 4.0),
        (("--clip-grad", "0", "--asyncpp-error-feedback"), 4, 6.0),
        ((), 4, 6.0),
        (("--asyncpp-error-feedback", "--asyncpp-error-feedback-dtype", "bf16"), 4, 8.0),
        (("--asyncpp-error-feedback",), 4, 10.0),
        (("--asyncpp-error-feedback",), 8, 10.0),
        (("--use-distributed-optimizer", "--asyncpp-error-feedback"), 8, 6.0),
        (("--use-distributed-optimizer", "--asyncpp-error-feedback", "--clip-grad", "0"), 8, 4.0),
    ],
)
def test_what_2bw_adds_is_what_was_measured(extra: tuple[str, ...], world: int, per_parameter: float) -> None:
    flags = [*SMALL, "--bf16", *extra]
    delayed = memory(read([*flags, "--asyncpp-schedule", "2bw"], world, 4))
    synchronous = memory(read([word for word in flags if not word.startswith("--asyncpp")], world, 4)) if not any(
        word.startswith("--asyncpp") for word in extra
    ) else None  # fmt: skip
    for row in delayed:
        added = row.second_buffer + row.error_feedback + row.gradient_copy
        assert added / row.parameters == pytest.approx(per_parameter, rel=1e-4)
    if synchronous is not None:
        for row, plain in zip(delayed, synchronous, strict=True):
            assert (plain.second_buffer, plain.gradient_copy, plain.error_feedback) == (0, 0, 0)
            assert row.activations == plain.activations
            assert row.total - plain.total == row.second_buffer + row.gradient_copy


def test_megatrons_own_memory() -> None:
    """Adam in bf16: 2 for weights, 4 for gradients, 4 + 8 for master weights and moments: 18, or 6 + 12/d."""
    for extra, world, expected in (((), 4, 18.0), (("--use-distributed-optimizer",), 16, 9.0)):
        for row in memory(read([*SMALL, "--bf16", *extra], world, 4)):
            held = row.weights + row.gradients + row.optimizer
            assert held / row.parameters == pytest.approx(expected, rel=1e-3)
    adam, muon = (memory(read([*SMALL, "--bf16", "--optimizer", name], 4, 4))[1].optimizer for name in ("adam", "muon"))
    matrices = 128 * 128 * 4 + 3 * 128 * 320  # attention and MLP of one layer; its two norms stay with Adam
    assert adam - muon == 4 * matrices


@pytest.mark.parametrize("tensor", [1, 8])
def test_activations_are_34_sbh_without_the_masks_of_dropout(tensor: int) -> None:
    """arXiv:2205.05198, equation 5: sbh (34 + 5as/h) / t with sequence parallelism, for GELU and 4h. Of the 34, two
    are masks of dropout, which there isn't; nor are the scores kept, but the logarithm of a sum for each."""
    size = ("--num-layers", "1", "--hidden-size", "1024", "--num-attention-heads", "16", "--seq-length", "512")
    model = shape([*size, "--vocab-size", "128", "--position-embedding-type", "rope"])
    layout = Layout(tensor, tensor, (1,), 1, 1, 1, sequence_parallel=tensor > 1)
    (found,) = stage_activations(model, layout, micro_batch_size=2, recomputed_layers=None)
    assert found.kept == (32 * 512 * 2 * 1024 + 4 * 512 * 2 * 16) // tensor
    assert found.recomputed == 0
    (again,) = stage_activations(model, layout, micro_batch_size=2, recomputed_layers=1)
    assert (again.kept, again.recomputed) == (2 * 512 * 2 * 1024 // tensor, found.kept)


def test_work_of_a_token() -> None:
    """6 for each parameter, and 6 s h for half of the scores of each of 32 layers."""
    flags = ("--num-layers", "32", "--hidden-size", "512", "--num-attention-heads", "8", "--vocab-size", "128")
    model = shape([*flags, "--seq-length", "1024", *ROPE])
    assert flops_per_token(model) == 6 * total_parameters(model) + 32 * 6 * 1024 * 512
    latent = shape(list(DEEPSEEK_V3))
    scores = 61 * 6 * 128 * (128 + 64 + 128) * 4096 // 2
    assert flops_per_token(latent) == 6 * active_parameters(latent) + scores
    delta = shape(["--asyncpp-model", "moe-10b"])
    mixed = 8 * 6 * 16 * 128 * 8192 + 24 * 24 * 16 * 128 * 128
    assert flops_per_token(delta) == 6 * active_parameters(delta) + mixed


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "moe-10b", "--world-size", "64", "--tp", "1", "--pp", "8", "--ep", "8", "--microbatches", "32")
    found = plan(*words, "--tflops", "300", capsys=capsys)
    assert found["total_parameters"] == pytest.approx(10e9, rel=0.03)
    assert found["active_parameters"] == pytest.approx(0.65e9, rel=0.03)
    assert [row["microbatches"] for row in found["rows"]] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert all(row["masters"] <= 200e6 for row in found["rows"])
    assert found["tokens_per_batch"] == 32 * 8 * 8192
    slowdowns = {one["schedule"]: one["slowdown"] for one in found["schedules"]}
    times = ([Fraction(1)] * 8, [Fraction(2)] * 8)
    predicted = {
        name: predict(name, 8, 32, *times, Fraction(0), Fraction(0), virtual_stages=2).slowdown for name in slowdowns
    }
    assert set(slowdowns) == {"1f1b", "interleaved", "zb1p", "dualpipe", "2bw"}
    assert slowdowns == pytest.approx(predicted, abs=5e-4)
    seconds = found["tokens_per_batch"] * found["flops_per_token"] / (64 * 300e12)
    by_name = {one["schedule"]: one["tokens_per_day"] for one in found["schedules"]}
    assert by_name["2bw"] == pytest.approx(86400 / seconds * found["tokens_per_batch"])
    assert by_name["1f1b"] == pytest.approx(by_name["2bw"] / (1 + 7 / 32))
    assert plan("--model", "moe-10b", "--microbatches", "32", capsys=capsys)["rows"] == found["rows"]


def test_a_recipes_flags(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--asyncpp-model", "smollm2-135m", "--bf16", "--micro-batch-size", "4", "--global-batch-size", "256"]
    flags += ["--pipeline-model-parallel-size", "4", "--pipeline-model-parallel-layout", "Et*7|t*8|t*8|t*7L"]
    flags += ["--lr", "1e-3", "--data-path", "1.0", "somewhere", "--some-flag-of-a-script"]
    found = plan("--world-size", "16", "--", *flags, capsys=capsys)
    assert (found["data_parallel"], found["microbatches"]) == (4, 16)
    assert [row["layers"] for row in found["rows"]] == [7, 8, 8, 7]
    assert all(row["second_buffer"] == 0 for row in found["rows"]), "there is no --asyncpp-schedule"


def test_a_size_given_to_plan_wins_over_the_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    """So that a layout that is proposed can be tried at once."""
    recipe = ("--asyncpp-model", "smollm2-360m", "--bf16", "--pipeline-model-parallel-size", "4")
    found = plan("--world-size", "8", "--pp", "2", "--microbatches", "4", "--", *recipe, capsys=capsys)
    assert ([row["layers"] for row in found["rows"]], found["data_parallel"]) == ([16, 16], 4)


def test_a_wide_lead_holds_more_microbatches(capsys: pytest.CaptureFixture[str]) -> None:
    wide = (*SMALL, *ASYNCHRONOUS, "--asyncpp-lead", "wide")
    found = plan("--world-size", "4", "--microbatches", "8", "--", *wide, capsys=capsys)
    assert [row["microbatches"] for row in found["rows"]] == [7, 5, 3, 1]
    sentence = refused("--world-size", "4", "--microbatches", "6", "--", *wide, capsys=capsys)
    assert "needs at least 7 microbatches for 4 stages, and there are 6" in sentence
    assert "leave out --asyncpp-lead wide" in sentence


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["plan", "--model", "moe-2b", "--microbatches", "16", "--tflops", "400"]) == 0
    told = capsys.readouterr().out
    assert "2,031.1M parameters, 487.6M active" in told
    assert "16 GPUs: TP 1, PP 4, CP 1, EP 4, DP 4; 16 microbatches, 524,288 tokens a batch" in told
    assert "tokens per day" in told


SMOLLM = ("--model", "smollm2-135m")
SMOLLM360 = ("--model", "smollm2-360m")
MOE = ("--model", "moe-10b", "--microbatches", "32")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--model", "gpt-5"),
            "--model gpt-5 is no model that is known: take one of smollm2-135m, smollm2-360m, moe-2b, moe-10b",
        ),
        (("--pp", "2"), "a plan needs --world-size, the number of GPUs: give it"),
        (SMOLLM, "a plan needs --microbatches, or --global-batch-size: give one of them"),
        (("--world-size", "1", "--microbatches", "1"), "a plan needs --num-layers, at least 1: give Megatron's flags"),
        (
            (*SMOLLM, "--world-size", "7", "--pp", "7", "--microbatches", "8"),
            "30 layers can't be divided over --pipeline-model-parallel-size 7: give a divisor, or take layers off with",
        ),
        (
            (*SMOLLM, "--world-size", "16", "--pp", "3", "--microbatches", "8"),
            "a replica of the model takes 3 ranks (tensor x pipeline x context parallel), and --world-size 16 isn't",
        ),
        (
            (*SMOLLM, "--world-size", "2", "--pp", "2", "--microbatches", "1"),
            "2BW needs at least 2 microbatches for 2 stages",
        ),
        ((*SMOLLM, "--world-size", "2", "--tp", "2", "--microbatches", "1"), "--num-query-groups 3 is neither"),
        ((*MOE, "--world-size", "32", "--tp", "32"), "16 heads can't be divided over 32 ranks: lower --tensor-model-p"),
        ((*SMOLLM, "--world-size", "2", "--tp", "0", "--microbatches", "1"), "--tensor-model-parallel-size 0 leaves"),
        ((*SMOLLM, "--world-size", "2", "--pp", "0", "--microbatches", "1"), "--pipeline-model-parallel-size 0 leaves"),
        ((*SMOLLM, "--world-size", "2", "--ep", "2", "--microbatches", "1"), "--expert-model-parallel-size 2 divides"),
        (
            (*MOE, "--world-size", "96", "--pp", "8", "--ep", "12"),
            "512 experts can't be divided over --expert-model-pa",
        ),
        ((*MOE, "--world-size", "32", "--pp", "8", "--ep", "8"), "all experts of all stages take 64 ranks"),
        ((*MOE, "--tflops", "0"), "--tflops 0 computes nothing"),
        ((*MOE, "--", "--num-layers", "32"), "plan counts training in bf16: add --bf16 to Megatron's flags"),
        (
            (*MOE, "--", "--bf16", "--mtp-num-layers", "1"),
            "the formulas know nothing of --mtp-num-layers: leave it out",
        ),
        ((*MOE, "--", "--bf16", "--optimizer", "soap"), "it isn't known here what --optimizer soap keeps"),
        ((*MOE, "--", "--bf16", "--moe-router-topk", "513"), "--moe-router-topk 513 of --num-experts 512 can't"),
        (
            (*MOE, "--", "--bf16", "--linear-attention-freq", "[0,1]"),
            "--linear-attention-freq [0,1] doesn't say 0 or 1",
        ),
        ((*MOE, "--", "--bf16", "--num-layers", "many"), "the Megatron flags can't be read: argument --num-layers"),
        (
            (*SMOLLM360, "--", "--bf16", "--micro-batch-size", "3", "--global-batch-size", "16"),
            "--global-batch-size 16 isn't a multiple of the 3 samples",
        ),
    ],
)
def test_what_makes_no_sense_is_one_sentence(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(*words, capsys=capsys).startswith(message)


def test_what_does_not_fit_gets_the_nearest_layout_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(*MOE, "--memory-gb", "24", capsys=capsys)
    start, found, layout = told.partition(": the nearest that fits, for the same batch, is ")
    assert start.startswith("stage 0 takes ")
    assert start.endswith(" GB, more than --memory-gb 24")
    assert found
    words = layout.split()
    again = plan("--model", "moe-10b", *words, "--memory-gb", "24", capsys=capsys)
    assert max(row["total"] for row in again["rows"]) <= 24e9
    assert again["tokens_per_batch"] == 32 * 8 * 8192
    roomy = plan(*MOE, "--memory-gb", "80", capsys=capsys)
    assert roomy["world_size"] == 64
    assert "so does every layout for the same batch on up to 64 times as many GPUs: recompute" in refused(
        *MOE, "--memory-gb", "0.1", capsys=capsys
    )


@pytest.mark.parametrize("layout", ["Et*7|t*8|t*8|t*7L", "Ettttttt|t*8|(tt)*4|(t)*7L", "Et*7|(t*8|)*2t*7L"])
def test_layouts_in_letters(layout: str) -> None:
    assert stages_of(layout, 30, 4) == (7, 8, 8, 7)


@pytest.mark.parametrize("layout", ["Et*7|t*8|t*8|t*6L", "Et*30L", "t*7|t*8|t*8|t*7L", "Em*7|t*8|t*8|t*7L"])
def test_layouts_that_are_none(layout: str) -> None:
    with pytest.raises(AsyncPPError, match="isn't E, 30 times t and L on 4 stages"):
        stages_of(layout, 30, 4)


def test_it_imports_nothing_heavy() -> None:
    program = (
        "import sys; from megatron_asyncpp.__main__ import main\n"
        "assert main(['plan', '--model', 'moe-10b', '--microbatches', '32']) == main(['flags', 'moe-10b']) == 0\n"
        "assert not {'torch', 'megatron', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, capture_output=True)
