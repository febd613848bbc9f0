"""The optimizer step in two halves: the same bits as in one piece, whatever happens between them."""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import rows
from tests.harness.flags import tiny_flags
from tests.harness.reference import Reference
from tests.harness.results import Run, assert_bitwise
from tests.harness.run import RankError, run
from tests.test_topologies import TOPOLOGIES, Topology

BLOCKING = ("--asyncpp-blocking-step",)
HARD = 0.005  # a fiftieth of nearly every gradient norm, or less
ITERATIONS = 8


def train(row: Topology, *more: str, hook: str | None = None) -> Run:
    extra = (*row.extra, *row.plugin_only, *rows.TWO_BW, *rows.feedback_flags(1.0), *more)
    shape = {**row.flags, "eval_interval": 3, "eval_iters": 1}
    flags = tiny_flags(row.stages, 4, iterations=ITERATIONS, clip=HARD, extra=extra, **shape)
    return run(flags, row.world, hooks=hook, timeout=180)


# One of each kind of parallelism, optimizer, precision and overlap. The others are slow, and each deferred row is
# compared with the flushed loop in any case.
PAIRED = (
    *("pp4", "tp2 pp2 sequence parallel", "tied dp2 pp2 distributed", "dp2 pp2 distributed muon bf16"),
    "dp2 pp2 distributed overlap-param-gather",
)


@pytest.mark.parametrize(
    "name", [name if name in PAIRED else pytest.param(name, marks=pytest.mark.slow) for name in TOPOLOGIES]
)
def test_deferred_is_blocking(name: str) -> None:
    """With clipping hard, evaluations in between, and one stage late by 0 to 200 ms at every step."""
    row = TOPOLOGIES[name]
    deferred, blocking = train(row, hook="tests.late_ranks:delay_one_stage"), train(row, *BLOCKING)
    rows.assert_delayed(deferred, 4, ITERATIONS)
    assert max(deferred.grad_norms) > 50 * HARD, "clipping wasn't hard"
    assert_bitwise(deferred, blocking)
    assert deferred.grad_norms == blocking.grad_norms
    for rank, other in zip(deferred.ranks, blocking.ranks, strict=True):
        order, at_once = ([a.kind for a in r.actions if a.kind in ("Begin", "Finish")] for r in (rank, other))
        assert at_once == ["Begin", "Finish"] * ITERATIONS
        # The last one flushes: it is finished at once, after the one before it.
        assert order == ["Begin"] + ["Finish", "Begin"] * (ITERATIONS - 1) + ["Finish"]
        finishes = [i for i, a in enumerate(rank.actions) if a.kind == "Finish" and a.batch == 1]
        begins = [i for i, a in enumerate(rank.actions) if a.kind == "Begin" and a.batch == 1]
        assert finishes[0] > begins[0] + 2, "nothing came between the halves"


@pytest.mark.parametrize("evaluates", [False, True])
def test_the_last_stage_steps_in_place(evaluates: bool) -> None:
    """It gets a second buffer only when a step has to be finished early, as for an evaluation."""
    extra = {"eval_interval": 3, "eval_iters": 1} if evaluates else {}
    flags = tiny_flags(2, 4, iterations=6, extra=rows.TWO_BW, **extra)
    done = run(flags, 2, hooks="tests.late_ranks:delay_one_stage")
    assert [rank.extra["slots"] for rank in done.ranks] == [2, 1 + evaluates]


@pytest.mark.parametrize("optimizer", [(), rows.MUON], ids=["adam", "muon"])
def test_without_a_wait_the_masters_step_at_begin(optimizer: tuple[str, ...]) -> None:
    """In bf16 without clipping nothing is waited for: no gradient is copied, and the bits are the same."""
    flags = tiny_flags(2, 4, bf16=True, extra=(*rows.TWO_BW, *rows.feedback_flags(1.0), *optimizer))
    done = run(flags, 2, hooks="tests.late_ranks:delay_one_stage", initial=rows.initial())
    assert [rank.extra["holds gradients"] for rank in done.ranks] == [False, False]
    reference = rows.fixture(2, 4, 1.0, 0.0, extra=optimizer, bf16=True)
    assert_bitwise(done, reference)
    assert done.grad_norms == reference.grad_norms
    assert done.ranks[0].learning_rates == reference.ranks[0].learning_rates


SKIP = ("--asyncpp-skip-nonfinite", "--no-check-for-nan-in-loss-and-grad")


@pytest.mark.parametrize("step", [(), BLOCKING], ids=["deferred", "blocking"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_gradient_that_is_not_finite_skips_one_update_everywhere(stages: int, step: tuple[str, ...]) -> None:
    """One gradient on the first stage alone is a NaN: V(4) = V(3), and neither u nor the learning rate moves on."""
    hook = "tests.faults:poison_batch_three"
    flags = tiny_flags(
        stages, 4, clip=rows.CLIP, extra=(*rows.TWO_BW, *rows.feedback_flags(1.0), "--log-interval", "2", *SKIP, *step)
    )
    done = run(flags, stages, hooks=hook, initial=rows.initial())
    assert [rank.skipped for rank in done.ranks] == [[3]] * stages
    reference = Reference(delay=1, error_feedback=1.0, skipped=frozenset({3}))
    expected = run(
        tiny_flags(1, 4, clip=rows.CLIP), mode="oracle", reference=reference, initial=rows.initial(), timeout=180
    )
    assert_bitwise(done, expected)
    of_updates = [rate for k, rate in enumerate(expected.learning_rates) if k != 3]
    assert done.ranks[0].learning_rates == pytest.approx(of_updates, rel=1e-12)
    log = done.ranks[-1].stdout
    assert log.count("update skipped, gradients not finite: iteration 4 (1 so far)") == 1


def test_zeros_are_counted_as_megatron_does() -> None:
    def counts(done: Run) -> list[int]:
        return [int(float(n)) for n in re.findall(r"num zeros: (\d+)", done.ranks[-1].stdout)]

    extra = ("--log-num-zeros-in-grad",)
    for shape in ({}, {"data_parallel": 2}, {"tensor": 2}):
        flags = tiny_flags(2, 4, iterations=5, clip=rows.CLIP, extra=(*rows.TWO_BW, *extra), **shape)
        world = 2 * shape.get("data_parallel", 1) * shape.get("tensor", 1)
        done = run(flags, world)
        plain = run(
            tiny_flags(2, 4, iterations=5, clip=rows.CLIP, extra=extra, **shape),
            world,
            "fixture",
            reference=rows.DELAYED,
        )
        assert any(counts(plain))
        assert sorted(counts(done)) == sorted(counts(plain))


@pytest.mark.parametrize(
    ("flag", "hook", "says"),
    [
        (("--exit-signal-handler",), "get_a_signal_on_rank_1", "exiting program after receiving SIGTERM"),
        (("--exit-duration-in-mins", "50"), "end_after_an_hour_on_rank_1", "exiting program after "),
    ],
    ids=["signal", "duration"],
)
def test_all_ranks_leave_after_the_same_iteration(flag: tuple, hook: str, says: str, tmp_path: Path) -> None:
    """One rank alone asks for it in iteration 4; all have agreed by the end of the next one, and save."""
    save = ("--save", str(tmp_path), "--save-interval", "1000", "--ckpt-format", "torch_dist")
    flags = tiny_flags(2, 4, extra=(*rows.TWO_BW, *flag, *save))
    done = run(flags, 2, hooks=f"tests.late_ranks:{hook}")
    begun = [[a.batch for a in rank.actions if a.kind == "Begin"] for rank in done.ranks]
    assert begun == [[0, 1, 2, 3, 4]] * 2
    assert says in done.ranks[0].stdout + done.ranks[-1].stdout
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "5"


@pytest.mark.parametrize("kind", ["die", "hang"])
def test_a_rank_that_is_gone_stops_the_others_with_a_message(kind: str) -> None:
    flags = tiny_flags(2, 4, clip=rows.CLIP, extra=rows.TWO_BW)
    with pytest.raises(RankError) as failed:
        run(flags, 2, hooks=f"tests.late_ranks:{kind}_before_batch_three_on_rank_1", timeout=100)
    assert "no end after" not in str(failed.value)
    assert all(rank.exit_code for rank in failed.value.run.ranks)
    if kind == "hang":  # the others of a rank that dies may notice it at the next message already
        assert "the gradient norm of batch 3 did not arrive from all ranks" in str(failed.value)


class Sum:
    """A sum that is under way until it is told that it is over."""

    over = False

    def is_completed(self) -> bool:
        return self.over

    def wait(self) -> None:
        assert self.over, "it was waited for"


def test_what_was_begun_goes_on_each_time_it_is_asked() -> None:
    """On a GPU the second sum is started by an ask, between two messages, after the first is over."""
    from megatron_asyncpp.runtime.agreement import Agreement
    from megatron_asyncpp.runtime.step import TwoHalfStep

    first, second, started = Sum(), Sum(), []

    def sums() -> Generator[Sum, None, float]:
        for one in (first, second):
            started.append(one)
            yield one
        return 5.0

    step = object.__new__(TwoHalfStep)
    step._begun = None
    step.poll()
    step._begun = SimpleNamespace(what=SimpleNamespace(batch=0), agreement=Agreement(sums()))
    step.poll()
    assert started == [first]
    first.over = True
    step.poll()
    assert started == [first, second]
    assert not step._begun.agreement.reached
    second.over = True
    step.poll()
    assert step._begun.agreement.reached
    assert step._begun.agreement.wait() == 5.0
