"""The messages of a plan: what each exchange of a stage carries, and to or from which stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron_asyncpp.schedules.actions import Action, Backward, Compute, Forward
from megatron_asyncpp.schedules.exchanges import Exchange, Payload, with_exchanges


class Message(NamedTuple):
    """One microbatch's activations or their gradients, from one stage to its neighbour."""

    sender: int
    receiver: int
    payload: Payload
    batch: int
    microbatch: int

    def __str__(self) -> str:
        what = "the output" if self.payload == "forward" else "the gradient"
        return f"{what} of microbatch {self.microbatch} of batch {self.batch}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """An ``Exchange`` that has a neighbour: one combined call. At least one of its messages isn't None.

    ``waits`` says whether the call returns when its messages are through; if not, it only posts them.
    """

    send: Message | None
    receive: Message | None
    waits: bool = True

    @property
    def messages(self) -> tuple[Message, ...]:
        """Both messages, or the one there is."""
        return tuple(message for message in (self.send, self.receive) if message is not None)


@dataclass(frozen=True, slots=True)
class Arrival:
    """The next computation waits for a message whose receive was only posted."""

    message: Message


Step = Action | Transfer | Arrival


def with_messages(stage: int, stages: int, actions: Iterable[Action], ahead: bool) -> Iterator[Step]:
    """The stage's actions and exchanges as the runtime executes them, and what each exchange carries.

    Exchanges with a neighbour that the first or the last stage doesn't have are left out, as the runtime does.

    Args:
        stage: s.
        stages: P.
        actions: of the stage.
        ahead: whether exchanges only post their messages, see ``with_exchanges``.
    """
    flow = list(with_exchanges(actions, ahead))
    made: Compute | None = None
    needs = {
        payload: iter([step for step in flow if isinstance(step, kind)])
        for payload, kind in (("forward", Forward), ("backward", Backward))
    }
    for step in flow:
        if isinstance(step, Exchange):
            send = receive = None
            if step.send is not None:
                assert made is not None
                to = stage + 1 if step.send == "forward" else stage - 1
                send = _message(stage, to, step.send, made, stages)
            if step.receive is not None:
                needed_by = next(needs[step.receive], None)  # a plan without its last Flush receives too much
                receive = None if needed_by is None else _received(stage, stages, needed_by)
            if send is not None or receive is not None:
                yield Transfer(send, receive, waits=not ahead)
        else:
            if isinstance(step, Compute):
                made = step
                if ahead and (message := _received(stage, stages, step)) is not None:
                    yield Arrival(message)
            yield step


def _received(stage: int, stages: int, needed_by: Compute) -> Message | None:
    """What a computation of the stage needs from a neighbour."""
    if isinstance(needed_by, Forward):
        return _message(stage - 1, stage, "forward", needed_by, stages)
    return _message(stage + 1, stage, "backward", needed_by, stages)


def _message(sender: int, receiver: int, payload: Payload, of: Compute, stages: int) -> Message | None:
    if not (0 <= sender < stages and 0 <= receiver < stages):
        return None
    return Message(sender, receiver, payload, of.batch, of.microbatch)
