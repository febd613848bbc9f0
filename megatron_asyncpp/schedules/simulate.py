"""Executes a schedule's plan on paper: how long everything takes, what it costs in memory, how old gradients are."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from megatron_asyncpp.schedules import Schedule, figures
from megatron_asyncpp.schedules.actions import Action, Backward, Begin, Compute, Finish, Flush, Forward
from megatron_asyncpp.schedules.batches import batches as batches_of
from megatron_asyncpp.schedules.channels import Arrival, Message, Step, Transfer, with_messages
from megatron_asyncpp.schedules.steady import steady_time
from megatron_asyncpp.schedules.validate import check, plans_of

Time = float | Fraction

# Batches after which a pipeline counts as settled even if its times aren't periodic yet.
_ENOUGH = 128


@dataclass(frozen=True, slots=True)
class Span:
    """When a stage did something, in the unit of the given times. ``Begin`` takes no time."""

    stage: int
    action: Compute | Begin | Finish
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What came out. Lists are by stage, from the first to the last.

    Attributes:
        spans: of all stages, by start; from the first batch to the last, filling and draining included.
        time_per_batch: of M microbatches, once the pipeline has settled.
        ideal: the same for a pipeline without bubble, whose slowest stage is always busy with forwards and backwards:
            M (F + B) of that stage.
        slowdown: ``time_per_batch / ideal``.
        bubble: the share of the settled pipeline's time in which the stage runs no forward and no backward.
        peak_activations: the most microbatches between forward and backward, see ``figures.peak_activations``.
        versions_alive: the most weight versions that are needed at once, see ``figures.versions_alive``.
        staleness: of each batch (each update) of the plan in order, see ``figures.staleness``; with 2BW it is 1 but
            for the run's first batch, which finds no older weights.
        drift: the most updates between a microbatch's forward and its backward, see ``figures.drift``.
    """

    spans: list[Span]
    time_per_batch: float
    ideal: float
    slowdown: float
    bubble: list[float]
    peak_activations: list[int]
    versions_alive: list[int]
    staleness: list[list[int]]
    drift: list[int]


def simulate(
    schedule: Schedule,
    stages: int,
    microbatches: int,
    *,
    forward: Time | Sequence[Time] = 1.0,
    backward: Time | Sequence[Time] = 2.0,
    latency: Time = 0.0,
    step: Time | Sequence[Time] = 0.0,
    batches: int | None = None,
) -> Simulation:
    """Execute a schedule's plan on paper.

    A stage does one thing after the other. A message arrives ``latency`` after it was sent; its sender isn't held up
    (on a GPU it has its own stream), and its receiver waits for it where the plan receives it or, if it does so ahead,
    where it is needed. ``Finish(k)`` waits until ``latency`` after the last ``Begin(k)`` of the other stages, unless
    the schedule's stages step alone.

    Times are computed as fractions, without rounding, and the settled time per batch is taken where they have become
    periodic, so it is exact. Should they not within 128 batches, it is the mean over the second half of those.

    Args:
        schedule: whose plan to execute.
        stages: P.
        microbatches: M, of each batch.
        forward: time of one microbatch's forward, on every stage or for each stage.
        backward: the same of its backward.
        latency: time of a message between two stages, in the same unit.
        step: time of an optimizer step (of its ``Finish``), on every stage or for each stage.
        batches: whose spans and staleness to return; if None, of as many as it took to settle. The figures of the
            settled pipeline don't depend on it.

    Raises:
        PlanError: the plan is wrong, or its stages wait for each other for ever; it says who waits for whom.
        ValueError: a number is out of range, or there aren't as many times as stages.
    """
    if min(stages, microbatches, 1 if batches is None else batches) < 1:
        raise ValueError(f"{stages} stages, {microbatches} microbatches, {batches} batches: there must be at least 1")
    times = [_per_stage(forward, stages), _per_stage(backward, stages), _per_stage(step, stages), [Fraction(latency)]]
    if any(time < 0 for kind in times for time in kind) or max(map(sum, zip(*times[:2], strict=True))) == 0:
        raise ValueError("times can't be negative, and some stage must take longer than none")
    # As whole multiples of one unit they are exact, and fast.
    unit = math.lcm(*(time.denominator for kind in times for time in kind))
    whole = [[int(time * unit) for time in kind] for kind in times]
    machine = _Machine(whole[0], whole[1], whole[2], whole[3][0])

    tail = 2 + math.ceil(stages / microbatches)
    count = 2 * tail + 2
    settled = None
    while settled is None:
        run = _run(schedule, stages, microbatches, count, machine)
        ends = run.batch_ends(microbatches)
        settled = steady_time(ends, tail)
        if settled is None and count >= _ENOUGH:
            middle, end = count // 2, count - tail
            settled = Fraction(max(ends[end - 1]) - max(ends[middle - 1]), end - middle)
        count *= 2
    if batches is not None:
        run = _run(schedule, stages, microbatches, batches, machine)

    busy = [microbatches * (f + b) for f, b in zip(machine.forward, machine.backward, strict=True)]
    spans = [Span(s, action, start / unit, end / unit) for row in run.rows for s, action, start, end in row]
    return Simulation(
        spans=sorted(spans, key=lambda span: span.start),
        time_per_batch=float(settled / unit),
        ideal=max(busy) / unit,
        slowdown=float(settled / max(busy)),
        bubble=[float(1 - time / settled) for time in busy],
        peak_activations=[figures.peak_activations(plan) for plan in run.plans],
        versions_alive=[figures.versions_alive(plan) for plan in run.plans],
        staleness=[figures.staleness(plan) for plan in run.plans],
        drift=[figures.drift(plan) for plan in run.plans],
    )


def _per_stage(time: Time | Sequence[Time], stages: int) -> list[Fraction]:
    if isinstance(time, Sequence):
        if len(time) != stages:
            raise ValueError(f"{len(time)} times for {stages} stages: give one for all, or one for each")
        return [Fraction(each) for each in time]
    return [Fraction(time)] * stages


class _Machine(NamedTuple):
    """The time of each stage's forward, backward and step, and of a message, in whole multiples of some unit."""

    forward: list[int]
    backward: list[int]
    step: list[int]
    latency: int


class _Timed(NamedTuple):
    stage: int
    action: Compute | Begin | Finish
    start: int
    end: int


class _Run(NamedTuple):
    """One execution: each stage's plan, and what it did when."""

    plans: list[list[Action]]
    rows: list[list[_Timed]]

    def batch_ends(self, microbatches: int) -> list[list[int]]:
        """For every M backwards of a stage, and then the next M, when they ended, on all stages."""
        ends = [[timed.end for timed in row if isinstance(timed.action, Backward)] for row in self.rows]
        return [
            [end for row in ends for end in row[first : first + microbatches]]
            for first in range(0, len(ends[0]), microbatches)
        ]


def _run(schedule: Schedule, stages: int, microbatches: int, count: int, machine: _Machine) -> _Run:
    plans = plans_of(schedule, stages, batches_of(0, count, microbatches, schedule.delay))
    check(schedule, plans)
    arrivals: dict[Message, int] = {}
    begun: dict[int, dict[int, int]] = {}  # batch, stage -> time
    rows: list[list[_Timed]] = [[] for _ in plans]
    running = [
        _execute(
            stage,
            with_messages(stage, stages, plan, schedule.ahead),
            machine,
            rows[stage],
            arrivals,
            begun,
            schedule.steps_alone,
        )
        for stage, plan in enumerate(plans)
    ]
    while running:  # it ends: the check has shown that no stage waits for ever
        running = [stage for stage in running if next(stage, False) is None]
    return _Run(plans, rows)


def _execute(
    stage: int,
    flow: Iterable[Step],
    machine: _Machine,
    row: list[_Timed],
    arrivals: dict[Message, int],
    begun: dict[int, dict[int, int]],
    steps_alone: bool,
) -> Generator[None]:
    """Execute one stage into its row, yielding whenever it must wait for another to get on."""
    now = 0
    for step in flow:
        start = now
        match step:
            case Transfer(send, receive, waits):
                if send is not None:
                    arrivals[send] = now + machine.latency
                if receive is not None and waits:
                    now = yield from _arrived(receive, now, arrivals)
                continue
            case Arrival(message):
                now = yield from _arrived(message, now, arrivals)
                continue
            case Flush():
                continue
            case Forward():
                now += machine.forward[stage]
            case Backward():
                now += machine.backward[stage]
            case Begin(batch):
                begun.setdefault(batch, {})[stage] = now
            case Finish(batch):
                if not steps_alone:
                    while len(begun[batch]) < len(machine.forward):
                        yield
                    others = (time + machine.latency for other, time in begun[batch].items() if other != stage)
                    start = now = max([now, *others])
                now += machine.step[stage]
        row.append(_Timed(stage, step, start, now))


def _arrived(message: Message, now: int, arrivals: dict[Message, int]) -> Generator[None, None, int]:
    """When a stage that waits for a message from now on has it."""
    while message not in arrivals:
        yield
    return max(now, arrivals[message])
