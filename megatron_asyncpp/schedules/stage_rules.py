"""The rules that one stage's plan must keep by itself: order, versions of its weights, optimizer steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from megatron_asyncpp.schedules.actions import Action, Backward, Begin, Compute, Finish, Flush, Forward


def broken_rules(
    actions: Iterable[Action], first: int, versions: int, keeps_weights: bool
) -> Iterator[tuple[Action | None, str]]:
    """Each action that breaks a rule, with the rule; None for what is missing at the end.

    Args:
        actions: of one stage.
        first: the batch that the run starts with, on the weights V(first).
        versions: the size of the stage's ring. V(k + 1) overwrites V(k) if the plan says that it isn't needed any
            more, else the oldest version if the ring is full.
        keeps_weights: whether every backward must run on the weights of its forward.
    """
    stage = _Stage(first, versions, keeps_weights)
    for action in actions:
        for what in stage.does(action):
            yield action, what
    for what in stage.ends():
        yield None, what


class _Stage:
    def __init__(self, first: int, versions: int, keeps_weights: bool) -> None:
        self._first = first
        self._ring = versions
        self._keeps_weights = keeps_weights
        self._held = [first]  # the versions in the ring, the newest last
        self._call = first  # the batch whose backwards run now; the call ends with its Begin
        self._backwards = 0  # in this call
        self._begun: int | None = None  # the batch whose step is begun and not finished
        self._drained = False  # since the Flush of this call
        self._unsent = False  # whether the last computation's message is still to be sent
        self._last_forward: Forward | None = None
        self._in_flight: deque[Forward] = deque()

    def does(self, action: Action) -> Iterator[str]:
        match action:
            case Forward():
                yield from self._forward(action)
            case Backward():
                yield from self._backward(action)
            case Flush(batch):
                yield from self._flush(batch)
            case Begin(batch):
                yield from self._begin(batch)
            case Finish(batch, keeps):
                yield from self._finish(batch, keeps)

    def ends(self) -> Iterator[str]:
        for forward in self._in_flight:
            yield f"the forward of microbatch {forward.microbatch} of batch {forward.batch} has no backward"
        if self._backwards:
            yield f"the step of batch {self._call} is never begun"
        if self._begun is not None:
            yield f"the step of batch {self._begun} is never finished"
        if self._unsent:
            yield "the plan ends without a Flush, so its last message is never sent"

    def _forward(self, action: Forward) -> Iterator[str]:
        yield from self._computation(action)
        last, self._last_forward = self._last_forward, action
        place = (action.batch, action.microbatch)
        if last is None:
            if place != (self._first, 0):
                yield f"the first forward must be of microbatch 0 of batch {self._first}"
        elif place not in ((last.batch, last.microbatch + 1), (last.batch + 1, 0)):
            # The data iterator gives them in this order, and each once.
            yield f"it can't follow the forward of microbatch {last.microbatch} of batch {last.batch}"
        if action.batch < self._call:
            yield "the step of its batch has begun already"
        self._in_flight.append(action)

    def _backward(self, action: Backward) -> Iterator[str]:
        yield from self._computation(action)
        self._backwards += 1
        if not self._in_flight:
            yield "there is no forward whose backward it could be"
            return
        forward = self._in_flight.popleft()
        if (action.batch, action.microbatch) != (forward.batch, forward.microbatch):
            # The runtime keeps what is in flight in a queue.
            yield f"the next backward must be of microbatch {forward.microbatch} of batch {forward.batch}"
        elif self._keeps_weights and action.version != forward.version:
            yield f"its forward ran on V({forward.version})"
        if action.batch != self._call:
            yield f"its gradient would be added to those of batch {self._call}"

    def _computation(self, action: Compute) -> Iterator[str]:
        self._unsent = True
        if self._drained:
            yield f"it is between the flush and the step of batch {self._call}"
        if action.version < self._first or action.version > self._held[-1]:
            yield f"V({action.version}) doesn't exist; the newest is V({self._held[-1]})"
        elif action.version not in self._held:
            yield f"V({action.version}) was overwritten; the oldest left is V({self._held[0]})"

    def _flush(self, batch: int) -> Iterator[str]:
        if self._drained or batch != self._call or not self._backwards:
            yield f"the backwards that run here are of batch {self._call}, and it is flushed once, after them"
        for forward in self._in_flight:
            yield f"the forward of microbatch {forward.microbatch} of batch {forward.batch} is in flight"
        self._drained, self._unsent = True, False

    def _begin(self, batch: int) -> Iterator[str]:
        if batch != self._call:
            yield f"the next step to begin is that of batch {self._call}"
        elif not self._backwards:
            yield "no backward of its batch has run"
        if self._begun is not None:
            yield f"the step of batch {self._begun} isn't finished"
        for forward in self._in_flight:
            if forward.batch <= batch:
                yield f"the backward of microbatch {forward.microbatch} of batch {forward.batch} is still to come"
        self._call, self._begun = batch + 1, batch
        self._backwards, self._drained = 0, False

    def _finish(self, batch: int, keeps: bool) -> Iterator[str]:
        if batch != self._begun:
            yield "that step hasn't begun, or is finished already"
        self._begun = None
        overwritten = None
        if not keeps:
            overwritten = self._held.pop()
        elif len(self._held) == self._ring:
            overwritten = self._held.pop(0)
        self._held.append(batch + 1)
        for forward in self._in_flight if self._keeps_weights else ():
            if forward.version == overwritten:
                needs = f"the backward of microbatch {forward.microbatch} of batch {forward.batch}"
                yield f"it overwrites V({overwritten}), which {needs} still needs"
