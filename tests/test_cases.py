"""Faults that users of such software have met, each as a run that would show it again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests import rows
from tests.harness.flags import tiny_flags
from tests.harness.results import assert_bitwise, compare_weights
from tests.harness.run import RankError, run

EVALUATION = {"eval_interval": 5, "eval_iters": 2}


@pytest.mark.slow
def test_200_iterations_of_four_stages_end() -> None:
    """Peers that disagree about the order of messages hang now and then (case 1)."""
    flags = tiny_flags(4, 8, iterations=200, extra=(*rows.TWO_BW, "--asyncpp-error-feedback"))
    done = run(flags, 4, timeout=560)
    rows.assert_delayed(done, 8, 200)
    assert len(done.losses) == 200


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (2, 5), (4, 4)])
def test_messages_and_labels_are_those_of_the_microbatch(stages: int, microbatches: int) -> None:
    """Tensors swapped between directions when previous and next are one rank (case 2); outputs paired with another
    batch's labels, across iterations, evaluations and skipped iterations (case 10)."""
    skipped = ("4", "5", "9") if stages == 2 else ()  # with more stages Megatron's own skipping fails
    extra = (*rows.TWO_BW, *(("--iterations-to-skip", *skipped) if skipped else ()))
    trained = rows.ITERATIONS - len(skipped)
    flags = tiny_flags(stages, microbatches, extra=extra, clip=1.0, **EVALUATION)
    done = run(flags, stages, hooks="tests.faults:carry_payloads", timeout=120)
    for rank in done.ranks:
        arrived = rank.extra["arrived"]
        for where, stage in (("forward", 0), ("backward", stages - 1)):
            expected = 0 if rank.pipeline_rank == stage else trained * microbatches
            assert sum(kind == where for kind, *_ in arrived) == expected
    assert {a.batch for a in done.ranks[0].actions} == set(range(trained))


def test_data_of_another_microbatch_is_seen() -> None:
    with pytest.raises(RankError, match="labels of other data"):
        run(tiny_flags(2, 4, extra=rows.TWO_BW), 2, hooks="tests.faults:break_payloads")


@pytest.mark.parametrize("lam", [None, 1.0])
def test_skipped_iterations_count_no_update(lam: float | None) -> None:
    """The flushed loop on older weights skips the same iterations (cases 10 and 17)."""
    extra = ("--iterations-to-skip", "4", "5", "9")
    done = rows.plugin(2, 4, lam, extra=extra)
    assert done.ranks[0].versions[8, 0] == (7, 7), "batch 8 is the last of 9, and runs on V(7)"
    assert_bitwise(done, rows.fixture(2, 4, lam, extra=extra))


@pytest.mark.parametrize("stages", [2, 4])
def test_evaluation_changes_nothing_and_sees_the_newest_weights(stages: int) -> None:
    """Evaluation in the middle and at the end leaves pipeline state behind (case 9)."""

    def train(mode: str, *extra: str, **evaluation: int) -> object:
        flags = tiny_flags(stages, 4, clip=rows.CLIP, extra=extra, **evaluation)
        hook = "tests.faults:watch_evaluations"
        return run(flags, stages, mode, reference=rows.DELAYED, initial=rows.initial(), hooks=hook, timeout=120)

    without, evaluated = train("plugin", *rows.TWO_BW), train("plugin", *rows.TWO_BW, **EVALUATION)
    rows.assert_delayed(evaluated, 4)
    assert_bitwise(without, evaluated)
    reference = train("fixture", **EVALUATION)
    assert_bitwise(reference, evaluated)
    for rank, other in zip(evaluated.ranks, reference.ranks, strict=True):
        seen, expected = rank.extra["evaluations"], other.extra["evaluations"]
        assert len(seen) == len(expected) == 3  # iterations 5 and 10, and the end
        for (weights, losses), (newest, newest_losses) in zip(seen, expected, strict=True):
            compare_weights(weights, newest, f"rank {rank.rank}, weights of an evaluation")
            assert losses == newest_losses
        compare_weights(seen[-1][0], rank.final, "the last evaluation's weights")


def test_saving_changes_nothing(tmp_path: Path) -> None:
    """A checkpoint in the middle of a run, with in-flight activations (case 9)."""
    extra = ("--save", str(tmp_path), "--save-interval", "5", "--ckpt-format", "torch_dist")
    saved = rows.plugin(2, 4, 1.0, rows.CLIP, extra=extra)
    rows.assert_delayed(saved, 4)
    assert_bitwise(saved, rows.plugin(2, 4, 1.0, rows.CLIP))
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(rows.ITERATIONS)


def test_the_log_line_of_an_iteration_has_its_batchs_figures() -> None:
    """Losses missing off the last stage, or logged for the wrong iteration (case 15)."""
    done = rows.plugin(4, 4, 1.0, rows.CLIP)
    reference = rows.fixture(4, 4, 1.0, rows.CLIP)
    pattern = r"iteration +(\d+)/.*learning rate: (\S+) .*lm loss: (\S+) "
    lines = re.findall(pattern, done.ranks[-1].stdout)
    assert [int(k) for k, *_ in lines] == list(range(1, rows.ITERATIONS + 1))
    losses = list(reference.losses)
    losses[1] = (losses[0] + losses[1]) / 2  # Megatron logs the first loss and doesn't reset its sum
    assert [float(loss) for _, _, loss in lines] == pytest.approx(losses, rel=1e-6)  # 7 digits are printed
    # A step is finished in the iteration after its own, and the line there says so; the last one, in its own.
    norms = [
        (int(of or line), line, float(norm))
        for line, text in enumerate(re.findall(r"iteration +\d+/ .*", done.ranks[-1].stdout), start=1)
        for norm, of in re.findall(r"grad norm: (\S+) (?:\(iteration (\d+)\))?", text)
    ]
    assert sorted((of, line) for of, line, _ in norms) == [
        (of, min(of + 1, rows.ITERATIONS)) for of in range(1, rows.ITERATIONS + 1)
    ]
    assert [norm for *_, norm in sorted(norms)] == pytest.approx(reference.grad_norms, abs=5.1e-4)  # 3 decimals
    # Megatron logs the rate that the schedule has moved on to: that of the next step.
    rates = [float(rate) for _, rate, *_ in lines]
    assert rates[:-1] == pytest.approx(reference.learning_rates[1:], rel=1e-6)
    for rank in done.ranks[:-1]:
        assert rank.losses == [None] * rows.ITERATIONS
        assert "lm loss" not in rank.stdout


@pytest.mark.parametrize("stages", [2, 4])
def test_a_layer_that_saves_a_view_of_its_weight(stages: int) -> None:
    """``nn.Linear`` computes its gradient from overwritten weights, and no error is raised (cases 14 and 22)."""

    def train(mode: str, hook: str, *extra: str) -> object:
        flags = tiny_flags(stages, 4, extra=extra)
        return run(flags, stages, mode, reference=rows.DELAYED, hooks=f"tests.faults:{hook}", timeout=120)

    done = train("plugin", "add_linear", *rows.TWO_BW, "--asyncpp-check-versions")
    rows.assert_delayed(done, 4)
    reference = train("fixture", "add_linear")
    assert any(name.endswith("extra.weight") for name in done.ranks[0].final)
    assert_bitwise(done, reference)
    if stages == 2:
        wrong = train("plugin", "one_live_buffer_and_linear", *rows.TWO_BW)
        with pytest.raises(AssertionError, match="differ"):
            assert_bitwise(wrong, reference)


@pytest.mark.parametrize(
    ("fault", "message", "step"),
    [
        ("backward_on_the_newest", r"a backward uses .* of V\(\d+\), but its forward ran on V\(\d+\)", ()),
        ("one_live_buffer", r"a backward uses .* of V\(\d+\), but its forward ran on V\(\d+\)", ()),
        ("one_live_buffer", r"a forward on V\(\d+\) uses .* of V\(\d+\)", ("--asyncpp-blocking-step",)),
    ],
)
def test_the_debug_mode_stops_a_run_on_wrong_weights(fault: str, message: str, step: tuple[str, ...]) -> None:
    flags = tiny_flags(2, 4, extra=(*rows.TWO_BW, "--asyncpp-check-versions", *step))
    with pytest.raises(RankError, match=message):
        run(flags, 2, hooks=f"tests.faults:{fault}")


def test_the_debug_mode_changes_no_bit() -> None:
    checked = rows.plugin(2, 4, 1.0, extra=("--asyncpp-check-versions",))
    assert_bitwise(checked, rows.plugin(2, 4, 1.0))


def test_dropout_draws_the_same_masks_as_the_flushed_loop() -> None:
    """Forwards run in another order than in the flushed loop only across batches, and each stage draws for itself."""
    extra = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
    done, reference = rows.plugin(2, 4, extra=extra), rows.fixture(2, 4, extra=extra)
    rows.assert_delayed(done, 4)
    assert_bitwise(done, reference)
    assert done.losses != rows.plugin(2, 4).losses, "dropout was off"


def test_a_model_whose_forward_changes_a_buffer_is_refused_by_name() -> None:
    with pytest.raises(RankError, match=r"changes the buffer .*decoder\.layers\.0\.running"):
        run(tiny_flags(2, 4, extra=rows.TWO_BW), 2, hooks="tests.faults:add_running_mean")


def test_a_gradient_that_is_not_finite_stops_all_ranks() -> None:
    with pytest.raises(RankError) as error:
        run(tiny_flags(2, 4, extra=rows.TWO_BW), 2, hooks="tests.faults:poison_batch_three", timeout=60)
    codes = [rank.exit_code for rank in error.value.run.ranks]
    assert all(codes), f"a rank went on: {codes}"
    assert "NaN" in str(error.value) or "nan" in str(error.value)
    assert torch.isfinite(torch.tensor([x for x in error.value.run.losses if x is not None])).all()


def test_the_debug_mode_lists_attributes_that_change() -> None:
    flags = tiny_flags(2, 4, iterations=4, extra=(*rows.TWO_BW, "--asyncpp-check-versions"))
    says = r"a forward changes the tensor attribute (\S+\.layers\.\d+\.seen) \(of a TransformerLayer\)"
    for rank in run(flags, 2, hooks="tests.faults:add_attribute").ranks:
        assert len(set(re.findall(says, rank.stdout))) == 2  # its layers, each once
        assert len(re.findall(says, rank.stdout)) == 2
    for rank in run(flags, 2).ranks:
        assert not re.findall(says, rank.stdout)
