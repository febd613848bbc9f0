"""Does a pipeline's plan come to its end, or do its stages wait for each other?

Communication is modelled as the runtime does it, with nothing to help a wrong plan along:

- an exchange is one combined call (``batch_isend_irecv``, one NCCL group). Its send and its receive progress
  independently of each other, and the call returns when both are done;
- a channel has no capacity: a send is done when its receive was posted, and not before;
- a call that only posts its messages returns at once, but for a send whose predecessor isn't done: there is one
  buffer for it. What was posted is waited for by the computation that needs it;
- between an ordered pair of stages there is one order, that of the calls;
- ``Finish(k)`` waits for ``Begin(k)`` of all stages, whose gradient norms it needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence

from megatron_asyncpp.schedules.actions import Begin, Finish
from megatron_asyncpp.schedules.channels import Arrival, Message, Step, Transfer


def stuck_stages(flows: Sequence[Sequence[Step]], steps_alone: bool) -> list[tuple[int, Step, str]]:
    """Execute all stages as far as they get.

    Args:
        flows: each stage's actions and transfers. On every channel the sends must be in the order of the receives,
            or this would take one message for another.
        steps_alone: whether ``Finish`` waits for no other stage.

    Returns:
        For each stage that doesn't reach its end: the stage, where it stands, and whom it waits for. Empty if all do.
    """
    posted: Counter[Message] = Counter()  # by how many of its two ends
    begun: list[set[int]] = [set() for _ in flows]
    running = {
        stage: _run(stage, flow, posted, begun, waits=not steps_alone) for stage, flow in enumerate(flows) if flow
    }
    positions: dict[int, int] = {}
    moved = True
    while moved:
        moved = False
        for stage, execution in list(running.items()):
            position = next(execution, None)
            moved |= position != positions.get(stage, -1)
            if position is None:
                del running[stage]
                positions.pop(stage, None)
            else:
                positions[stage] = position
    return [
        (stage, flows[stage][position], _reason(stage, flows[stage][position], posted, begun))
        for stage, position in positions.items()
    ]


def _run(
    stage: int, flow: Sequence[Step], posted: Counter[Message], begun: list[set[int]], waits: bool
) -> Generator[int]:
    """Execute one stage, yielding its position whenever it can't go on."""
    sent: dict[int, Message] = {}  # last to each neighbour, without a wait
    for position, step in enumerate(flow):
        if isinstance(step, Transfer | Arrival):
            awaited: Sequence[Message] = ()
            if isinstance(step, Arrival):
                awaited = [step.message]
            elif step.waits:
                posted.update(step.messages)
                awaited = step.messages
            else:
                if step.send is not None:
                    while (last := sent.get(step.send.receiver)) is not None and posted[last] < 2:
                        yield position
                    sent[step.send.receiver] = step.send
                posted.update(step.messages)
            while any(posted[message] < 2 for message in awaited):
                yield position
        elif isinstance(step, Begin):
            begun[stage].add(step.batch)
        elif isinstance(step, Finish) and waits:
            while not all(step.batch in batches for batches in begun):
                yield position


def _reason(stage: int, step: Step, posted: Counter[Message], begun: list[set[int]]) -> str:
    if isinstance(step, Transfer | Arrival):
        messages = step.messages if isinstance(step, Transfer) else (step.message,)
        missing = [message for message in messages if posted[message] < 2]
        return "it waits for ever " + " and ".join(
            f"to send {message} to stage {message.receiver}"
            if message.sender == stage
            else f"to receive {message} from stage {message.sender}"
            for message in missing
        )
    assert isinstance(step, Finish)
    others = [str(other) for other, batches in enumerate(begun) if step.batch not in batches]
    return f"it waits for ever for the same step to begin on stage {', '.join(others)}"
