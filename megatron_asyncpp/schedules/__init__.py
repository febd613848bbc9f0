"""Pipeline schedules as data, in pure Python: neither torch nor Megatron is imported here.

A schedule is a generator of actions for one stage. The runtime executes the very same generator that can be
validated, simulated and drawn. To add one, write the generator and name it in ``SCHEDULES``; what of these the
runtime can run is in ``megatron_asyncpp.arguments``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from megatron_asyncpp.schedules.actions import Action, Batch
from megatron_asyncpp.schedules.one_f_one_b import one_f_one_b
from megatron_asyncpp.schedules.paci import paci
from megatron_asyncpp.schedules.pipedream import pipedream
from megatron_asyncpp.schedules.two_bw import two_bw

Generator = Callable[[int, int, Iterable[Batch]], Iterator[Action]]


@dataclass(frozen=True)
class Schedule:
    """A schedule, as a generator of plans and what its runtime must provide.

    Attributes:
        generate: the actions of one stage, from ``(stage, stages, batches)``.
        delay: in optimizer steps, the age of the weights that a gradient is taken at; 0 drains the pipeline after
            each batch. Where stages step alone their ages differ, and 1 says only that nothing drains.
        versions: weight versions that a stage keeps, the size of its ring, from ``(stage, stages)``.
        steps_alone: whether a stage's optimizer step waits for no other stage. Nothing can be computed over all
            stages then, such as the gradient norm.
        keeps_weights: whether every backward runs on the weights of its forward.
        least_microbatches: the fewest that a batch must have, from P.
        ahead: whether a stage receives its inputs ahead of need, and waits for no send, see ``exchanges``.
    """

    generate: Generator
    delay: int
    versions: Callable[[int, int], int]
    steps_alone: bool = False
    keeps_weights: bool = True
    least_microbatches: Callable[[int], int] = lambda stages: 1
    ahead: bool = False


def _two_bw(blocking: bool, wide: bool) -> Schedule:
    return Schedule(
        partial(two_bw, blocking=blocking, wide=wide),
        delay=1,
        versions=lambda stage, stages: 2,
        least_microbatches=lambda stages: 2 * stages - 1 if wide else stages,
        ahead=wide,
    )


SCHEDULES = {
    "1f1b": Schedule(one_f_one_b, delay=0, versions=lambda stage, stages: 1),
    "2bw": _two_bw(blocking=False, wide=False),
    "2bw-blocking": _two_bw(blocking=True, wide=False),
    "2bw-wide": _two_bw(blocking=False, wide=True),
    "2bw-wide-blocking": _two_bw(blocking=True, wide=True),
    "pipedream": Schedule(pipedream, delay=1, versions=lambda stage, stages: stages - stage, steps_alone=True),
    "paci": Schedule(paci, delay=1, versions=lambda stage, stages: 1, steps_alone=True, keeps_weights=False),
}

__all__ = ["SCHEDULES", "Schedule"]
