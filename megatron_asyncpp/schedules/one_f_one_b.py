"""1F1B with a flush after every batch: Megatron's own schedule (PipeDream-Flush, arXiv:2006.09503)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron_asyncpp.schedules.actions import Action, Backward, Batch, Begin, Finish, Flush, Forward


def one_f_one_b(stage: int, stages: int, batches: Iterable[Batch]) -> Iterator[Action]:
    """The actions of one stage (0 is first) in a pipeline of ``stages``, for consecutive batches."""
    for batch in batches:
        forwards = [Forward(m, batch.index, batch.version) for m in range(batch.microbatches)]
        lead = min(stages - 1 - stage, batch.microbatches)
        yield from forwards[:lead]
        for microbatch in range(batch.microbatches):
            yield from forwards[lead + microbatch : lead + microbatch + 1]
            yield Backward(microbatch, batch.index, batch.version)
        yield Flush(batch.index)
        yield Begin(batch.index, batch.delayed)
        yield Finish(batch.index)
