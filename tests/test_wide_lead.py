"""The wide lead in Megatron's real loop: the very numbers of the tight one, with twice as many forwards run ahead."""

from __future__ import annotations

from typing import Any

import pytest

from tests import rows
from tests.harness.flags import tiny_flags
from tests.harness.results import RankResult, Run, assert_bitwise
from tests.harness.run import RankError, run
from tests.resumes import Shape, assert_continued, control, interrupted, loading

WIDE = ("--asyncpp-lead", "wide")


def train(stages: int, *more: str, microbatches: int | None = None, **options: object) -> Run:
    microbatches = microbatches or 2 * stages - 1  # as few as it takes
    return rows.plugin(stages, microbatches, 1.0, rows.CLIP, extra=(*WIDE, *more), **options)


def assert_wide(done: Run, stages: int, iterations: int = rows.ITERATIONS) -> None:
    assert f"schedule 2bw, wide lead: P = {stages} stages" in done.ranks[0].stdout
    for rank in done.ranks:
        rows.assert_lead(rank.actions, 2 * (stages - 1 - rank.pipeline_rank), iterations)
        assert all(versions == (max(0, k - 1),) * 2 for (k, _), versions in rank.versions.items())


@pytest.mark.parametrize("stages", [2, 4])
def test_it_is_the_recursion(stages: int) -> None:
    done = train(stages)
    assert_wide(done, stages)
    assert_bitwise(done, rows.oracle(2 * stages - 1, 1.0, rows.CLIP))


@pytest.mark.slow
def test_it_is_the_flushed_loop_on_older_weights_with_muon_in_bf16() -> None:
    done = train(2, *rows.MUON, microbatches=4, bf16=True)
    assert_wide(done, 2)
    assert_bitwise(done, rows.fixture(2, 4, 1.0, rows.CLIP, extra=rows.MUON, bf16=True))


def test_a_step_in_two_halves_is_the_blocking_one() -> None:
    assert_bitwise(train(2), train(2, "--asyncpp-blocking-step"))


def watch_the_wire(result: RankResult) -> None:
    """Hook: at every evaluation, how many messages of this stage have not left it."""
    from megatron.training import training

    from megatron_asyncpp.integration.run import current

    evaluate = training.evaluate
    result.extra["unsent"] = unsent = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        if (run_ := current()) is not None:
            unsent.append(len(run_.pipeline._wire._sent))
        return evaluate(*args, **kwargs)

    training.evaluate = watched


def test_between_iterations_others_may_use_the_wire() -> None:
    # Evaluations send over the same group, between messages that are only posted.
    options = {"eval_interval": 3, "eval_iters": 2}
    evaluated = run(
        tiny_flags(3, 5, layers=3, extra=(*rows.TWO_BW, *rows.feedback_flags(1.0), *WIDE), **options),
        3,
        hooks=watch_the_wire,
        timeout=180,
    )
    plain = run(tiny_flags(3, 5, layers=3, extra=(*rows.TWO_BW, *rows.feedback_flags(1.0))), 3, timeout=180)
    assert "validation loss at iteration 9" in evaluated.last.stdout
    assert [rank.extra["unsent"] for rank in evaluated.ranks] == [[0] * 4] * 3  # after iterations 3, 6, 9 and 12
    assert_bitwise(evaluated, plain)


def test_a_continued_run_is_the_uninterrupted_one(tmp_path) -> None:
    shape = Shape(extra=WIDE)
    first = interrupted(shape, tmp_path)
    assert_continued(control(shape), shape.train(*loading(tmp_path)), 6, first)
    assert_continued(control(Shape()), shape.train(*loading(tmp_path)), 6)  # and it is that of the tight lead


def test_an_input_that_is_used_before_it_arrived_is_seen() -> None:
    flags = tiny_flags(2, 3, clip=rows.CLIP, extra=(*rows.TWO_BW, *rows.feedback_flags(1.0), *WIDE))
    with pytest.raises((AssertionError, RankError), match="differ|NaN"):
        early = run(flags, 2, initial=rows.initial(), hooks="tests.faults:take_what_has_not_arrived")
        assert_bitwise(early, rows.oracle(3, 1.0, rows.CLIP))
