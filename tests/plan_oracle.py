"""Executes plans as the runtime does, with real buffers and mailboxes, and knows none of the validator's rules.

Whatever this trains on is a right plan: every microbatch's gradient was computed on the right weights and went into
the right update. Whatever it doesn't is broken. So a test can decide of any mangled plan whether it is still right.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from megatron_asyncpp.schedules import Schedule
from megatron_asyncpp.schedules.actions import Action, Backward, Begin, Finish, Flush, Forward
from megatron_asyncpp.schedules.exchanges import Exchange, with_exchanges


class Broken(Exception):
    """The plan can't be executed, or it trains something else."""


def require(held: bool, what: str) -> None:
    if not held:
        raise Broken(what)


class Oracle:
    """A pipeline that is to train on the given data, and to make one update after each of the given batches."""

    def __init__(self, schedule: Schedule, data: Sequence[tuple[int, int]]) -> None:
        self.schedule = schedule
        self.data = list(data)  # (batch, microbatch) in order
        self.batches = sorted({batch for batch, _ in data})
        self.offered: dict[tuple[int, int], list[tuple[object, int]]] = {}  # sends that are posted, and in which call
        self.wanted: dict[tuple[int, int], list[int]] = {}  # receives that are posted, in which call
        self.arrived: dict[tuple[int, int], list[object]] = {}
        self.queues: dict[tuple[int, int], list[bool]] = {}  # of (a stage, its neighbour): whether down the pipeline
        self.begun: list[set[int]] = []

    def run(self, plans: Sequence[Sequence[Action]]) -> None:
        self.begun = [set() for _ in plans]
        running = {s: self.stage(s, len(plans), plan) for s, plan in enumerate(plans)}
        idle = 0
        while running:
            for s, execution in list(running.items()):
                state = next(execution, "end")
                idle = idle + 1 if state == "wait" else 0
                if state == "end":
                    del running[s]
            require(idle <= 2 * len(plans), "deadlock")
        require(not any([*self.offered.values(), *self.wanted.values()]), "something is left on the wire")
        require(not any(self.arrived.values()), "something was received and is not needed")
        for (s, neighbour), queue in self.queues.items():
            # On a GPU what is only posted is done in this order, on either end.
            theirs = self.queues.get((neighbour, s), [])
            require(not self.schedule.ahead or queue == theirs, "in another order on the other end")

    def deliver(self, source: int, to: int) -> None:
        """Hand over whatever both ends have posted."""
        offered, wanted = self.offered.setdefault((source, to), []), self.wanted.setdefault((source, to), [])
        while offered and wanted:
            message, call = offered.pop(0)
            require(call == wanted.pop(0), "on the wire between calls")
            self.arrived.setdefault((source, to), []).append(message)

    def stage(self, s: int, stages: int, plan: Sequence[Action]) -> Generator[str]:
        ring = self.schedule.versions(s, stages)
        held = [self.batches[0]]  # the versions in the ring
        data, steps = iter(self.data), iter(self.batches)
        queue: list[tuple[int, int, int]] = []
        gradients: list[tuple[int, int]] = []
        made: object = None
        ahead = self.schedule.ahead
        pending: int | None = None
        calls = 0
        for step in with_exchanges(plan, ahead):
            match step:
                case Exchange(send, receive):
                    to = s + 1 if send == "forward" else s - 1
                    source = s - 1 if receive == "forward" else s + 1
                    sends = send is not None and 0 <= to < stages
                    receives = receive is not None and 0 <= source < stages
                    for neighbour in (s - 1, s + 1):
                        down = [neighbour > s] if sends and to == neighbour else []
                        down += [neighbour < s] if receives and source == neighbour else []
                        self.queues.setdefault((s, neighbour), []).extend(sorted(down, reverse=True))
                    while ahead and sends and self.offered.get((s, to)):
                        yield "wait"  # one send at a time
                    if sends:
                        self.offered.setdefault((s, to), []).append((made, calls))
                        self.deliver(s, to)
                    if receives:
                        require(ahead or not self.arrived.get((source, s)), "two receives in a row")
                        self.wanted.setdefault((source, s), []).append(calls)
                        self.deliver(source, s)
                    yield "moved"
                    while not ahead and ((sends and self.offered[s, to]) or (receives and self.wanted[source, s])):
                        yield "wait"
                case Forward(microbatch, batch, version):
                    require(next(data, None) == (batch, microbatch), "not the data that come next")
                    inbox = yield from self.received(s - 1, s)
                    require(s == 0 or inbox == ("F", batch, microbatch), "wrong input")
                    require(version in held, "not the weights")
                    queue.append((batch, microbatch, version))
                    made = ("F", batch, microbatch)
                case Backward(microbatch, batch, version):
                    require(bool(queue), "nothing in flight")
                    of = queue.pop(0)
                    require(of[:2] == (batch, microbatch), "another microbatch's activations")
                    inbox = yield from self.received(s + 1, s)
                    require(s == stages - 1 or inbox == ("B", batch, microbatch), "wrong gradient")
                    require(version == of[2] or not self.schedule.keeps_weights, "other weights than the forward's")
                    require(version in held, "not the weights")
                    gradients.append((batch, microbatch))
                    made = ("B", batch, microbatch)
                case Flush():
                    require(not queue, "flushed with forwards in flight")
                case Begin(batch):
                    require(pending is None, "two steps at once")
                    require(next(steps, None) == batch, "not the step that comes next")
                    require(gradients == [d for d in self.data if d[0] == batch], "not this batch's gradients")
                    gradients, pending, calls = [], batch, calls + 1
                    self.begun[s].add(batch)
                case Finish(batch, keeps):
                    require(pending == batch, "no such step")
                    while not self.schedule.steps_alone and not all(batch in done for done in self.begun):
                        yield "wait"
                    held = [*(held if keeps else held[:-1]), batch + 1][-ring:]
                    pending = None
            yield "moved"
        require(next(data, None) is None and next(steps, None) is None and pending is None, "not all was trained")
        require(not queue and not gradients, "something is left over")

    def received(self, source: int, s: int) -> Generator[str, None, object]:
        """What a computation needs, once it is there."""
        while self.wanted.get((source, s)) and not self.arrived.get((source, s)):
            yield "wait"
        arrived = self.arrived.get((source, s))
        return arrived.pop(0) if arrived else None
