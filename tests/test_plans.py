"""Plans are data: order, versions and messages of every schedule, without torch or Megatron."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import megatron_asyncpp.schedules as package
from megatron_asyncpp.schedules import SCHEDULES, slowdown
from megatron_asyncpp.schedules.actions import Action, Backward, Batch, Begin, Finish, Flush, Forward
from megatron_asyncpp.schedules.batches import batches
from megatron_asyncpp.schedules.exchanges import Exchange, with_exchanges

SHAPES = [(p, m) for p in (1, 2, 3, 4, 8, 16) for m in (p, p + 1, 2 * p)]
BATCHES = 4


def plan(name: str, stage: int, stages: int, microbatches: int | list[int], **course: Any) -> list[Action]:
    schedule = SCHEDULES[name]
    return list(schedule.generate(stage, stages, batches(0, BATCHES, microbatches, schedule.delay, **course)))


def messages(actions: list[Action], direction: str, ahead: bool) -> list[tuple[str, int, int, int]]:
    """(send or receive, call, batch, microbatch) of one direction, in order; a call ends with Begin."""
    found, call, made = [], 0, None
    flow = list(with_exchanges(actions, ahead))
    kinds = {"forward": Forward, "backward": Backward}
    needing = {kind: iter([s for s in flow if isinstance(s, kinds[kind])]) for kind in kinds}
    for i, step in enumerate(flow):
        if isinstance(step, Begin):
            call += 1
        elif isinstance(step, Forward | Backward):
            made = step
        elif isinstance(step, Exchange):
            following = next((s for s in flow[i:] if isinstance(s, Forward | Backward)), None)
            wanted = step.receive and next(needing[step.receive])
            assert ahead or wanted in (None, following)
            if step.send == direction:
                found.append(("send", call, made.batch, made.microbatch))
            if step.receive == direction:
                found.append(("receive", call, wanted.batch, wanted.microbatch))
    return found


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_neighbours_agree_on_the_order_and_call_of_every_message(name: str, stages: int, microbatches: int) -> None:
    microbatches = max(microbatches, SCHEDULES[name].least_microbatches(stages))
    growing = [microbatches, microbatches, 2 * microbatches, 2 * microbatches]
    for counts, course in (
        ([microbatches] * BATCHES, {}),
        ([microbatches] * BATCHES, {"skipped": {1}}),
        ([microbatches] * BATCHES, {"sync_start": 1, "sync_cooldown": 1}),
        (growing, {}),
        (growing, {"skipped": {0}, "sync_start": 2}),
    ):
        plans = [plan(name, s, stages, counts, **course) for s in range(stages)]
        for s in range(stages - 1):
            for direction, sender, receiver in (("forward", s, s + 1), ("backward", s + 1, s)):
                ahead = SCHEDULES[name].ahead
                sent = [m[1:] for m in messages(plans[sender], direction, ahead) if m[0] == "send"]
                received = [m[1:] for m in messages(plans[receiver], direction, ahead) if m[0] == "receive"]
                assert sent == received, f"{direction} from stage {sender} to {receiver}"
                trained = [m for k, m in enumerate(counts) if k not in course.get("skipped", ())]
                assert len(sent) == sum(trained)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_every_backward_is_on_the_weights_of_its_forward(name: str, stages: int, microbatches: int) -> None:
    schedule = SCHEDULES[name]
    microbatches = max(microbatches, schedule.least_microbatches(stages))
    for s in range(stages):
        newest, in_flight, count = 0, [], Counter[type]()
        ring = schedule.versions(s, stages)
        for action in plan(name, s, stages, microbatches):
            count[type(action)] += 1
            if isinstance(action, Forward):
                assert newest - ring < action.version <= newest, "no such version in the ring"
                in_flight.append((action.microbatch, action.batch, action.version))
            elif isinstance(action, Backward):
                microbatch, batch, version = in_flight.pop(0)
                assert (action.microbatch, action.batch) == (microbatch, batch)
                assert action.version == (version if schedule.keeps_weights else newest)
            elif isinstance(action, Flush):
                assert not in_flight
            elif isinstance(action, Finish):
                newest += 1
                free = newest - ring  # the version whose buffer the step has just written over
                gone = any(version == free for *_, version in in_flight)
                assert not (gone and schedule.keeps_weights), "a pending backward's weights are gone"
        assert not in_flight
        assert count[Forward] == count[Backward] == BATCHES * microbatches
        updates = BATCHES * microbatches if name == "pipedream" else BATCHES
        assert count[Begin] == count[Finish] == newest == updates


def test_2bw_as_one_reads_it() -> None:
    short = {Forward: "F", Backward: "B", Flush: "|", Begin: "(", Finish: ")"}

    def text(name: str, stage: int, microbatches: int = 3) -> str:
        actions = SCHEDULES[name].generate(stage, 3, batches(0, 3, microbatches, delay=1))
        return " ".join(
            f"{short[type(a)]}{a.batch}{a.microbatch}"
            if isinstance(a, Forward | Backward)
            else f"{short[type(a)]}{a.batch}"
            for a in actions
        )

    assert text("2bw-blocking", 0) == (
        "F00 F01 F02 B00 F10 B01 F11 B02 (0 )0 F12 B10 F20 B11 F21 B12 (1 )1 F22 B20 B21 B22 |2 (2 )2"
    )
    assert text("2bw", 0) == (
        "F00 F01 F02 B00 F10 B01 F11 B02 (0 F12 B10 )0 F20 B11 F21 B12 (1 F22 B20 B21 B22 |2 )1 (2 )2"
    )
    assert text("2bw-wide", 1, microbatches=5) == (
        "F00 F01 F02 B00 F03 B01 F04 B02 F10 B03 F11 B04 (0 F12 B10 F13 B11 F14 B12 )0 F20 B13 F21 B14 "
        "(1 F22 B20 F23 B21 F24 B22 B23 B24 |2 )1 (2 )2"
    )
    assert text("2bw", 1) == (
        "F00 F01 B00 F02 B01 F10 B02 (0 F11 B10 F12 B11 )0 F20 B12 (1 F21 B20 F22 B21 B22 |2 )1 (2 )2"
    )
    assert text("2bw", 2) == (
        "F00 B00 F01 B01 F02 B02 (0 F10 B10 F11 B11 F12 B12 )0 (1 F20 B20 F21 B21 F22 B22 |2 )1 (2 )2"
    )


def test_pipedream_and_paci_as_one_reads_them() -> None:
    def text(name: str, stage: int) -> str:
        words = []
        for action in SCHEDULES[name].generate(stage, 3, batches(0, 2, 2, delay=1)):
            if isinstance(action, Forward | Backward):
                words.append(f"{type(action).__name__[0]}{action.batch}{action.microbatch}@{action.version}")
            elif not isinstance(action, Finish):  # it follows every Begin
                words.append({Begin: "(", Flush: "|"}[type(action)] + str(action.batch))
        return " ".join(words)

    # Each microbatch is a batch of its own. Stage 0 is two forwards ahead, so its gradients are two updates old.
    assert text("pipedream", 0) == "F00@0 F10@0 F20@0 B00@0 (0 F30@1 B10@0 (1 B20@0 (2 B30@1 |3 (3"
    assert text("pipedream", 2) == "F00@0 B00@0 (0 F10@1 B10@1 (1 F20@2 B20@2 (2 F30@3 B30@3 |3 (3"
    # An update after two microbatches. Both of batch 1 cross it between forward and backward on stage 0, none on 2.
    assert text("paci", 0) == "F00@0 F01@0 F10@0 B00@0 F11@0 B01@0 (0 B10@1 B11@1 |1 (1"
    assert text("paci", 2) == "F00@0 B00@0 F01@0 B01@0 (0 F10@1 B10@1 F11@1 B11@1 |1 (1"


def test_weights_of_each_batch() -> None:
    assert [batch.version for batch in batches(0, 5, 1, delay=1)] == [0, 0, 1, 2, 3]
    assert [batch.version for batch in batches(7, 10, 1, delay=1)] == [7, 7, 8]
    assert [batch.version for batch in batches(0, 4, 1, delay=0)] == [0, 1, 2, 3]


def test_a_skipped_iteration_drains_the_pipeline_before_it_and_counts_no_update() -> None:
    assert list(batches(0, 5, 2, delay=1, skipped=(2, 3))) == [
        Batch(0, 2, version=0, flush=False, delayed=True),
        Batch(1, 2, version=0, flush=True, delayed=True),
        Batch(2, 2, version=1, flush=True, delayed=True),
    ]


def test_synchronous_parts_drain_and_run_on_the_newest_weights() -> None:
    course = list(batches(0, 9, 2, delay=1, sync_start=2, sync_cooldown=2))
    assert [b.version for b in course] == [0, 1, 2, 2, 3, 4, 5, 7, 8]
    assert [b.flush for b in course] == [True, True, False, False, False, False, True, True, True]
    assert [b.delayed for b in course] == [False] * 2 + [True] * 5 + [False] * 2


def test_the_pipeline_drains_before_the_number_of_microbatches_changes_and_the_delay_stays() -> None:
    course = list(batches(0, 5, [2, 2, 4, 4, 4], delay=1))
    assert [b.microbatches for b in course] == [2, 2, 4, 4, 4]
    assert [b.flush for b in course] == [False, True, False, False, True]
    assert [b.version for b in course] == [0, 0, 1, 2, 3]


def test_closed_forms() -> None:
    # arXiv:2606.30634, appendix F.2: P = M = 16, B = 2F.
    assert round(slowdown.one_f_one_b(16, 16), 3) == 1.938
    assert round(slowdown.two_bw_blocking(16, 16, backward=2), 3) == 1.625


def test_schedules_import_neither_torch_nor_megatron() -> None:
    for file in Path(package.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name.split(".")[0] not in {"torch", "megatron"}, f"{file.name} imports {name}"
                ours = name.split(".")[0] != "megatron_asyncpp" or name.startswith("megatron_asyncpp.schedules")
                assert ours, f"{file.name} imports {name}: imports run from schedules outwards"


@pytest.mark.parametrize(
    ("given", "versions"),
    [
        ({"older": True}, [5, 6, 7]),
        ({}, [6, 6, 7]),
        ({"older": True, "sync_start": 5}, [5, 6, 7]),
        ({"older": True, "sync_start": 6}, [6, 6, 7]),  # the first after the start has no older weights
        ({"older": True, "sync_start": 7}, [6, 7, 7]),
        ({"older": True, "sync_cooldown": 3}, [6, 7, 8]),
    ],
)
def test_a_continued_run_begins_on_the_older_weights(given: dict, versions: list[int]) -> None:
    assert [batch.version for batch in batches(6, 9, 4, delay=1, **given)] == versions


def test_inputs_that_are_received_ahead() -> None:
    short = {Forward: "F", Backward: "B", Flush: "|", Begin: "(", Finish: ")"}
    flow = with_exchanges(SCHEDULES["2bw-wide"].generate(1, 2, batches(0, 2, 3, delay=1)), ahead=True)
    written = [
        f"[{'g' if step.send == 'backward' else ''}{'f' if step.receive == 'forward' else ''}]"
        if isinstance(step, Exchange)
        else short[type(step)]
        for step in flow
        if not (isinstance(step, Exchange) and step.receive == "backward")  # from no stage
    ]
    # The last of two stages: two inputs before the first forward, and with each gradient the input after next.
    assert " ".join(written) == "[f] [f] F B [gf] F B [gf] F B [gf] ( F B [gf] F B [g] F B [g] | ) ( )"
