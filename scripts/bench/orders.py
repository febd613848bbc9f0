"""What a pipeline with several stages on each rank should take: the execution of each rank's order, on paper.

The plugin's simulator executes plans of one stage a rank, whose backward is one action. Interleaved 1F1B and the
schedules of ``torch.distributed.pipelining`` are orders of another kind, taken from torch itself: what is measured is
then compared with the very order that ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple


class Step(NamedTuple):
    """A computation: "F", "B", or the two parts of a backward, "I" for the inputs and "W" for the weights."""

    kind: str
    stage: int
    microbatch: int


def makespan(orders: Sequence[Sequence[Step]], times: Mapping[str, float], latency: float) -> float:
    """How long the ranks take for a batch, from nothing to nothing on the way.

    A forward needs the one of the stage before, and a backward (or its part "I") that of the stage after; a message
    between two ranks takes the latency, and its sender isn't held up.

    Args:
        orders: what each rank computes, in order.
        times: of each kind of step.
        latency: of a message, in the same unit.

    Raises:
        ValueError: the ranks wait for each other for ever.
    """
    owner = {step.stage: rank for rank, order in enumerate(orders) for step in order}
    last = max(owner)
    done: dict[tuple[str, int, int], float] = {}  # the kind without the distinction between "B" and "I"
    now, position = [0.0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                step = order[position[rank]]
                kind = "B" if step.kind == "I" else step.kind
                source = step.stage + {"F": -1, "B": 1}.get(kind, 0)
                if kind != "W" and 0 <= source <= last:
                    if (kind, source, step.microbatch) not in done:
                        break
                    wait = latency if owner[source] != rank else 0.0
                    now[rank] = max(now[rank], done[kind, source, step.microbatch] + wait)
                now[rank] += times[step.kind]
                done[kind, step.stage, step.microbatch] = now[rank]
                position[rank] += 1
                moved = True
    if any(position[rank] < len(order) for rank, order in enumerate(orders)):
        raise ValueError("the ranks wait for each other for ever")
    return max(now)


@cache
def torch_orders(schedule: str, ranks: int, microbatches: int) -> tuple[tuple[Step, ...], ...]:
    """What each rank computes under a schedule of ``torch.distributed.pipelining`` with two stages on each rank.

    Args:
        schedule: the name of its class.
        ranks: P.
        microbatches: M.
    """
    from torch.distributed import pipelining

    stages = [
        SimpleNamespace(group_size=ranks, group_rank=0, num_stages=2 * ranks, submod=None, stage_index=index)
        for index in (0, 1)
    ]
    made = getattr(pipelining, schedule)(stages, microbatches)
    return tuple(
        tuple(
            Step(action.computation_type.value, action.stage_index, action.microbatch_index)
            for action in made.pipeline_order[rank]
            if action is not None
        )
        for rank in range(ranks)
    )


def slowdown(schedule: str, ranks: int, microbatches: int, backward: float, latency: float) -> float:
    """Of such a schedule, with a flush after each batch, against a pipeline without bubble.

    Args:
        schedule: the name of torch's class; two stages a rank.
        ranks: P.
        microbatches: M.
        backward: B / F; half of it is for the inputs and half for the weights, where a backward has two parts.
        latency: of a message, in F of a whole rank.
    """
    times = {"F": 0.5, "B": backward / 2, "I": backward / 4, "W": backward / 4}
    return makespan(torch_orders(schedule, ranks, microbatches), times, latency) / (microbatches * (1 + backward))
