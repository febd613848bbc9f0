"""What the bench compares: how each variant runs, where it can, and the slowdown that theory gives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_asyncpp.schedules import SCHEDULES
from megatron_asyncpp.schedules.simulate import simulate
from scripts.bench import orders

# B / F: a backward computes the gradients of inputs and of weights, each as much work as the forward.
BACKWARD = 2.0

# Why P stages can't run M microbatches, or None.
Obstacle = Callable[[int, int], str | None]


@dataclass(frozen=True)
class Variant:
    """One way to run the same pipeline.

    Attributes:
        theory: the slowdown against a pipeline without bubble, from P, M and the latency of a message in F.
        obstacle: why it can't run with so many stages and microbatches.
        flags: of Megatron and of the plugin; none leaves both as they are.
        peer: the class in ``torch.distributed.pipelining`` that runs it in place of Megatron, or None.
        chunks: of the model on each stage.
    """

    theory: Callable[[int, int, float], float]
    obstacle: Obstacle = lambda stages, microbatches: None
    flags: tuple[str, ...] = ()
    peer: str | None = None
    chunks: int = 1


def _simulated(schedule: str) -> Callable[[int, int, float], float]:
    def theory(stages: int, microbatches: int, latency: float) -> float:
        return simulate(
            SCHEDULES[schedule], stages, microbatches, forward=1.0, backward=BACKWARD, latency=latency
        ).slowdown

    return theory


def _ordered(schedule: str) -> Callable[[int, int, float], float]:
    def theory(stages: int, microbatches: int, latency: float) -> float:
        return orders.slowdown(schedule, stages, microbatches, BACKWARD, latency)

    return theory


def _enough_for(schedule: str) -> Obstacle:
    def obstacle(stages: int, microbatches: int) -> str | None:
        least = SCHEDULES[schedule].least_microbatches(stages)
        return None if microbatches >= least else f"it needs M >= {least}"

    return obstacle


def _whole_rounds(stages: int, microbatches: int) -> str | None:
    if stages < 2:
        return "it needs at least two stages"
    return None if microbatches % stages == 0 else f"M has to be a multiple of P = {stages}"


def _two_stages(stages: int, microbatches: int) -> str | None:
    return None if stages > 1 else "it needs at least two stages"


def _as_many_as_stages(stages: int, microbatches: int) -> str | None:
    return _two_stages(stages, microbatches) or (
        None if microbatches >= stages else f"torch refuses fewer microbatches than stages, P = {stages}"
    )


_2BW = ("--asyncpp-schedule", "2bw")

VARIANTS = {
    "1f1b": Variant(_simulated("1f1b")),
    "interleaved": Variant(
        _ordered("ScheduleInterleaved1F1B"),
        _whole_rounds,
        ("--num-virtual-stages-per-pipeline-rank", "2"),
        chunks=2,
    ),
    "2bw-blocking": Variant(
        _simulated("2bw-blocking"), _enough_for("2bw-blocking"), (*_2BW, "--asyncpp-blocking-step")
    ),
    "2bw": Variant(_simulated("2bw"), _enough_for("2bw"), _2BW),
    "2bw-wide": Variant(_simulated("2bw-wide"), _enough_for("2bw-wide"), (*_2BW, "--asyncpp-lead", "wide")),
    "torch-1f1b": Variant(_simulated("1f1b"), _as_many_as_stages, peer="Schedule1F1B"),
    "torch-zb": Variant(
        _ordered("ScheduleInterleavedZeroBubble"), _whole_rounds, peer="ScheduleInterleavedZeroBubble", chunks=2
    ),
}
