"""Pipeline schedules as data, in pure Python: neither torch nor Megatron is imported here.

A schedule is a generator of actions for one stage. The runtime executes the very same generator that can be
printed, simulated and drawn. To add one, write the generator and name it in ``SCHEDULES``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from megatron_asyncpp.schedules.actions import Action, Batch
from megatron_asyncpp.schedules.one_f_one_b import one_f_one_b
from megatron_asyncpp.schedules.two_bw import two_bw

Generator = Callable[[int, int, Iterable[Batch]], Iterator[Action]]


@dataclass(frozen=True)
class Schedule:
    """A schedule, as a generator of plans and what its runtime must provide.

    Attributes:
        generate: the actions of one stage, from ``(stage, stages, batches)``.
        delay: in optimizer steps, the age of the weights that a gradient is taken at.
        versions: weight versions that a stage keeps, the size of its ring.
    """

    generate: Generator
    delay: int
    versions: int


SCHEDULES = {
    "1f1b": Schedule(one_f_one_b, delay=0, versions=1),
    "2bw": Schedule(two_bw, delay=1, versions=2),
    "2bw-blocking": Schedule(partial(two_bw, blocking=True), delay=1, versions=2),
}

__all__ = ["SCHEDULES", "Schedule"]
