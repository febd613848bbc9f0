"""Which weights each batch runs on, and where the pipeline drains: the one place where a run's delay is decided."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import repeat
from typing import NamedTuple

from megatron_asyncpp.schedules.actions import Batch


class _Iteration(NamedTuple):
    number: int
    microbatches: int
    synchronous: bool


def batches(
    first: int,
    last: int,
    microbatches: int | Iterable[int],
    delay: int,
    *,
    older: bool = False,
    skipped: Collection[int] = frozenset(),
    sync_start: int = 0,
    sync_cooldown: int = 0,
) -> Iterator[Batch]:
    """The batches of Megatron's iterations ``first`` to ``last - 1``, in order.

    A synchronous batch runs on the newest weights, W(k) = V(k), and the pipeline drains before and after it. With
    delay 1 (PipeDream-2BW, arXiv:2006.09503) W(k) = V(k-1), and the pipeline drains only where the next iteration is
    synchronous, has another number of microbatches, is skipped, or doesn't come. The first delayed batch has no
    older weights than the ones it starts with: W(N) = W(N+1) = V(N). To drain changes no weights.

    A batch's index counts updates, as V does; it is the iteration's number unless one was skipped before it.

    Args:
        first: the iteration that the run starts with.
        last: one past the last iteration, Megatron's ``train_iters``.
        microbatches: M of each iteration from ``first`` on, skipped ones included; or one M for all. It is read one
            iteration ahead of the batches that are asked for.
        delay: in optimizer steps, 0 or 1.
        older: whether V(first - 1) is there as well, in a run that is continued. The first batch runs on it unless it
            is synchronous, or the first one after the synchronous start.
        skipped: iterations whose data Megatron throws away without training on it.
        sync_start: iterations before this one are synchronous.
        sync_cooldown: the last so many iterations are synchronous.
    """
    counts = repeat(microbatches) if isinstance(microbatches, int) else iter(microbatches)
    iterations = (
        _Iteration(number, count, delay == 0 or number < sync_start or number >= last - sync_cooldown)
        for number, count in zip(range(first, last), counts, strict=False)
    )
    index, oldest = first, first - 1 if older and first > sync_start else None
    iteration = next(iterations, None)
    while iteration is not None:
        following = next(iterations, None)
        if iteration.number not in skipped:
            if iteration.synchronous:
                version = index
            else:
                oldest = index if oldest is None else oldest
                version = max(oldest, index - 1)
            yield Batch(
                index,
                iteration.microbatches,
                version,
                _drains(iteration, following, skipped),
                delayed=not iteration.synchronous,
            )
            index += 1
        iteration = following


def _drains(iteration: _Iteration, following: _Iteration | None, skipped: Collection[int]) -> bool:
    return (
        following is None
        or following.number in skipped
        or iteration.synchronous
        or following.synchronous
        or following.microbatches != iteration.microbatches
    )
