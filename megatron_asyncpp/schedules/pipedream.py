"""The original PipeDream (arXiv:1806.03377): an update after every microbatch, and a version for each in flight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from megatron_asyncpp.schedules.actions import Action, Batch
from megatron_asyncpp.schedules.unflushed import unflushed


def pipedream(stage: int, stages: int, batches: Iterable[Batch]) -> Iterator[Action]:
    """The actions of one stage (0 is first) in a pipeline of ``stages``, for consecutive batches.

    A forward runs on the stage's newest weights, and its backward on the same (weight stashing, section 3.3). With
    ``P - 1 - s`` forwards ahead these are as many updates old when the gradient is applied, and the stage keeps
    ``P - s`` versions. The paper's minibatch, after which the weights are updated, is one microbatch here: each
    microbatch of the given batches is a batch of its own in the plan.
    """
    return unflushed(stage, stages, _single_microbatches(batches), keep_weights=True)


def _single_microbatches(batches: Iterable[Batch]) -> Iterator[Batch]:
    index: int | None = None
    for batch in batches:
        index = batch.index * batch.microbatches if index is None else index
        for microbatch in range(batch.microbatches):
            last = microbatch + 1 == batch.microbatches
            yield replace(batch, index=index, microbatches=1, version=index, flush=batch.flush and last)
            index += 1
