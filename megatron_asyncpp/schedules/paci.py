"""PACI (arXiv:2606.07881): no flush and no second version; forward and backward each run on the newest weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron_asyncpp.schedules.actions import Action, Batch
from megatron_asyncpp.schedules.unflushed import unflushed


def paci(stage: int, stages: int, batches: Iterable[Batch]) -> Iterator[Action]:
    """The actions of one stage (0 is first) in a pipeline of ``stages``, for consecutive batches.

    A stage updates its one copy of the weights after every ``a`` backwards, where ``a`` is the batch's number of
    microbatches. A microbatch's backward runs ``P - 1 - s`` backwards later than its forward, so the weights drift
    by at most ``ceil((P - 1 - s) / a)`` updates in between; accumulation bounds it, by one update if M >= P - 1.
    """
    return unflushed(stage, stages, batches, keep_weights=False)
