"""Runs that are interrupted and continued from a checkpoint, and the check that nothing shows it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import rows
from tests.harness.flags import tiny_flags
from tests.harness.results import Run, compare_weights
from tests.harness.run import run

SAVED_AT = 6  # of rows.ITERATIONS


@dataclass(frozen=True)
class Shape:
    """A run: its size, the flags on top of 2BW with Error Feedback, and options of tiny_flags as pairs."""

    stages: int = 2
    world: int = 2
    extra: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    lam: float | None = 1.0
    clip: float = 0.2
    asynchronous: bool = True
    microbatches: int = 4
    hook: str | None = field(default=None)

    def train(self, *more: str, hook: str | None = None, mode: Any = "plugin", check: bool = True) -> Run:
        """Train it, with more flags."""
        schedule = (*rows.TWO_BW, *rows.feedback_flags(self.lam)) if self.asynchronous else ()
        flags = tiny_flags(
            self.stages, self.microbatches, clip=self.clip, extra=(*schedule, *self.extra, *more), **dict(self.options)
        )
        return run(flags, self.world, mode, hooks=hook or self.hook, timeout=300, check=check)


@functools.cache
def control(shape: Shape) -> Run:
    """The run that is never interrupted, and never saves."""
    return shape.train()


def saving(folder: Path, every: int = SAVED_AT, kind: str = "torch_dist") -> tuple[str, ...]:
    """Flags to save into a folder."""
    return ("--save", str(folder), "--save-interval", str(every), "--ckpt-format", kind)


def loading(folder: Path, kind: str = "torch_dist", step: int | None = None) -> tuple[str, ...]:
    """Flags to continue from there, from the last checkpoint or another."""
    return ("--load", str(folder), "--ckpt-format", kind, *(() if step is None else ("--ckpt-step", str(step))))


def interrupted(shape: Shape, folder: Path, at: int = SAVED_AT, kind: str = "torch_dist", *more: str) -> Run:
    """A run that saves after so many iterations and leaves."""
    return shape.train(*saving(folder, at, kind), "--exit-interval", str(at), *more)


def assert_continued(whole: Run, second: Run, at: int, first: Run | None = None) -> None:
    """Losses, learning rates, all final weights and masters are the same bits, rank by rank.

    Args:
        whole: the control run.
        second: the one that was continued.
        at: the iteration that it starts with.
        first: the one that saved and left, if it left there.
    """
    for rank, ours in zip(whole.ranks, second.ranks, strict=True):
        assert len(ours.losses) == len(rank.losses) - at
        assert ours.losses == rank.losses[at:], f"losses differ: {rank.losses[at:]} and {ours.losses}"
        begun = len(rank.learning_rates) - len(ours.learning_rates)
        assert ours.learning_rates == rank.learning_rates[begun:], "learning rates differ"
        if first is not None:
            assert [*first.ranks[rank.rank].losses, *ours.losses] == rank.losses
            assert [*first.ranks[rank.rank].learning_rates, *ours.learning_rates] == rank.learning_rates
        assert ours.final.keys()
        compare_weights(rank.final, ours.final, f"rank {rank.rank}, final weights")
        compare_weights(rank.masters, ours.masters, f"rank {rank.rank}, fp32 masters")
    assert whole.last.losses[at:] == second.last.losses
    assert None not in second.last.losses


def assert_starts_on_stale(second: Run, at: int, microbatches: Sequence[int] = (0,)) -> None:
    """The first batch ran on V(at - 1), on every rank."""
    for rank in second.ranks:
        for microbatch in microbatches:
            assert rank.versions[at, microbatch] == (at - 1, at - 1), f"rank {rank.rank}: {rank.versions}"
