"""The validator takes every plan that trains and refuses every one that doesn't."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from megatron_asyncpp.schedules import SCHEDULES, Schedule
from megatron_asyncpp.schedules.actions import Action, Backward, Batch, Begin, Finish, Flush, Forward
from megatron_asyncpp.schedules.batches import batches
from megatron_asyncpp.schedules.channels import Arrival, Message, Transfer
from megatron_asyncpp.schedules.rendezvous import stuck_stages
from megatron_asyncpp.schedules.validate import PlanError, check, plans_of, problems
from tests.plan_oracle import Broken, Oracle
from tests.toy import GPIPE

Plans = list[list[Action]]


def course(schedule: Schedule, count: int, microbatches: int | list[int], **parts: Any) -> Iterable[Batch]:
    return batches(0, count, microbatches, schedule.delay, **parts)


def shapes(name: str) -> list[tuple[int, int]]:
    # Up to 8 stages all three M; from there P and P + 1 in turn, and twice 2P. And fewer microbatches than stages.
    found = [(p, m) for p in range(1, 9) for m in (p, p + 1, 2 * p)]
    found += [(p, p + p % 2) for p in range(9, 33)] + [(16, 32), (32, 64)]
    least = SCHEDULES[name].least_microbatches
    found = [(p, m) for p, m in found if m >= least(p)] + [(p, least(p)) for p in (3, 8, 12, 16)]
    if least(2) == 1:
        found += [(p, m) for p in (2, 3, 4, 7, 16) for m in (1, p // 2, p - 1)]
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_right_at_every_size(name: str) -> None:
    schedule = SCHEDULES[name]
    for stages, microbatches in shapes(name):
        found = problems(schedule, plans_of(schedule, stages, course(schedule, 3, microbatches)))
        assert not found, f"P = {stages}, M = {microbatches}: {found[0]}"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("counts", "parts"),
    [
        ([4] * 6, {"sync_start": 2, "sync_cooldown": 2}),
        ([4] * 6, {"skipped": {0, 3}}),
        ([4, 4, 8, 8, 16, 16], {}),
        ([4, 4, 8, 8, 16, 16], {"sync_start": 1, "sync_cooldown": 1, "skipped": {2}}),
    ],
)
def test_transitions_are_right(name: str, counts: list[int], parts: dict[str, Any]) -> None:
    schedule = SCHEDULES[name]
    counts = [count + schedule.least_microbatches(4) - schedule.least_microbatches(1) for count in counts]
    check(schedule, plans_of(schedule, 4, course(schedule, 6, counts, **parts)))


def mangled(plans: Plans, kind: str, rng: random.Random) -> tuple[Plans, set[type[Action]]]:
    """The plans with one fault on one stage, and what kinds of action are concerned."""
    plans = [list(plan) for plan in plans]
    plan = rng.choice(plans)
    place = rng.randrange(len(plan))
    action = plan[place]
    if kind == "swapped":
        other = rng.choice([i for i, one in enumerate(plan) if one != action])
        plan[place], plan[other] = plan[other], action
        return plans, {type(action), type(plan[place])}
    if kind == "missing":
        del plan[place]
    elif kind == "doubled":
        plan.insert(rng.randrange(len(plan) + 1), action)
    else:
        place = rng.choice([i for i, one in enumerate(plan) if isinstance(one, Forward | Backward)])
        action = plan[place]
        assert isinstance(action, Forward | Backward)
        plan[place] = replace(action, version=action.version + rng.choice((-1, 1)))
    return plans, {type(action)}


@pytest.mark.parametrize("kind", ["swapped", "missing", "doubled", "version"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_broken_plan_is_refused(name: str, kind: str) -> None:
    """Random faults, one at a time.

    Not each of them breaks a plan: to finish a step a little earlier, or to run one more forward ahead, trains the
    very same on the very same weights. So an oracle that shares no rule with the validator executes each plan; it
    decides which are still right, and those must be taken.
    """
    rng, schedule = random.Random(f"{name} {kind}"), SCHEDULES[name]
    tries = harmless = 0
    for stages, microbatches in ((1, 2), (2, 2), (2, 3), (3, 4), (4, 4)):
        microbatches = max(microbatches, schedule.least_microbatches(stages))
        right = plans_of(schedule, stages, course(schedule, 3, microbatches))
        data = [(action.batch, action.microbatch) for action in right[0] if isinstance(action, Forward)]
        Oracle(schedule, data).run(right)
        for _ in range(60):
            plans, touched = mangled(right, kind, rng)
            tries += 1
            found = problems(schedule, plans)
            try:
                Oracle(schedule, data).run(plans)
            except Broken as error:
                difference = [(a, b) for a, b in zip(right, plans, strict=True) if a != b]
                assert found, f"P = {stages}, M = {microbatches}, broken ({error}) and taken: {difference}"
            else:
                harmless += 1
                # What says where a pipeline drains is wanted in its place, though the first stage does well without.
                assert not found or Flush in touched, f"right and refused: {found[0]}"
                # Nothing else can be harmless: a step finished early, or a forward that runs earlier or later.
                moved = [{Forward, Backward}, *([{Forward, Begin}] if schedule.ahead else [])]
                early = kind == "swapped" and (Finish in touched or touched in moved)
                assert early or (Flush in touched and kind != "version")
    assert harmless <= 0.15 * tries


def two_stages(first: list[Action], second: list[Action], schedule: Schedule = SCHEDULES["1f1b"]) -> list[str]:
    return [str(problem) for problem in problems(schedule, [first, second])]


F = [Forward(m, 0, 0) for m in range(3)]
B = [Backward(m, 0, 0) for m in range(3)]
END: list[Action] = [Flush(0), Begin(0), Finish(0)]


def test_stages_that_wait_for_each_other_are_named() -> None:
    # Stage 0 wants the first gradient before it runs its second forward; stage 1 runs two forwards first.
    first: list[Action] = [F[0], B[0], F[1], B[1], *END]
    second: list[Action] = [F[0], F[1], B[0], B[1], *END]
    assert two_stages(first, second) == [
        "stage 0, exchange: it waits for ever to receive the gradient of microbatch 0 of batch 0 from stage 1",
        "stage 1, exchange: it waits for ever to receive the output of microbatch 1 of batch 0 from stage 0",
    ]
    with pytest.raises(PlanError, match="stage 0, exchange: it waits for ever"):
        check(SCHEDULES["1f1b"], [first, second])


def test_a_send_waits_for_its_receive_and_a_combined_call_helps() -> None:
    there, back = Message(0, 1, "forward", 0, 0), Message(1, 0, "backward", 0, 0)
    apart = [[Transfer(there, None), Transfer(None, back)], [Transfer(back, None), Transfer(None, there)]]
    assert [stage for stage, *_ in stuck_stages(apart, steps_alone=False)] == [0, 1]
    assert not stuck_stages([[Transfer(there, back)], [Transfer(back, there)]], steps_alone=False)
    # The halves of a combined call progress independently of each other.
    assert not stuck_stages([[Transfer(there, back)], [Transfer(None, there), Transfer(back, None)]], False)


def test_messages_that_are_only_posted_are_waited_for_where_they_are_needed() -> None:
    there, back = Message(0, 1, "forward", 0, 0), Message(1, 0, "backward", 0, 0)
    posts = [[Transfer(there, None, waits=False), Transfer(None, back, waits=False), Arrival(back)]]
    crossed = [*posts, [Transfer(back, None, waits=False), Transfer(None, there, waits=False), Arrival(there)]]
    assert not stuck_stages(crossed, steps_alone=False)
    needs_first = [*posts, [Transfer(None, there, waits=False), Arrival(there), Transfer(back, None, waits=False)]]
    assert not stuck_stages(needs_first, steps_alone=False)
    never = [*posts, [Transfer(None, there, waits=False)]]
    ((stage, step, what),) = stuck_stages(never, steps_alone=False)
    assert (stage, step) == (0, Arrival(back))
    assert what == "it waits for ever to receive the gradient of microbatch 0 of batch 0 from stage 1"
    # A second send waits for the first one's receive.
    again = Message(0, 1, "forward", 0, 1)
    sends: list[Any] = [Transfer(there, None, waits=False), Transfer(again, None, waits=False)]
    assert [one[1] for one in stuck_stages([sends, []], steps_alone=False)] == [sends[1]]


def test_messages_that_are_only_posted_are_in_one_order_on_both_ends() -> None:
    tight = replace(SCHEDULES["2bw-wide"], ahead=False)
    plans = plans_of(SCHEDULES["2bw-wide"], 3, course(tight, 3, 5))
    # Received just in time, an output comes after a gradient that its sender takes first.
    found = [str(problem) for problem in problems(tight, plans)]
    assert any("in call 0, but that stage" in problem for problem in found)
    late = replace(SCHEDULES["1f1b"], ahead=True)
    found = [str(problem) for problem in problems(late, plans_of(late, 2, course(late, 1, 3)))]
    assert found == [
        "stage 0: as message 2 with stage 1 it posts the gradient of microbatch 0 of batch 0, but that stage the "
        "output of microbatch 2 of batch 0"
    ]


def test_a_step_waits_for_all_stages_unless_they_step_alone() -> None:
    message = Message(0, 1, "forward", 1, 0)
    first: list[Action | Transfer] = [Begin(0), Finish(0), Transfer(message, None)]
    second: list[Action | Transfer] = [Transfer(None, message), Begin(0), Finish(0)]
    (stage, step, what), _ = stuck_stages([first, second], steps_alone=False)
    assert (stage, step) == (0, Finish(0))
    assert what == "it waits for ever for the same step to begin on stage 1"
    assert not stuck_stages([first, second], steps_alone=True)


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ([F[0], *END], "stage 0: the forward of microbatch 0 of batch 0 has no backward"),
        ([F[0], B[0], B[0], *END], "there is no forward whose backward it could be"),
        ([F[0], Backward(0, 0, 1), *END], "backward of microbatch 0 of batch 0 on V(1): its forward ran on V(0)"),
        ([Forward(0, 0, 1), B[0], *END], "V(1) doesn't exist; the newest is V(0)"),
        ([F[0], B[0], *END, Forward(0, 1, 0), Backward(0, 1, 0)], "V(0) was overwritten; the oldest left is V(1)"),
        ([F[0], B[0], Flush(0), Begin(0)], "stage 0: the step of batch 0 is never finished"),
        ([F[0], B[0], Begin(0), Finish(0)], "the plan ends without a Flush, so its last message is never sent"),
        ([F[0], F[1], B[0], Flush(0), B[1], Begin(0), Finish(0)], "microbatch 1 of batch 0 is in flight"),
        ([F[1], B[1], *END], "the first forward must be of microbatch 0 of batch 0"),
        ([F[0], F[2], B[0], B[2], *END], "it can't follow the forward of microbatch 0 of batch 0"),
        (
            [F[0], B[0], Flush(0), Begin(1), Finish(1)],
            "begin of batch 1's step: the next step to begin is that of batch 0",
        ),
        ([F[0], F[1], B[0], Begin(0), Finish(0), B[1]], "the backward of microbatch 1 of batch 0 is still to come"),
        ([F[0], F[1], B[0], Begin(0), Finish(0), B[1]], "its gradient would be added to those of batch 1"),
        ([F[0], B[0], *END, F[1], B[1]], "the step of its batch has begun already"),
        ([F[0], B[0], Flush(0), F[1], B[1], Begin(0)], "it is between the flush and the step of batch 0"),
        ([F[0], F[1], B[1], B[0], *END], "the next backward must be of microbatch 0 of batch 0"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(plan: list[Action], sentence: str) -> None:
    assert any(sentence in str(problem) for problem in problems(SCHEDULES["1f1b"], [plan]))


def test_a_step_must_not_overwrite_what_a_backward_needs() -> None:
    # One buffer, and a forward of the next batch in flight while the step writes into it.
    plan: list[Action] = [F[0], Forward(0, 1, 0), B[0], Begin(0), Finish(0), Backward(0, 1, 0), Flush(1), Begin(1)]
    found = [str(problem) for problem in problems(SCHEDULES["1f1b"], [plan])]
    assert found[0] == (
        "stage 0, finish of batch 0's step: it overwrites V(0), which the backward of microbatch 0 of batch 1 still "
        "needs"
    )


def test_a_message_must_not_be_on_the_wire_between_calls() -> None:
    # Stage 0 drains after batch 0 and stage 1 doesn't: it would receive ahead what is sent in the next call only.
    plans = plans_of(SCHEDULES["1f1b"], 2, course(SCHEDULES["1f1b"], 2, 2))
    plans[1].remove(Flush(0))
    found = [str(problem) for problem in problems(SCHEDULES["1f1b"], plans)]
    assert (
        "stage 0: as message 2 to stage 1 it sends the output of microbatch 0 of batch 1 in call 1, but that stage "
        "receives the output of microbatch 0 of batch 1 in call 0"
    ) in found


def test_all_stages_drain_after_the_same_batches() -> None:
    plans = plans_of(SCHEDULES["1f1b"], 2, course(SCHEDULES["1f1b"], 2, 2))
    plans[0].remove(Flush(0))  # it has nobody to receive from too early, so nothing else is wrong
    found = [str(problem) for problem in problems(SCHEDULES["1f1b"], plans)]
    assert found == ["stage 1, flush after batch 0: flush 0 is not what it is on stage 0"]


def test_a_new_schedule_needs_nothing_else() -> None:
    for stages, microbatches in ((1, 1), (2, 1), (4, 4), (8, 3)):
        check(GPIPE, plans_of(GPIPE, stages, course(GPIPE, 3, microbatches)))


def test_stages_that_run_a_batch_on_different_weights_are_refused() -> None:
    schedule = SCHEDULES["2bw-blocking"]
    plans = plans_of(schedule, 2, batches(0, 5, 2, delay=1))
    older = [replace(a, version=1) if isinstance(a, Forward | Backward) and a.batch == 3 else a for a in plans[0]]
    untracked = [replace(a, delayed=False) if isinstance(a, Begin) else a for a in plans[0]]
    assert problems(schedule, plans) == []
    for changed in (older, untracked):
        assert problems(schedule, [changed, plans[1]]), "the stages disagree"
