"""A checkpoint after any iteration: at a change of schedule, an evaluation, a skipped update, a signal; elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.harness.results import assert_bitwise, compare_weights
from tests.resumes import (
    Shape,
    assert_continued,
    assert_starts_on_stale,
    control,
    interrupted,
    loading,
    saving,
)

DROPOUT = Shape(
    extra=("--hidden-dropout", "0.1", "--attention-dropout", "0.1"), options=(("eval_interval", 3), ("eval_iters", 1))
)
RAMP_UP = Shape(options=(("ramp_up", ((4, 3), (8, 3), (16, 3))),))
PARTS = Shape(extra=("--asyncpp-sync-start-iters", "4", "--asyncpp-sync-cooldown-iters", "3"))


def test_dropout_and_an_evaluation_where_it_is_saved(tmp_path: Path) -> None:
    """The generators are those of the next batch's first forward, which has run already when it is saved."""
    saver = DROPOUT.train(*saving(tmp_path, 3))
    assert_continued(control(DROPOUT), saver, 0)
    for step in (3, 6):  # two checkpoints in one folder
        second = DROPOUT.train(*loading(tmp_path, step=step))
        assert_starts_on_stale(second, step)
        assert_continued(control(DROPOUT), second, step)


def test_generators_after_the_lead_forwards_are_seen(tmp_path: Path) -> None:
    DROPOUT.train(*saving(tmp_path, 6), hook="tests.resume_faults:save_the_generators_as_they_are")
    with pytest.raises(AssertionError, match="differ"):
        assert_continued(control(DROPOUT), DROPOUT.train(*loading(tmp_path, step=6)), 6)


def test_generators_that_a_tracker_holds_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Transformer Engine's does."""
    from megatron.core import tensor_parallel

    from megatron_asyncpp.integration.checkpoint import random_states

    held = torch.Generator().manual_seed(5)
    tracker = type("Tracker", (), {"get_states": lambda self: {"model": held}})()
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    states = random_states()
    drawn = torch.rand(3, generator=held)
    assert torch.equal(torch.rand(3, generator=states["tracker"]["model"]), drawn)


@pytest.mark.parametrize("step", [3, *(pytest.param(step, marks=pytest.mark.slow) for step in (2, 6))])
def test_inside_a_batch_size_and_where_it_changes(step: int, tmp_path: Path) -> None:
    saver = RAMP_UP.train(*saving(tmp_path, step))
    assert_continued(control(RAMP_UP), saver, 0)
    second = RAMP_UP.train(*loading(tmp_path, step=step))
    assert_starts_on_stale(second, step)
    assert_continued(control(RAMP_UP), second, step)


@pytest.mark.parametrize(
    ("step", "first"),
    [
        pytest.param(3, 3, marks=pytest.mark.slow),  # synchronous
        (4, 4),  # the first delayed batch has no older weights
        pytest.param(5, 4, marks=pytest.mark.slow),
        pytest.param(8, 7, marks=pytest.mark.slow),
        pytest.param(9, 9, marks=pytest.mark.slow),  # the first of the cooldown
        pytest.param(10, 10, marks=pytest.mark.slow),
    ],
)
def test_around_synchronous_parts(step: int, first: int, tmp_path: Path) -> None:
    interrupted(PARTS, tmp_path, step)
    second = PARTS.train(*loading(tmp_path))
    assert second.ranks[0].versions[step, 0] == (first, first)
    assert_continued(control(PARTS), second, step)


def test_a_skipped_update_before_it(tmp_path: Path) -> None:
    """V(4) = V(3), and neither u nor the learning rate moved on."""
    skips = ("--asyncpp-skip-nonfinite", "--no-check-for-nan-in-loss-and-grad")
    run = Shape(extra=skips, hook="tests.faults:poison_batch_three")
    first = interrupted(run, tmp_path, 4)
    assert [len(rank.learning_rates) for rank in first.ranks] == [3, 3], "nothing was skipped"
    assert_continued(control(run), run.train(*loading(tmp_path)), 4, first)


def test_iterations_that_are_skipped_around_it(tmp_path: Path) -> None:
    run = Shape(extra=("--iterations-to-skip", "4", "5", "7"))
    interrupted(run, tmp_path, 6)
    second, whole = run.train(*loading(tmp_path)), control(run)
    assert second.last.losses == whole.last.losses[-len(second.last.losses) :]
    assert_continued(whole, second, len(whole.last.losses) - 5)  # of the 6 that are left one is skipped


@pytest.mark.parametrize(
    ("flag", "hook"),
    [
        (("--exit-signal-handler",), "get_a_signal_on_rank_1"),
        (("--exit-duration-in-mins", "50"), "end_after_an_hour_on_rank_1"),
    ],
    ids=["signal", "duration"],
)
def test_a_run_that_was_asked_to_leave(flag: tuple[str, ...], hook: str, tmp_path: Path) -> None:
    run = Shape()
    first = run.train(*saving(tmp_path, 1000), *flag, hook=f"tests.late_ranks:{hook}")
    assert len(first.losses) == 5
    assert_continued(control(run), run.train(*loading(tmp_path), *flag), 5, first)


@pytest.mark.slow
def test_messages_and_labels_after_it(tmp_path: Path) -> None:
    """Every stage's data goes on with the same sequences (case 10)."""
    run = Shape(4, 4, options=(("iterations", 8),))
    interrupted(run, tmp_path, 4)
    second = run.train(*loading(tmp_path), hook="tests.faults:carry_payloads")
    assert {a.batch for rank in second.ranks for a in rank.actions} == set(range(4, 8))
    for rank in second.ranks:
        for where, stage in (("forward", 0), ("backward", 3)):
            arrived = sum(kind == where for kind, *_ in rank.extra["arrived"])
            assert arrived == (0 if rank.pipeline_rank == stage else 16)


def test_evaluation_on_the_stale_weights(tmp_path: Path) -> None:
    """It runs on the weights before the newest, and changes nothing of the training."""
    evaluates = (("eval_interval", 5), ("eval_iters", 1))
    run = Shape(extra=("--asyncpp-eval-weights", "stale"), options=evaluates)
    seen = run.train(hook="tests.faults:watch_evaluations")
    assert_continued(control(Shape()), seen, 0)
    stale, newest = (interrupted(Shape(), tmp_path / str(at), at) for at in (4, 5))
    for rank, older, newer in zip(seen.ranks, stale.ranks, newest.ranks, strict=True):
        (at_five, _), _, (at_the_end, _) = rank.extra["evaluations"]
        compare_weights(at_five, older.final, "weights of an evaluation")
        with pytest.raises(AssertionError, match="differ"):
            compare_weights(at_five, newer.final, "weights of an evaluation")
        compare_weights(at_the_end, rank.final, "where none are older")


def test_the_banner_says_what_is_made_of_a_checkpoint(tmp_path: Path) -> None:
    """lam, the correction and the schedule may change, and a plain run's checkpoint starts an asynchronous one."""
    shorter = Shape(options=(("iterations", 8),), lam=None)
    plain = Shape(options=(("iterations", 8),), asynchronous=False)
    plain.train(*saving(tmp_path / "plain", 4), "--exit-interval", "4", mode="megatron")

    def says(run: Shape, folder: Path, *more: str) -> str:
        done = run.train(*loading(folder), *more)
        assert len(done.last.losses) == 4
        says.versions = done.ranks[0].versions  # type: ignore[attr-defined]
        return " ".join(re.findall(r"megatron_asyncpp: (.*)", done.ranks[0].stdout))

    text = says(shorter, tmp_path / "plain", "--asyncpp-error-feedback")
    assert "continues a checkpoint at iteration 4, saved by a run without a schedule" in text
    assert "the checkpoint has no stale weights: W(4) = V(4)" in text
    assert "previous update of each weight: not in what was loaded, so it starts at zero" in text
    assert says.versions[4, 0] == says.versions[5, 0] == (4, 4)  # type: ignore[attr-defined]
    interrupted(Shape(options=shorter.options), tmp_path / "own", 4, "torch")
    text = says(Shape(options=shorter.options, lam=0.5), tmp_path / "own", "--ckpt-format", "torch")
    assert "saved by schedule 2bw, Error Feedback lambda 1" in text
    assert "previous update of each weight: restored" in text
    assert "stale weights are restored: W(4) = V(3)" in text
    text = says(shorter, tmp_path / "own", "--ckpt-format", "torch", "--asyncpp-delay-compensation", "0.1")
    assert "previous update of each weight: dropped, since no correction of this run uses it" in text
    text = says(shorter, tmp_path / "own", "--ckpt-format", "torch", "--asyncpp-schedule", "1f1b")
    assert "W(4)" not in text


@pytest.mark.parametrize("kind", ["torch_dist", "torch"])
def test_plain_megatron_opens_it(kind: str, tmp_path: Path) -> None:
    """Weights and optimizer are those of a run that was never asynchronous but for its weights."""
    run = Shape()
    first = interrupted(run, tmp_path, 6, kind)
    load = loading(tmp_path, kind)
    plain = Shape(asynchronous=False).train(*load, mode="megatron")
    own = Shape(asynchronous=False).train(*load, "--asyncpp-schedule", "1f1b")
    for saved, opened in zip(first.ranks, plain.ranks, strict=True):
        compare_weights(saved.final, opened.initial, "weights that plain Megatron starts from")
    assert len(plain.last.losses) == 6
    assert_bitwise(plain, own)
