"""Where the messages of a plan go: the sends and receives between a stage's actions.

They follow from the plan alone, as in Megatron's 1F1B: a forward's output is sent as soon as it exists, and what
the next forward or backward needs is received just before it. Where a stage sends to the neighbour from which it
receives, both are one combined call, so that no pair of neighbours waits for each other with two sends. A schedule may
also have each input received one exchange ahead of that, so that nobody waits for its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_asyncpp.schedules.actions import Action, Compute, Finish, Flush, Forward

Payload = Literal["forward", "backward"]  # activations, to the next stage; their gradients, to the previous one


@dataclass(frozen=True, slots=True)
class Exchange:
    """One call of the communicator: send what the last action made, receive what is needed next, or both."""

    send: Payload | None
    receive: Payload | None


def with_exchanges(actions: Iterable[Action], ahead: bool = False) -> Iterator[Action | Exchange]:
    """The same actions with every ``Exchange`` in its place.

    Args:
        actions: of a stage.
        ahead: receive every input one exchange earlier than just before its forward. A stage then holds one that was
            received and one that is on its way, in the order in which the previous stage sends them.
    """
    return _ahead(_just_in_time(actions, waits=False)) if ahead else _just_in_time(actions, waits=True)


def _just_in_time(actions: Iterable[Action], waits: bool) -> Iterator[Action | Exchange]:
    """Receive just before a computation, and send just after one.

    A combined exchange comes before a ``Begin`` between its two computations, so the receive of a message is in the
    same call as its send, and between calls nothing is on the wire. A receive alone waits until the next computation:
    it follows a ``Flush``, after which nothing was sent ahead, or a computation of the same kind, as in a pipeline that
    drains over several batches, and the neighbour sends only in its next call.

    An exchange that waits comes after a ``Finish``. The input that is received is the first for the new weights, so the
    neighbour has just made its own step, and is late by as much: both steps take their time at once. After the exchange
    each stage's step would hold up all that follow, and an iteration would take P steps longer in place of one.

    The first and the last stage have a neighbour on one side only; their exchanges with the missing one are
    listed too, and are nothing to do.
    """
    made: Payload | None = None  # by the last computation, and not yet sent
    held: list[Action] = []
    for action in actions:
        if isinstance(action, Compute):
            needed = _payload(action)
            # A forward's output goes to the next stage, and a backward's gradient comes from there, so these two
            # share a neighbour, and the reverse pair shares the other. Two forwards in a row (or two backwards) don't.
            if made is not None and made != needed:
                while waits and held and isinstance(held[0], Finish):
                    yield held.pop(0)
                yield Exchange(made, needed)
                yield from held
            else:
                if made is not None:
                    yield Exchange(made, None)
                yield from held
                yield Exchange(None, needed)
            held.clear()
            yield action
            made = needed
        elif isinstance(action, Flush):
            if made is not None:
                yield Exchange(made, None)
            yield from held
            held.clear()
            made = None
            yield action
        elif made is None:
            yield action
        else:
            held.append(action)


def _ahead(flow: Iterator[Action | Exchange]) -> Iterator[Action | Exchange]:
    """Move every receive of an input to the place of the one before it.

    The neighbour sends an output before it waits for the gradient that this stage's next backward makes. With each
    input's receive ahead of that gradient's send, both stages have their messages in the same order.
    """
    held: list[Action | Exchange] = []  # from an exchange on that receives if another input is needed after its own
    for step in flow:
        if isinstance(step, Exchange) and step.receive == "forward":
            # The first of all is received in addition, and every other in the place of the one before it.
            yield from held or [Exchange(None, "forward")]
            held = [step]
        elif isinstance(step, Flush):
            if held and isinstance(last := held.pop(0), Exchange) and last.send is not None:
                yield Exchange(last.send, None)
            yield from held
            held = []
            yield step
        elif held:
            held.append(step)
        else:
            yield step
    yield from held


def _payload(action: Compute) -> Payload:
    return "forward" if isinstance(action, Forward) else "backward"
