"""PipeDream-2BW (arXiv:2006.09503): one forward, one backward, and no flush between batches.

A stage runs ``P - 1 - s`` forwards ahead of its backwards, as in 1F1B, but the forwards that it runs ahead of a
batch's last backwards are those of the next batch. So the pipeline never drains, and a stage needs two weight
versions: that of the batch whose backwards it runs, and that of the batch whose forwards it has started.

With this tight lead neighbours wait for each other's messages: a stage's input leaves the previous one only when that
has had the gradient of two microbatches before. With twice the lead it leaves two microbatches earlier, so a message
may take as long as a forward and a backward on its two ways together. That costs ``P - 1 - s`` microbatches more of
activations, and two versions still do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron_asyncpp.schedules.actions import Action, Backward, Batch, Begin, Finish, Flush, Forward


def two_bw(
    stage: int, stages: int, batches: Iterable[Batch], blocking: bool = False, wide: bool = False
) -> Iterator[Action]:
    """The actions of one stage (0 is first) in a pipeline of ``stages``, for consecutive batches.

    A step is finished as late as it can be: just before the stage's first forward on the new weights, or before the
    next step begins. Whatever all stages must agree on (the gradient norm) has the time in between to arrive. On the
    last stage, which runs nothing ahead, the older weights aren't needed any more by then: it steps in place.

    Args:
        stage: s.
        stages: P.
        batches: each of at least P microbatches, or 2P - 1 with a wide lead. With one less the first stage needs the
            new weights as soon as it has begun to make them, and with less still it runs forwards of the batch after
            next, whose weights don't exist yet.
        blocking: finish each step as soon as it is begun. The weights are the same; all stages wait for each other.
        wide: run twice as many forwards ahead.
    """
    lead = (stages - 1 - stage) * (2 if wide else 1)
    upcoming = iter(batches)
    batch = next(upcoming, None)
    forwards: list[Forward] = []  # that are still to be run, of this batch and the lead ones of the next
    primed = False  # whether the lead forwards of this batch ran already
    begun: Batch | None = None  # whose step is still to be finished
    while batch is not None:
        following = next(upcoming, None)
        forwards += _forwards(batch, lead if primed else 0, batch.microbatches)
        if not batch.flush and following is not None:
            forwards += _forwards(following, 0, lead)
        if not primed:
            yield from forwards[:lead]
            del forwards[:lead]
        for microbatch in range(batch.microbatches):
            if forwards:
                if begun is not None and forwards[0].version > begun.index:
                    yield Finish(begun.index)
                    begun = None
                yield forwards.pop(0)
            yield Backward(microbatch, batch.index, batch.version)
        if batch.flush:
            yield Flush(batch.index)
        if begun is not None:
            yield Finish(begun.index, keeps=False)  # all that ran on V(begun) is through
        yield Begin(batch.index, batch.delayed)
        begun = batch
        if blocking or batch.flush:
            yield Finish(batch.index, keeps=following is not None and following.version <= batch.index)
            begun = None
        primed = not batch.flush
        batch = following


def _forwards(batch: Batch, start: int, stop: int) -> list[Forward]:
    return [Forward(microbatch, batch.index, batch.version) for microbatch in range(start, stop)]
