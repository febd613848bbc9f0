"""--asyncpp-trace: what it writes is what was executed, on one clock, and nobody waits for it."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_asyncpp import __main__ as command_line
from megatron_asyncpp.schedules import SCHEDULES
from megatron_asyncpp.schedules.actions import Backward, Begin, Finish, Flush, Forward
from megatron_asyncpp.schedules.batches import batches
from megatron_asyncpp.schedules.exchanges import with_exchanges
from megatron_asyncpp.schedules.measured import Blocked, Iteration, Part, Record, timeline
from megatron_asyncpp.schedules.simulate import Span
from tests import rows
from tests.harness import collectives
from tests.harness.flags import tiny_flags
from tests.harness.results import RankResult, Run
from tests.harness.run import run
from tests.test_pictures import Svg, checked_trace
from tests.waits import waits

ITERATIONS, MICROBATCHES, STAGES = 8, 4, 2
FIRST, LAST = 3, 5  # of the run, where nothing else is asked for
SHIFTS = {1: 5.0, 3: -3.0}  # seconds by which the clocks of these ranks differ from the other ones'
NEAR = 0.005  # seconds to which clocks are aligned: half a round trip, on a busy machine too


def shift_clocks(result: RankResult) -> None:
    """Hook: two machines of which each has been running for another time; and a recording of all collectives."""
    shift, clock = SHIFTS.get(int(os.environ["RANK"]), 0.0), time.perf_counter
    time.perf_counter = lambda: clock() + shift
    collectives.record(result)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """Two pipelines of two stages: ranks 0 and 2, ranks 1 and 3."""
    folder = tmp_path_factory.mktemp("trace")
    (folder / "rank-7.json").write_text("of an earlier run")
    flags = tiny_flags(
        *(STAGES, MICROBATCHES, ITERATIONS),
        layers=STAGES,
        data_parallel=2,
        clip=0.2,
        extra=(*rows.TWO_BW, "--asyncpp-trace", str(folder)),
    )
    return run(flags, 4, hooks="tests.test_trace:shift_clocks"), folder


@pytest.fixture
def parts(traced: tuple[Run, Path]) -> list[Part]:
    files = [traced[1] / f"rank-{rank}.json" for rank in range(4)]
    return [Part.of_json(json.loads(file.read_text())) for file in files]


def as_planned(stage: int) -> list[tuple]:
    """The plan of the iterations asked for and of those next to them: each kind of action, and its fields."""
    plan = SCHEDULES["2bw"].generate(stage, STAGES, batches(0, ITERATIONS, iter([MICROBATCHES] * ITERATIONS), delay=1))
    flow = [step for step in with_exchanges(plan) if not isinstance(step, Flush)]
    ends = {step.batch: index for index, step in enumerate(flow) if isinstance(step, Begin)}
    part = flow[ends[FIRST - 3] + 1 : ends[LAST] + 1]
    return [(type(step).__name__, tuple(getattr(step, each.name) for each in fields(step))) for step in part]


def test_it_is_what_was_planned(parts: list[Part]) -> None:
    for part in parts:
        assert part.stage == part.rank // 2 and part.pipeline == part.rank % 2
        assert [each[:2] for each in part.iterations] == [(n, MICROBATCHES) for n in range(FIRST - 1, LAST + 2)]
        done = [(kind, what) for kind, what, *_ in part.records if kind != "Sums"]
        assert done == as_planned(part.stage)
        # One wait a step, before it ends.
        others = [record.kind for record in part.records if record.kind in ("Sums", "Finish")]
        assert others == ["Sums", "Finish"] * (LAST - FIRST + 3)


def test_nothing_overlaps_and_a_message_arrives_after_it_was_sent(parts: list[Part]) -> None:
    shown = timeline(parts)
    assert shown.microbatches == (MICROBATCHES, MICROBATCHES)
    assert shown.name == f"2bw, iterations {FIRST} to {LAST} as measured"
    assert {first: [row.rank for row in each] for first, each in shown.pipelines.items()} == {0: [0, 2], 1: [1, 3]}
    ends = []
    for pipeline in shown.pipelines.values():
        sent: dict[str, float] = {}
        received: dict[str, float] = {}
        for row in pipeline:
            done = sorted(row.all, key=lambda each: (each.start, each.end))
            for before, after in pairwise(done):
                assert before.end <= after.start, f"{before} and {after} of rank {row.rank} overlap"
            ends.append((done[0].start, done[-1].end))
            for each in row.blocked:
                for way, message in re.findall(r"(send|receive) ((?:forward|backward) \d+\.\d+)", each.what):
                    times = sent if way == "send" else received
                    assert message not in times
                    times[message] = each.start if way == "send" else each.end
        both = sent.keys() & received.keys()
        assert len(both) >= 2 * MICROBATCHES * (LAST - FIRST)
        for message in both:
            assert received[message] > sent[message] - NEAR, message
            assert received[message] < sent[message] + 5.0 / 2, f"{message}: the clocks are seconds apart"
    # All rows show the same time.
    assert max(start for start, _ in ends) - min(start for start, _ in ends) < 0.5


def test_clocks_are_aligned(parts: list[Part]) -> None:
    for part in parts:
        assert part.behind == pytest.approx(-SHIFTS.get(part.rank, 0.0), abs=NEAR)
    assert parts[0].behind == 0.0


def test_nobody_waits_for_it(traced: tuple[Run, Path]) -> None:
    found = waits(traced[0], range(2, ITERATIONS - 1))
    assert not found, "\n".join(map(str, found))


def test_rank_0_puts_all_together_in_the_end(
    traced: tuple[Run, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done, folder = traced
    names = {*(f"rank-{rank}.json" for rank in range(4)), "timeline.png", "trace.json"}
    assert {file.name for file in folder.iterdir()} == names, "and nothing is left of an earlier run"
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    (line,) = (line for line in done.ranks[0].stdout.splitlines() if line.startswith("megatron_asyncpp: wrote"))
    assert f"{folder}/timeline.png, and trace.json beside it" in line
    assert f"rank 0 has traced iterations {FIRST} to {LAST}; to see them before the run ends" in done.ranks[0].stdout

    events = checked_trace(folder / "trace.json")
    named = [event["args"]["name"] for event in events if event["name"] in ("process_name", "thread_name")]
    title = f"2bw, iterations {FIRST} to {LAST} as measured"
    assert named == [
        *(f"{title}, pipeline of rank 0", "stage 0 (rank 0)", "stage 1 (rank 2)"),
        *(f"{title}, pipeline of rank 1", "stage 0 (rank 1)", "stage 1 (rank 3)"),
    ]
    timed = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in timed} == {"forward", "backward", "step", "blocked"}
    ways = {event["bind_id"]: event["pid"] for event in timed if "bind_id" in event}
    assert all(ways[event["bind_id"]] == event["pid"] for event in timed if "bind_id" in event)

    # The command makes the same of the parts, once all are there.
    assert command_line.main(["timeline", "--from", str(folder), "--out", str(tmp_path / "t.svg")]) == 0
    svg = Svg(tmp_path / "t.svg")
    assert f"{title}: P = 2 pipeline stages, M = 4 microbatches per batch" in svg.texts
    shown = [f"forward-0-{k}-{m}" for k in range(FIRST - 1, LAST) for m in range(MICROBATCHES)]
    drawn = [name for name in svg.named("forward-0-.*") if name in shown]
    assert sorted(drawn, key=lambda name: svg.ends[name]) == shown[1:], "the first of all ran an iteration earlier"
    perfetto = ["--format", "perfetto", "--out", str(tmp_path / "t.json")]
    assert command_line.main(["timeline", "--from", str(folder), *perfetto]) == 0
    assert (tmp_path / "t.json").read_text() == (folder / "trace.json").read_text()
    assert capsys.readouterr().out.splitlines()[0] == f"wrote {tmp_path / 't.svg'}"


def test_a_run_that_leaves_early_writes_what_there_is(tmp_path: Path) -> None:
    extra = ("--asyncpp-schedule", "1f1b", "--asyncpp-trace", str(tmp_path / "new" / "folder"))
    leaving = ("--asyncpp-trace-iters", "2-9", "--exit-interval", "3")
    done = run(tiny_flags(1, 2, 9, extra=(*extra, *leaving)), 1)
    part = Part.of_json(json.loads((tmp_path / "new/folder/rank-0.json").read_text()))
    assert [each.number for each in part.iterations] == [1, 2, 3]
    assert "exiting program at iteration 3" in done.ranks[0].stdout
    assert timeline([part]).name == "1f1b, iterations 2 to 3 as measured"
    assert (tmp_path / "new/folder/timeline.png").exists()


def test_a_wide_lead_waits_within_its_actions(tmp_path: Path) -> None:
    flags = tiny_flags(2, 4, 6, extra=(*rows.TWO_BW, "--asyncpp-lead", "wide", "--asyncpp-trace", str(tmp_path)))
    run(flags, 2)
    both = [Part.of_json(json.loads((tmp_path / f"rank-{rank}.json").read_text())) for rank in range(2)]
    for part, arrives in zip(both, ("backward", "forward"), strict=True):
        kinds = [record.kind for record in part.records]
        assert kinds.count("Arrival") == kinds.count("Forward") + kinds.count("Backward")
        found = {
            each.what.partition(" ")[2].partition(" ")[0] for each in timeline(both).pipelines[0][part.stage].blocked
        }
        assert arrives in found
        done = sorted(timeline(both).pipelines[0][part.stage].all, key=lambda each: (each.start, each.end))
        assert all(before.end <= after.start for before, after in pairwise(done))


def part_of(rank: int, behind: float, records: list[Record], starts: dict[int, float], end: float) -> Part:
    """A part of a run of one microbatch an iteration; its times are given by rank 0's clock."""
    own = [Record(kind, what, start - behind, end - behind) for kind, what, start, end in records]
    iterations = [Iteration(number, 1, start - behind) for number, start in starts.items()]
    return Part(rank, 2, 0, rank, 2, "a plan", False, 2, 2, behind, iterations, end - behind, own)


def two_ranks() -> list[Part]:
    """The second iteration lasts from 10 to 20 on the first rank, and from 13 to 23 on the other one."""
    first = [
        Record("Exchange", ("forward", "backward"), 5.0, 9.0),
        Record("Backward", (0, 1, 0), 9.0, 12.0),
        Record("Exchange", ("backward", "forward"), 12.0, 12.5),  # to and from nobody
        Record("Sums", (1,), 12.5, 14.0),
        Record("Begin", (1, True), 12.0, 15.0),
        Record("Sums", (0,), 15.0, 17.0),
        Record("Finish", (0, True), 15.0, 18.0),
        Record("Forward", (0, 2, 1), 18.0, 26.0),
    ]
    second = [Record("Forward", (0, 2, 1), 13.0, 15.0), Record("Exchange", ("backward", "forward"), 22.0, 24.0)]
    return [
        part_of(0, 0.0, first, {1: 0.0, 2: 10.0, 3: 20.0}, 30.0),
        part_of(1, -100.0, second, {2: 13.0, 3: 23.0}, 33.0),
    ]


def test_parts_are_put_on_one_clock_and_cut_to_the_same_time() -> None:
    shown = timeline(two_ranks())
    first, second = shown.pipelines[0]
    assert first.spans == [
        Span(0, Backward(0, 1, 0), 10.0, 12.0),
        Span(0, Begin(1, True), 12.0, 12.5),
        Span(0, Finish(0, True), 17.0, 18.0),
        Span(0, Forward(0, 2, 1), 18.0, 23.0),
    ]
    assert first.blocked == [
        Blocked(0, "wait for sums of step 1", 12.5, 14.0),
        Blocked(0, "wait for sums of step 0", 15.0, 17.0),
    ]
    assert second.spans == [Span(1, Forward(0, 2, 1), 13.0, 15.0)]
    assert second.blocked == [Blocked(1, "send backward 2.0, receive forward", 22.0, 23.0)]
    assert shown.slowdown == 13 / 7, "13 seconds are shown, of which the busier rank computes 7"
    assert shown.name == "a plan, iteration 2 as measured"


def test_what_was_posted_ahead_is_waited_for_when_it_is_needed() -> None:
    records = [
        Record("Exchange", ("backward", "forward"), 13.0, 13.5),
        Record("Arrival", ("forward",), 13.5, 16.0),
        Record("Forward", (0, 2, 1), 13.5, 19.0),
    ]
    first, _ = two_ranks()
    ahead = replace(part_of(1, 0.0, records, {2: 13.0, 3: 23.0}, 33.0), ahead=True)
    row = timeline([first, ahead]).pipelines[0][1]
    assert row.spans == [Span(1, Forward(0, 2, 1), 16.0, 19.0)]
    assert [(each.what, each.start, each.end) for each in row.blocked] == [
        ("send backward, post forward", 13.0, 13.5),
        ("receive forward 2.0", 13.5, 16.0),
    ]


def unreadable(folder: Path) -> None:
    (folder / "rank-1.json").write_text('{"rank": 1}')


def no_such_iterations(folder: Path) -> None:
    for part in two_ranks():
        (folder / f"rank-{part.rank}.json").write_text(json.dumps(replace(part, first=7, last=8).as_json()))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda folder: (folder / "rank-1.json").unlink(),
            "has no part of rank 1: wait until all ranks have",
        ),
        (lambda folder: [file.unlink() for file in folder.iterdir()], "has no rank-*.json: give the folder of a run"),
        (unreadable, "doesn't hold a trace that can be read: "),
        (no_such_iterations, "rank 0 came to none of the iterations 7 to 8"),
    ],
    ids=["missing", "none", "unreadable", "no such iterations"],
)
def test_what_is_no_trace_is_refused(
    change: Callable[[Path], object], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "trace"
    folder.mkdir()
    for part in two_ranks():
        (folder / f"rank-{part.rank}.json").write_text(json.dumps(part.as_json()))
    assert command_line.main(["timeline", "--from", str(folder), "--out", str(tmp_path / "t.png")]) == 0
    change(folder)
    with pytest.raises(SystemExit):
        command_line.main(["timeline", "--from", str(folder), "--out", str(tmp_path / "u.png")])
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
    assert not (tmp_path / "u.png").exists()
