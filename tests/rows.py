"""Runs that several tests compare, each trained once; and the check that the asynchronous schedule really ran."""

from __future__ import annotations

import functools
from typing import Any

from tests.harness.flags import tiny_flags
from tests.harness.reference import Reference
from tests.harness.results import Run, Weights
from tests.harness.run import run

ITERATIONS = 12
TWO_BW = ("--asyncpp-schedule", "2bw")
DELAYED = Reference(delay=1)
CLIP = 1.0  # below the norm of nearly every batch of these runs
MUON = (
    *("--optimizer", "muon", "--muon-momentum", "0.95", "--muon-nesterov", "--muon-coefficient-type", "simple"),
    *("--muon-scale-mode", "spectral", "--muon-extra-scale-factor", "0.2", "--muon-tp-mode", "duplicated"),
)


@functools.cache
def initial() -> Weights:
    """One set of initial weights for all shapes of pipeline, since Megatron's own seeds depend on the stage."""
    flags = tiny_flags(iterations=1)
    return run(flags, mode="oracle").merged("initial")


def feedback_flags(lam: float | None) -> tuple[str, ...]:
    return () if lam is None else ("--asyncpp-error-feedback", str(lam))


@functools.cache
def plugin(
    stages: int, microbatches: int, lam: float | None = None, clip: float = 0.0, extra: tuple = (), **kw: Any
) -> Run:
    """2BW in a pipeline of so many stages."""
    flags = tiny_flags(stages, microbatches, clip=clip, extra=(*TWO_BW, *feedback_flags(lam), *extra), **kw)
    return run(flags, world_size=stages, mode="plugin", initial=initial(), timeout=180)


@functools.cache
def oracle(microbatches: int, lam: float | None = None, clip: float = 0.0, extra: tuple = ()) -> Run:
    """The recursion, computed literally in one process."""
    reference = Reference(delay=1, error_feedback=lam)
    flags = tiny_flags(1, microbatches, clip=clip, extra=extra)
    return run(flags, mode="oracle", reference=reference, initial=initial(), timeout=180)


@functools.cache
def fixture(
    stages: int, microbatches: int, lam: float | None = None, clip: float = 0.0, extra: tuple = (), **kw: Any
) -> Run:
    """Megatron's own flushed loop on the older weights, of the same shape."""
    flags = tiny_flags(stages, microbatches, clip=clip, extra=extra, **kw)
    reference = Reference(delay=1, error_feedback=lam)
    return run(flags, world_size=stages, mode="fixture", reference=reference, initial=initial(), timeout=180)


def assert_delayed(done: Run, microbatches: int, iterations: int = ITERATIONS) -> None:
    """Every forward and backward of batch k ran on V(max(0, k-1)), on every rank, and leads really ran ahead."""
    expected = {(k, m): (max(0, k - 1), max(0, k - 1)) for k in range(iterations) for m in range(microbatches)}
    stages = 1 + max(rank.pipeline_rank for rank in done.ranks)
    for rank in done.ranks:
        assert rank.versions == expected, f"rank {rank.rank} ran on other versions: {rank.versions}"
        assert_lead(rank.actions, stages - 1 - rank.pipeline_rank, iterations)


def assert_lead(actions: list, lead: int, iterations: int) -> None:
    """Before each batch's step but the last, the stage ran ``lead`` forwards of the next batch."""
    for k in range(iterations):
        end = next(i for i, a in enumerate(actions) if a.kind == "Begin" and a.batch == k)
        ahead = sum(a.kind == "Forward" and a.batch == k + 1 for a in actions[:end])
        assert ahead == (lead if k + 1 < iterations else 0), f"{ahead} forwards of batch {k + 1} in call {k}"
