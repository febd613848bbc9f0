"""How a stage's messages travel, over Megatron's P2PCommunicator: in calls that wait, or posted ahead of need."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, NamedTuple, override

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_asyncpp.schedules.exchanges import Exchange, Payload


class Wire(ABC):
    """The two neighbours of a stage, of which the first and the last stage lack one."""

    def __init__(self, group: Any, config: Any) -> None:
        """Wire it up.

        Args:
            group: the pipeline's.
            config: Megatron's.
        """
        self._communicator = P2PCommunicator(pp_group=group, config=config)

    @property
    def is_first(self) -> bool:
        """Whether there is no stage before this one."""
        return bool(self._communicator.is_pp_first_stage)

    @property
    def is_last(self) -> bool:
        """Whether there is no stage after this one."""
        return bool(self._communicator.is_pp_last_stage)

    @abstractmethod
    def exchange(self, exchange: Exchange, made: Any, shapes: Any) -> None:
        """Send what the last action made, and receive what is needed next, or some time later.

        Args:
            exchange: what of it.
            made: output tensors, or gradients of input tensors.
            shapes: of what is received, as Megatron's ``get_tensor_shapes`` gives them.
        """

    @abstractmethod
    def take(self, payload: Payload) -> Any:
        """What the next forward (or backward) needs; with no neighbour to send it, what Megatron passes then."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until everything that was sent has left this stage."""


class CombinedCalls(Wire):
    """As Megatron's 1F1B does it: a call returns when its messages are through, and they are needed at once."""

    def __init__(self, group: Any, config: Any) -> None:
        """See ``Wire``."""
        super().__init__(group, config)
        self._received: Any = None

    @override
    def exchange(self, exchange: Exchange, made: Any, shapes: Any) -> None:
        wire, first, last = self._communicator, self.is_first, self.is_last
        match exchange:
            case Exchange(None, "forward"):
                self._received = wire.recv_forward(shapes, first)
            case Exchange(None, "backward"):
                self._received = wire.recv_backward(shapes, last)
            case Exchange("forward", None):
                wire.send_forward(made, last)
            case Exchange("backward", None):
                wire.send_backward(made, first)
            case Exchange("forward", "backward"):
                self._received = wire.send_forward_recv_backward(made, shapes, last)
            case Exchange("backward", "forward"):
                self._received = wire.send_backward_recv_forward(made, shapes, first)

    @override
    def take(self, payload: Payload) -> Any:
        received, self._received = self._received, None
        return received

    @override
    def settle(self) -> None:
        pass


class _Sent(NamedTuple):
    """A message on its way. The tensor is kept, as its memory may not be used again before."""

    tensor: torch.Tensor
    work: Any


class PostedAhead(Wire):
    """A call only posts its messages: a receive is waited for when it is needed, a send before the next of its kind.

    On both ends of a pair of neighbours the plan posts the messages in one order, so they may share a queue.
    """

    def __init__(self, group: Any, config: Any) -> None:
        """See ``Wire``."""
        single = copy.copy(config)
        single.batch_p2p_comm = False  # Megatron waits for a batch of messages as a whole
        super().__init__(group, single)
        self._sent: dict[Payload, _Sent] = {}
        self._coming: dict[Payload, deque[tuple[torch.Tensor, Any]]] = {"forward": deque(), "backward": deque()}

    @override
    def exchange(self, exchange: Exchange, made: Any, shapes: Any) -> None:
        send, receive = exchange.send, exchange.receive
        if not self._has_neighbour(send, sends=True):
            send = None
        if not self._has_neighbour(receive, sends=False):
            receive = None
        if send is None and receive is None:
            return
        (shape,) = shapes  # a model that sends several tensors is none of Megatron's GPT models
        tensor = None
        if send is not None:
            if send in self._sent:
                self._sent.pop(send).work.wait()
            # Of its own, as Megatron empties an output once it was sent.
            tensor = _only(made).detach()
        before, after, works = self._communicator._communicate(
            tensor_send_next=tensor if send == "forward" else None,
            tensor_send_prev=tensor if send == "backward" else None,
            recv_prev=receive == "forward",
            recv_next=receive == "backward",
            tensor_shape=shape,
            wait_on_reqs=False,
        )
        if send is not None and tensor is not None:
            self._sent[send] = _Sent(tensor, works["send_next" if send == "forward" else "send_prev"])
        if receive == "forward":
            self._coming[receive].append((before, works["recv_prev"]))
        elif receive == "backward":
            self._coming[receive].append((after, works["recv_next"]))

    @override
    def take(self, payload: Payload) -> Any:
        if not self._has_neighbour(payload, sends=False):
            return [None]
        tensor, work = self._coming[payload].popleft()
        work.wait()
        return [tensor]

    @override
    def settle(self) -> None:
        for sent in self._sent.values():
            sent.work.wait()
        self._sent.clear()

    def _has_neighbour(self, payload: Payload | None, sends: bool) -> bool:
        """Outputs go to the next stage and their gradients come from there; inputs come from the previous one."""
        if payload is None:
            return False
        return not (self.is_last if (payload == "forward") == sends else self.is_first)


def _only(tensors: Any) -> torch.Tensor:
    (tensor,) = tensors if isinstance(tensors, list) else (tensors,)
    assert isinstance(tensor, torch.Tensor)
    return tensor
