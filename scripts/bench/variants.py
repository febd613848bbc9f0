"""What the bench compares: the flags of each variant, and the slowdown that theory gives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_asyncpp.schedules import slowdown

# B / F: a backward computes the gradients of inputs and of weights, each as much work as the forward.
BACKWARD = 2.0


@dataclass(frozen=True)
class Variant:
    """One way to run the same pipeline.

    Attributes:
        flags: of the plugin; none leaves Megatron as it is.
        theory: the slowdown against a pipeline without bubble, from P and M.
        delayed: whether gradients are a step old, which takes M >= P.
    """

    flags: tuple[str, ...]
    theory: Callable[[int, int], float]
    delayed: bool


VARIANTS = {
    "1f1b": Variant((), slowdown.one_f_one_b, delayed=False),
    "2bw-blocking": Variant(
        ("--asyncpp-schedule", "2bw", "--asyncpp-blocking-step"),
        lambda stages, microbatches: slowdown.two_bw_blocking(stages, microbatches, BACKWARD),
        delayed=True,
    ),
    "2bw": Variant(("--asyncpp-schedule", "2bw"), lambda stages, microbatches: 1.0, delayed=True),
}
