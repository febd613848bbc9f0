"""Batch ramp-up, synchronous start and cooldown against the oracle: losses and weights bitwise, rates and samples."""

from __future__ import annotations

import re

import pytest

from tests import rows
from tests.harness.flags import tiny_flags
from tests.harness.reference import Reference
from tests.harness.results import Run, assert_bitwise
from tests.harness.run import run

RAMP_UP = ((4, 3), (8, 3), (16, 3))  # (microbatches, iterations)
TRANSITIONS = {
    "ramp-up": (RAMP_UP, 0, 0),
    "start": ((), 4, 0),
    "cooldown": ((), 0, 3),
    "all three": (RAMP_UP, 2, 2),
    "start inside a ramp-up step": (((2, 4), (4, 5)), 5, 0),  # M < P is all right while it is synchronous
}


def train(mode: str, stages: int, ramp_up: tuple, start: int, cooldown: int, lam: float | None = 1.0) -> Run:
    extra: tuple[str, ...] = ()
    if mode == "plugin":
        extra = (*rows.TWO_BW, *rows.feedback_flags(lam))
        extra += ("--asyncpp-sync-start-iters", str(start), "--asyncpp-sync-cooldown-iters", str(cooldown))
    reference = Reference(delay=1, error_feedback=lam, sync_start=start, sync_cooldown=cooldown)
    flags = tiny_flags(stages, 4, ramp_up=ramp_up, extra=extra)
    return run(flags, stages, mode, reference=reference, initial=rows.initial(), timeout=180)


def assert_versions(done: Run, start: int, cooldown: int) -> None:
    """Each batch's forwards and backwards ran on W(k) of DESIGN.md, on every rank."""
    for rank in done.ranks:
        batches = 1 + max(a.batch for a in rank.actions)
        for (k, _), versions in rank.versions.items():
            expected = k if k < start or k >= batches - cooldown else max(start, k - 1)
            assert versions == (expected, expected), f"batch {k}"
        delayed = {a.batch for a in rank.actions if a.kind == "Forward" and a.version < a.batch}
        assert delayed, "the run was synchronous"


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", TRANSITIONS)
def test_a_transition_is_the_recursion(name: str, stages: int) -> None:
    ramp_up, start, cooldown = TRANSITIONS[name]
    done, reference = (
        train("plugin", stages, ramp_up, start, cooldown),
        train("oracle", 1, ramp_up, start, cooldown),
    )
    assert_versions(done, start, cooldown)
    assert_bitwise(done, reference)
    assert done.learning_rates == pytest.approx(reference.learning_rates, rel=1e-12)
    expected, consumed = [], 0
    for count, iterations in ramp_up or ((4, rows.ITERATIONS),):
        for _ in range(iterations):
            consumed += count
            expected.append(consumed)
    logged = re.findall(r"consumed samples: +(\d+)", done.ranks[-1].stdout)
    assert [int(samples) for samples in logged] == expected


def test_plain_delay_through_all_transitions() -> None:
    done, reference = train("plugin", 2, RAMP_UP, 2, 2, lam=None), train("oracle", 1, RAMP_UP, 2, 2, lam=None)
    assert_versions(done, 2, 2)
    assert_bitwise(done, reference)


def test_the_comparison_sees_a_transition_one_iteration_off() -> None:
    done = train("plugin", 2, (), 4, 3)
    for start, cooldown in ((3, 3), (5, 3), (4, 2), (4, 4)):
        with pytest.raises(AssertionError, match="differ"):
            assert_bitwise(done, train("oracle", 1, (), start, cooldown))
