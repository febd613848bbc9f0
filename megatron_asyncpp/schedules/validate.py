"""Checks the plan of a whole pipeline before anything runs on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron_asyncpp.schedules.actions import Action, Backward, Batch, Begin, Compute, Finish, Flush, Forward
from megatron_asyncpp.schedules.channels import Arrival, Message, Step, Transfer, with_messages
from megatron_asyncpp.schedules.rendezvous import stuck_stages
from megatron_asyncpp.schedules.stage_rules import broken_rules

if TYPE_CHECKING:
    from megatron_asyncpp.schedules import Schedule


class PlanError(ValueError):
    """A plan that can't be run, in one sentence."""


class Problem(NamedTuple):
    """What is wrong with a plan.

    Attributes:
        stage: where.
        action: the action or message that it is about; None for something that is missing.
        what: a part of a sentence.
    """

    stage: int
    action: Step | None
    what: str

    def __str__(self) -> str:
        return f"stage {self.stage}{_named(self.action)}: {self.what}"


def plans_of(schedule: Schedule, stages: int, batches: Iterable[Batch]) -> list[list[Action]]:
    """The actions of every stage, for the same batches."""
    batches = list(batches)
    return [list(schedule.generate(stage, stages, batches)) for stage in range(stages)]


def check(schedule: Schedule, plans: Sequence[Sequence[Action]]) -> None:
    """Refuse plans that have a problem.

    Raises:
        PlanError: with the first of ``problems``.
    """
    for problem in problems(schedule, plans):
        raise PlanError(str(problem))


def problems(schedule: Schedule, plans: Sequence[Sequence[Action]]) -> list[Problem]:
    """All that is wrong with the plan of a pipeline.

    A plan is right if

    - on each stage forwards come in the order of the data, and each has one backward, later, in the same order, on
      the same weights (unless the schedule says that it doesn't keep them);
    - what a forward or backward runs on is a version that exists and wasn't overwritten yet, in a ring of the size
      that the schedule asks for;
    - steps begin and finish once each and in order, one at a time, with exactly their batch's gradients;
    - all stages run the same microbatches, on the same weights unless they step alone, take the same steps and drain
      after the same batches;
    - every message is sent and received in the same call of Megatron's loop (a call ends with ``Begin``), and
      between two stages in the same order; where messages are only posted, those of both directions together, since
      the messages of a pair may well share one queue on a GPU;
    - no stage waits for ever, see ``rendezvous``.

    Args:
        schedule: of which the plan is; its generator isn't used.
        plans: the actions of each stage, from the first to the last stage.
    """
    computations = [action for plan in plans for action in plan if isinstance(action, Compute)]
    if not computations:
        return []
    first = min(action.batch for action in computations)
    found = [
        Problem(stage, action, what)
        for stage, plan in enumerate(plans)
        for action, what in broken_rules(plan, first, schedule.versions(stage, len(plans)), schedule.keeps_weights)
    ]
    found += _disagreements(schedule, plans)
    flows = [list(with_messages(stage, len(plans), plan, schedule.ahead)) for stage, plan in enumerate(plans)]
    unmatched = list(_unmatched(flows))
    if not unmatched and schedule.ahead:
        unmatched = list(_crossed(flows))
    if unmatched:
        return found + unmatched
    return found + [Problem(*stuck) for stuck in stuck_stages(flows, schedule.steps_alone)]


def _disagreements(schedule: Schedule, plans: Sequence[Sequence[Action]]) -> Iterator[Problem]:
    # Stages that step alone have versions of their own; all others run a batch on the same weights, W(k).
    identity = _place if schedule.steps_alone else _identity
    for kind in (Forward, Begin, Flush, Finish):
        expected = [identity(action) for action in plans[0] if isinstance(action, kind)]
        for stage, plan in enumerate(plans):
            own = [action for action in plan if isinstance(action, kind)]
            if [identity(action) for action in own] != expected:
                i = _first_difference([identity(action) for action in own], expected)
                name = kind.__name__.lower()
                yield Problem(stage, own[i] if i < len(own) else None, f"{name} {i} is not what it is on stage 0")


def _unmatched(flows: Sequence[Sequence[Step]]) -> Iterator[Problem]:
    """Per ordered pair of neighbours, the first message that isn't received in the order and call it is sent in."""
    sent: dict[tuple[int, int], list[tuple[Message, int]]] = {}
    received: dict[tuple[int, int], list[tuple[Message, int]]] = {}
    for flow in flows:
        call = 0
        for step in flow:
            if isinstance(step, Begin):
                call += 1
            elif isinstance(step, Transfer):
                for message, record in ((step.send, sent), (step.receive, received)):
                    if message is not None:
                        record.setdefault((message.sender, message.receiver), []).append((message, call))
    for pair in sorted(sent.keys() | received.keys()):
        ours, theirs = sent.get(pair, []), received.get(pair, [])
        if ours != theirs:
            i = _first_difference(ours, theirs)
            sends = f"sends {ours[i][0]} in call {ours[i][1]}" if i < len(ours) else "sends nothing more"
            receives = f"receives {theirs[i][0]} in call {theirs[i][1]}" if i < len(theirs) else "receives nothing more"
            yield Problem(pair[0], None, f"as message {i} to stage {pair[1]} it {sends}, but that stage {receives}")


def _crossed(flows: Sequence[Sequence[Step]]) -> Iterator[Problem]:
    """Per pair of neighbours, the first of all their messages that they don't post in the same place."""
    for stage in range(len(flows) - 1):
        ours, theirs = (_posted_between(stage, flow) for flow in flows[stage : stage + 2])
        if ours != theirs:
            i = _first_difference(ours, theirs)
            mine, other = (str(posted[i]) if i < len(posted) else "nothing more" for posted in (ours, theirs))
            yield Problem(stage, None, f"as message {i} with stage {stage + 1} it posts {mine}, but that stage {other}")


def _posted_between(stage: int, flow: Sequence[Step]) -> list[Message]:
    """The messages between a stage and the next, as one of them posts them: of one call, the activations first."""
    posted = []
    for step in flow:
        if isinstance(step, Transfer):
            between = [message for message in step.messages if {message.sender, message.receiver} == {stage, stage + 1}]
            posted += sorted(between, key=lambda message: message.payload, reverse=True)
    return posted


def _first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _place(action: Action) -> tuple[int, ...]:
    return action.batch, action.microbatch if isinstance(action, Compute) else 0


def _identity(action: Action) -> tuple[int, ...]:
    match action:
        case Forward() | Backward():
            return *_place(action), action.version
        case Begin():
            return *_place(action), int(action.delayed)
        case _:
            return _place(action)


def _named(action: Step | None) -> str:
    match action:
        case None:
            return ""
        case Transfer():
            return ", exchange"
        case Arrival(message):
            return f", wait for {message}"
        case Flush(batch):
            return f", flush after batch {batch}"
        case Begin(batch):
            return f", begin of batch {batch}'s step"
        case Finish(batch):
            return f", finish of batch {batch}'s step"
        case _:
            name = type(action).__name__.lower()
            return f", {name} of microbatch {action.microbatch} of batch {action.batch} on V({action.version})"
