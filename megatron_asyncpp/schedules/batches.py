"""Which weights each batch runs on: the one place where the delay of a schedule is decided."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from megatron_asyncpp.schedules.actions import Batch


def batches(
    first: int, last: int, microbatches: int, delay: int, skipped: Collection[int] = frozenset()
) -> Iterator[Batch]:
    """The batches of Megatron's iterations ``first`` to ``last - 1``, in order.

    Delay 0 is synchronous training, W(k) = V(k), and drains after every batch. Delay 1 is PipeDream-2BW
    (arXiv:2006.09503), W(k) = V(k-1), and drains only where the next iteration trains nothing: at the end, and
    before one to be skipped. The first batch of a run has no older weights than the ones it starts with, so the
    first two batches both run on those.

    A batch's index counts updates, as V does; it is the iteration's number unless one was skipped before it.

    Args:
        first: the iteration that the run starts with.
        last: one past the last iteration, Megatron's ``train_iters``.
        microbatches: M, the same for every batch.
        delay: in optimizer steps, 0 or 1.
        skipped: iterations whose data Megatron throws away without training on it.
    """
    index = first
    for iteration in range(first, last):
        if iteration in skipped:
            continue
        drains = delay == 0 or iteration + 1 == last or iteration + 1 in skipped
        yield Batch(index, microbatches, version=max(first, index - delay), flush=drains)
        index += 1
