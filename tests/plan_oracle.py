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
        self.offered: dict[tuple[int, int], tuple[object, int]] = {}  # a send that is posted, and in which call
        self.wanted: dict[tuple[int, int], int] = {}  # a receive that is posted, in which call
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
        require(not self.offered and not self.wanted, "something is left on the wire")

    def stage(self, s: int, stages: int, plan: Sequence[Action]) -> Generator[str]:
        ring = self.schedule.versions(s, stages)
        held = [self.batches[0]]  # the versions in the ring
        data, steps = iter(self.data), iter(self.batches)
        queue: list[tuple[int, int, int]] = []
        gradients: list[tuple[int, int]] = []
        made: object = None
        inbox: object = None
        pending: int | None = None
        calls = 0
        for step in with_exchanges(plan):
            match step:
                case Exchange(send, receive):
                    to = s + 1 if send == "forward" else s - 1
                    source = s - 1 if receive == "forward" else s + 1
                    sends = send is not None and 0 <= to < stages
                    receives = receive is not None and 0 <= source < stages
                    if sends:
                        self.offered[s, to] = (made, calls)
                    if receives:
                        require(inbox is None, "two receives in a row")
                        self.wanted[source, s] = calls
                    while (sends and (s, to) in self.offered) or receives:
                        if receives and (source, s) in self.offered:
                            inbox, call = self.offered.pop((source, s))
                            require(call == self.wanted.pop((source, s)), "on the wire between calls")
                            receives = False
                            yield "moved"
                        else:
                            yield "wait"
                case Forward(microbatch, batch, version):
                    require(next(data, None) == (batch, microbatch), "not the data that come next")
                    require(s == 0 or inbox == ("F", batch, microbatch), "wrong input")
                    require(version in held, "not the weights")
                    queue.append((batch, microbatch, version))
                    made, inbox = ("F", batch, microbatch), None
                case Backward(microbatch, batch, version):
                    require(bool(queue), "nothing in flight")
                    of = queue.pop(0)
                    require(of[:2] == (batch, microbatch), "another microbatch's activations")
                    require(s == stages - 1 or inbox == ("B", batch, microbatch), "wrong gradient")
                    require(version == of[2] or not self.schedule.keeps_weights, "other weights than the forward's")
                    require(version in held, "not the weights")
                    gradients.append((batch, microbatch))
                    made, inbox = ("B", batch, microbatch), None
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
