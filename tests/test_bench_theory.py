"""What theory says of the bench's variants, and the execution on paper of orders that torch gives the ranks."""

from __future__ import annotations

from fractions import Fraction

import pytest

from megatron_asyncpp.schedules import SCHEDULES, slowdown
from megatron_asyncpp.schedules.actions import Backward as BackwardAction
from megatron_asyncpp.schedules.actions import Batch, Compute, Forward
from megatron_asyncpp.schedules.one_f_one_b import one_f_one_b
from megatron_asyncpp.schedules.simulate import simulate
from scripts.bench import orders
from scripts.bench.orders import Step
from scripts.bench.variants import VARIANTS


@pytest.mark.parametrize(
    ("stages", "theory"),
    [
        (4, {"1f1b": 1.75, "interleaved": 1.375, "2bw-blocking": 1.5, "2bw": 1.0, "torch-1f1b": 1.75}),
        (8, {"1f1b": 1.875, "interleaved": 1.4375, "2bw-blocking": 19 / 12, "2bw": 1.0, "torch-1f1b": 1.875}),
    ],
)
def test_theory(stages: int, theory: dict[str, float]) -> None:
    assert {name: VARIANTS[name].theory(stages, stages, 0.0) for name in theory} == pytest.approx(theory)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (4, 8), (8, 8)])
def test_interleaved_on_paper_is_its_formula(stages: int, microbatches: int) -> None:
    found = orders.slowdown("ScheduleInterleaved1F1B", stages, microbatches, 2.0, 0.0)
    assert found == pytest.approx(slowdown.interleaved(stages, microbatches, 2))


def test_zero_bubble_on_paper_by_hand() -> None:
    # P = M = 2, two stages a rank, every step 1/2: rank 0 is busy for 12 steps and waits for one, for rank 1's last
    # forward to become a gradient.
    assert orders.slowdown("ScheduleInterleavedZeroBubble", 2, 2, 2.0, 0.0) == pytest.approx(13 / 12)


@pytest.mark.parametrize("latency", [0.0, 0.2, 1.5])
def test_orders_take_as_long_as_the_simulator_says(latency: float) -> None:
    stages, microbatches = 4, 6
    rows = [
        [
            Step("F" if isinstance(action, Forward) else "B", stage, action.microbatch)
            for action in one_f_one_b(stage, stages, [Batch(0, microbatches, 0, False)])
            if isinstance(action, Forward | BackwardAction)
        ]
        for stage in range(stages)
    ]
    simulated = simulate(
        SCHEDULES["1f1b"], stages, microbatches, forward=1, backward=2, latency=Fraction(latency).limit_denominator(10)
    )
    ends = [span.end for span in simulated.spans if isinstance(span.action, Compute) and span.action.batch == 0]
    assert orders.makespan(rows, {"F": 1, "B": 2}, latency) == pytest.approx(max(ends))


def test_orders_that_never_end_are_noticed() -> None:
    backward_first = [[Step("B", 0, 0), Step("F", 0, 0)], [Step("F", 1, 0), Step("B", 1, 0)]]
    with pytest.raises(ValueError, match="for ever"):
        orders.makespan(backward_first, {"F": 1, "B": 2}, 0)
