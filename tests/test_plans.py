"""Plans are data: order, versions and messages of every schedule, without torch or Megatron."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

import megatron_asyncpp.schedules as package
from megatron_asyncpp.schedules import SCHEDULES, slowdown
from megatron_asyncpp.schedules.actions import Action, Backward, Batch, Begin, Finish, Flush, Forward
from megatron_asyncpp.schedules.batches import batches
from megatron_asyncpp.schedules.exchanges import Exchange, with_exchanges

SHAPES = [(p, m) for p in (1, 2, 3, 4, 8, 16) for m in (p, p + 1, 2 * p)]
BATCHES = 4


def plan(name: str, stage: int, stages: int, microbatches: int, skipped: tuple[int, ...] = ()) -> list[Action]:
    schedule = SCHEDULES[name]
    return list(schedule.generate(stage, stages, batches(0, BATCHES, microbatches, schedule.delay, skipped)))


def messages(actions: list[Action], direction: str) -> list[tuple[str, int, int, int]]:
    """(send or receive, call, batch, microbatch) of one direction, in order; a call ends with Begin."""
    found, call, made, wanted = [], 0, None, None
    flow = list(with_exchanges(actions))
    for i, step in enumerate(flow):
        if isinstance(step, Begin):
            call += 1
        elif isinstance(step, Forward | Backward):
            made = step
        elif isinstance(step, Exchange):
            wanted = next((s for s in flow[i:] if isinstance(s, Forward | Backward)), None)
            if step.send == direction:
                found.append(("send", call, made.batch, made.microbatch))
            if step.receive == direction:
                found.append(("receive", call, wanted.batch, wanted.microbatch))
    return found


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_neighbours_agree_on_the_order_and_call_of_every_message(name: str, stages: int, microbatches: int) -> None:
    for skipped in ((), (1,)):
        plans = [plan(name, s, stages, microbatches, skipped) for s in range(stages)]
        for s in range(stages - 1):
            for direction, sender, receiver in (("forward", s, s + 1), ("backward", s + 1, s)):
                sent = [m[1:] for m in messages(plans[sender], direction) if m[0] == "send"]
                received = [m[1:] for m in messages(plans[receiver], direction) if m[0] == "receive"]
                assert sent == received, f"{direction} from stage {sender} to {receiver}"
                assert len(sent) == (BATCHES - len(skipped)) * microbatches


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_every_backward_is_on_the_weights_of_its_forward(name: str, stages: int, microbatches: int) -> None:
    for s in range(stages):
        newest, in_flight, count = 0, [], Counter[type]()
        for action in plan(name, s, stages, microbatches):
            count[type(action)] += 1
            if isinstance(action, Forward):
                assert newest - SCHEDULES[name].versions < action.version <= newest, "no such version in the ring"
                in_flight.append((action.microbatch, action.batch, action.version))
            elif isinstance(action, Backward):
                assert in_flight.pop(0) == (action.microbatch, action.batch, action.version)
            elif isinstance(action, Flush):
                assert not in_flight
            elif isinstance(action, Finish):
                newest += 1
                free = newest - SCHEDULES[name].versions  # the version whose buffer the step has just written over
                assert all(version != free for *_, version in in_flight), "a pending backward's weights are gone"
        assert not in_flight
        assert count[Forward] == count[Backward] == BATCHES * microbatches
        assert count[Begin] == count[Finish] == newest == BATCHES


def test_2bw_as_one_reads_it() -> None:
    short = {Forward: "F", Backward: "B", Flush: "|", Begin: "(", Finish: ")"}

    def text(name: str, stage: int) -> str:
        actions = SCHEDULES[name].generate(stage, 3, batches(0, 3, 3, delay=1))
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
    assert text("2bw", 1) == (
        "F00 F01 B00 F02 B01 F10 B02 (0 F11 B10 F12 B11 )0 F20 B12 (1 F21 B20 F22 B21 B22 |2 )1 (2 )2"
    )
    assert text("2bw", 2) == (
        "F00 B00 F01 B01 F02 B02 (0 F10 B10 F11 B11 F12 B12 )0 (1 F20 B20 F21 B21 F22 B22 |2 )1 (2 )2"
    )


def test_weights_of_each_batch() -> None:
    assert [batch.version for batch in batches(0, 5, 1, delay=1)] == [0, 0, 1, 2, 3]
    assert [batch.version for batch in batches(7, 10, 1, delay=1)] == [7, 7, 8]
    assert [batch.version for batch in batches(0, 4, 1, delay=0)] == [0, 1, 2, 3]


def test_a_skipped_iteration_drains_the_pipeline_before_it_and_counts_no_update() -> None:
    assert list(batches(0, 5, 2, delay=1, skipped=(2, 3))) == [
        Batch(0, 2, version=0, flush=False),
        Batch(1, 2, version=0, flush=True),
        Batch(2, 2, version=1, flush=True),
    ]


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
