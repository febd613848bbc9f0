"""The messages of a plan: what each exchange of a stage carries, and to or from which stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron_asyncpp.schedules.actions import Action, Compute
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
    """An ``Exchange`` that has a neighbour: one combined call. At least one of its messages isn't None."""

    send: Message | None
    receive: Message | None

    @property
    def messages(self) -> tuple[Message, ...]:
        """Both messages, or the one there is."""
        return tuple(message for message in (self.send, self.receive) if message is not None)


def with_messages(stage: int, stages: int, actions: Iterable[Action]) -> Iterator[Action | Transfer]:
    """The stage's actions and exchanges as the runtime executes them, and what each exchange carries.

    Exchanges with a neighbour that the first or the last stage doesn't have are left out, as the runtime does.
    """
    flow = list(with_exchanges(actions))
    computations = [step for step in flow if isinstance(step, Compute)]
    done = 0
    for step in flow:
        if isinstance(step, Exchange):
            send = receive = None
            if step.send is not None:
                made = computations[done - 1]
                to = stage + 1 if step.send == "forward" else stage - 1
                send = _message(stage, to, step.send, made, stages)
            if step.receive is not None:
                needs = computations[done]
                source = stage - 1 if step.receive == "forward" else stage + 1
                receive = _message(source, stage, step.receive, needs, stages)
            if send is not None or receive is not None:
                yield Transfer(send, receive)
        else:
            done += isinstance(step, Compute)
            yield step


def _message(sender: int, receiver: int, payload: Payload, of: Compute, stages: int) -> Message | None:
    if not (0 <= sender < stages and 0 <= receiver < stages):
        return None
    return Message(sender, receiver, payload, of.batch, of.microbatch)
