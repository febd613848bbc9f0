"""Layouts near to one that doesn't fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import log2

from megatron_asyncpp.errors import AsyncPPError
from megatron_asyncpp.planning.architecture import Architecture
from megatron_asyncpp.planning.flags import Request, schedule_of
from megatron_asyncpp.planning.layout import Layout
from megatron_asyncpp.planning.memory import memory

_TENSOR = (1, 2, 4, 8)  # within a node
_MORE_GPUS = tuple(2**n for n in range(7))


def nearest(request: Request, limit: float) -> Request | None:
    """The layout that fits and has the fewest doublings and halvings; on more GPUs if there is none on these.

    The batch stays as it is, in tokens.

    Args:
        request: what doesn't fit.
        limit: bytes of a GPU.
    """
    batch = request.microbatches * request.layout.data
    least = schedule_of(request.args).least_microbatches
    for factor in _MORE_GPUS:
        world = request.layout.world * factor
        found = sorted(_layouts(request.model, request.layout, world), key=lambda one: _distance(one, request.layout))
        for layout in found:
            if batch % layout.data or batch // layout.data < max(layout.pipeline, least(layout.pipeline)):
                continue
            changed = replace(request, layout=layout, microbatches=batch // layout.data)
            if max(row.total for row in memory(changed)) <= limit:
                return changed
    return None


def _layouts(model: Architecture, layout: Layout, world: int) -> Iterator[Layout]:
    layers = len(model.layers)
    experts = 1 if model.experts is None else model.experts.count
    same = {layout.pipeline: layout.stages}
    evenly = {pp: (layers // pp,) * pp for pp in range(1, layers + 1) if layers % pp == 0}
    for tensor, stages, expert in product(_TENSOR, (evenly | same).values(), _divisors(experts)):
        one = replace(
            layout,
            world=world,
            tensor=tensor,
            stages=stages,
            expert=expert,
            expert_tensor=1 if model.experts is not None else tensor,
            sequence_parallel=tensor > 1,
        )
        try:
            one.check(model)
        except AsyncPPError:
            continue
        yield one


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


def _distance(one: Layout, other: Layout) -> tuple[float, int]:
    """Doublings between two layouts; of equal ones the one with less tensor parallelism comes first."""
    sizes = ((one.tensor, other.tensor), (one.pipeline, other.pipeline), (one.expert, other.expert))
    return sum(abs(log2(a / b)) for a, b in sizes), one.tensor
