"""How a schedule should do: simulated where it is a plan, from its paper's formula where it isn't."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction
from typing import Any

from megatron_asyncpp.schedules import SCHEDULES
from megatron_asyncpp.schedules.simulate import Simulation, simulate
from megatron_asyncpp.schedules.slowdown import FORMULAS

# In the order in which they are offered and listed: those that drain, then those that don't.
NAMES = ("1f1b", "interleaved", "zb1p", "dualpipe", "2bw-blocking", "2bw", "2bw-wide", "pipedream", "paci")


@dataclass(frozen=True)
class Prediction:
    """What to expect of a schedule.

    Attributes:
        schedule: its name, one of ``NAMES``.
        stages: P.
        microbatches: M.
        slowdown: time per batch against a pipeline without bubble.
        ideal: time per batch of such a pipeline, in the unit of the given times.
        source: "simulation", or where the formula is from.
        simulation: None if it is a formula.
    """

    schedule: str
    stages: int
    microbatches: int
    slowdown: float
    ideal: float
    source: str
    simulation: Simulation | None

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values. The slowdown is rounded; unrounded it is ``time_per_batch / ideal``."""
        values = {
            "schedule": self.schedule,
            "stages": self.stages,
            "microbatches": self.microbatches,
            "slowdown": float(three_decimals(self.slowdown)),
            "time_per_batch": self.slowdown * self.ideal,
            "ideal": self.ideal,
            "source": self.source,
        }
        if self.simulation is None:
            return values
        rows = [
            {
                "stage": stage,
                "idle": self.simulation.bubble[stage],
                "peak_activations": self.simulation.peak_activations[stage],
                "weight_versions": self.simulation.versions_alive[stage],
                "staleness": max(self.simulation.staleness[stage]),
                "drift": self.simulation.drift[stage],
            }
            for stage in range(self.stages)
        ]
        return values | {"time_per_batch": self.simulation.time_per_batch, "per_stage": rows}


def predict(
    name: str,
    stages: int,
    microbatches: int,
    forward: Sequence[Fraction],
    backward: Sequence[Fraction],
    latency: Fraction,
    step: Fraction,
    virtual_stages: int,
) -> Prediction:
    """Simulate a schedule, or take its formula.

    Args:
        name: of ``NAMES``.
        stages: P.
        microbatches: M.
        forward: time of a forward, for each stage; a formula takes the first for all.
        backward: the same of a backward.
        latency: of a message; a formula knows none.
        step: time of an optimizer step; a formula knows none.
        virtual_stages: model chunks on each stage, for interleaved 1F1B.
    """
    if name in FORMULAS:
        formula = FORMULAS[name]
        slowdown = formula.slowdown(stages, microbatches, float(backward[0] / forward[0]), virtual_stages)
        ideal = float(microbatches * (forward[0] + backward[0]))
        return Prediction(name, stages, microbatches, slowdown, ideal, f"formula of {formula.source}", None)
    result = simulate(
        SCHEDULES[name], stages, microbatches, forward=forward, backward=backward, latency=latency, step=step
    )
    return Prediction(name, stages, microbatches, result.slowdown, result.ideal, "simulation", result)


def three_decimals(value: float) -> str:
    """Rounded as papers do it, half up; Python's own formatting makes 1.312 of 1.3125."""
    return str(Decimal(repr(value)).quantize(Decimal("0.001"), ROUND_HALF_UP))
