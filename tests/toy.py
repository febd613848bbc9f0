"""A new schedule, as a user would add one: GPipe (arXiv:1811.06965), all forwards of a batch, then all backwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron_asyncpp.schedules import Schedule
from megatron_asyncpp.schedules.actions import Action, Backward, Batch, Begin, Finish, Flush, Forward


def gpipe(stage: int, stages: int, batches: Iterable[Batch]) -> Iterator[Action]:
    """The actions of one stage: the same on each."""
    for batch in batches:
        for microbatch in range(batch.microbatches):
            yield Forward(microbatch, batch.index, batch.version)
        for microbatch in range(batch.microbatches):
            yield Backward(microbatch, batch.index, batch.version)
        yield Flush(batch.index)
        yield Begin(batch.index)
        yield Finish(batch.index)


GPIPE = Schedule(gpipe, delay=0, versions=lambda stage, stages: 1)


def offer() -> None:
    """Make it a choice of --asyncpp-schedule (a hook of the harness)."""
    from megatron_asyncpp.arguments import RUNNABLE

    RUNNABLE["gpipe"] = GPIPE
