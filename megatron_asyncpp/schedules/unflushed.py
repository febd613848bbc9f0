"""One forward, one backward on the newest weights, without a flush: what PipeDream and PACI have in common."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from megatron_asyncpp.schedules.actions import Action, Backward, Batch, Begin, Finish, Flush, Forward


class _InFlight(NamedTuple):
    batch: Batch
    microbatch: int
    version: int


def unflushed(stage: int, stages: int, batches: Iterable[Batch], keep_weights: bool) -> Iterator[Action]:
    """The actions of one stage (0 is first) in a pipeline of ``stages``, for consecutive batches.

    A stage runs up to ``P - 1 - s`` forwards ahead of its backwards, of however many batches that takes, and drains
    only where a batch says so. It steps by itself, as soon as it has a batch's gradients, and waits for nobody.
    The versions that the batches name are ignored: a stage's newest weights are its own affair.

    Args:
        stage: s.
        stages: P.
        batches: of any number of microbatches each.
        keep_weights: run a backward on the weights of its forward, else on the newest ones as well.
    """
    lead = stages - 1 - stage
    upcoming = ((batch, microbatch) for batch in batches for microbatch in range(batch.microbatches))
    in_flight: deque[_InFlight] = deque()
    newest: int | None = None
    draining = False
    while True:
        # One forward more than the lead, for the backward below: one at a time, but after a drain all of them.
        while not draining and len(in_flight) <= lead and (following := next(upcoming, None)) is not None:
            batch, microbatch = following
            newest = batch.index if newest is None else newest
            in_flight.append(_InFlight(batch, microbatch, newest))
            yield Forward(microbatch, batch.index, newest)
            draining = batch.flush and microbatch + 1 == batch.microbatches
        if not in_flight:
            return
        batch, microbatch, version = in_flight.popleft()
        assert newest is not None
        yield Backward(microbatch, batch.index, version if keep_weights else newest)
        if microbatch + 1 == batch.microbatches:
            if batch.flush:
                yield Flush(batch.index)
                draining = False
            yield Begin(batch.index, batch.delayed)
            yield Finish(batch.index)
            newest = batch.index + 1
