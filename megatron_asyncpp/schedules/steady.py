"""The time per batch of a pipeline that has settled."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def steady_time(batches: Sequence[Sequence[int]], tail: int) -> Fraction | None:
    """The time per batch, exactly, or None if the pipeline hasn't settled.

    Every time in a plan's execution is a maximum of sums of earlier ones. Such a system ends up periodic: from some
    batch on, each takes place a constant time after the one a period before it. As no time depends on a batch
    more than ``tail`` batches back, it stays so once ``tail`` consecutive batches did.

    Args:
        batches: for each batch, when each of its backwards ended on each stage, as whole multiples of some unit.
        tail: batches to leave out at the end, where the pipeline drains, and how far back a time depends on others.
    """
    end = len(batches) - tail
    for period in range(1, end - tail + 1):
        shift = batches[end - 1][0] - batches[end - 1 - period][0]
        if all(
            later - earlier == shift
            for i in range(end - tail, end)
            for earlier, later in zip(batches[i - period], batches[i], strict=True)
        ):
            return Fraction(shift, period)
    return None
