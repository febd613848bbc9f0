"""Timelines as pictures and as traces: what is in them, where it is, and what can't be made."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from megatron_asyncpp import __main__ as command_line
from megatron_asyncpp.schedules import SCHEDULES, perfetto, picture
from megatron_asyncpp.schedules.actions import Backward, Begin, Finish, Forward
from megatron_asyncpp.schedules.simulate import Span, simulate

BATCHES = 3
PLANS = [("2bw", 1, 1), ("2bw", 4, 8), ("1f1b", 4, 8), ("2bw-blocking", 3, 5), ("pipedream", 3, 3), ("paci", 4, 4)]


def timeline(name: str, stages: int, microbatches: int, batches: int = BATCHES) -> list[Span]:
    return simulate(SCHEDULES[name], stages, microbatches, batches=batches).spans


def measured(spans: list[Span]) -> list[Span]:
    """As a run's clock may give them: in seconds, a forward of 10 ms, from some time on."""
    return [replace(span, start=1000.5 + span.start / 100, end=1000.5 + span.end / 100) for span in spans]


def later(action: Any, batches: int) -> Any:
    """The same action in a run that has trained so many batches before."""
    moved = replace(action, batch=action.batch + batches)
    return replace(moved, version=action.version + batches) if isinstance(action, Forward | Backward) else moved


class Svg:
    """What a picture holds: the ends of each box on the page, from left to right, and all text."""

    def __init__(self, file: Path) -> None:
        root = ElementTree.parse(file).getroot()
        svg = "{http://www.w3.org/2000/svg}"
        assert root.tag == f"{svg}svg"
        self.texts = ["".join(text.itertext()) for text in root.iter(f"{svg}text")]
        self.ends: dict[str, tuple[float, float]] = {}
        for group in root.iter(f"{svg}g"):
            path = group.find(f"{svg}path")
            if path is not None and re.match(r"(row|forward|backward|weights|begin|finish)-", group.get("id", "")):
                across = [float(x) for x in re.findall(r"[ML] ([-\d.]+) ", path.get("d", ""))]
                assert group.get("id") not in self.ends, "two boxes of the same name"
                self.ends[group.get("id", "")] = (min(across), max(across))

    def named(self, pattern: str) -> list[str]:
        return [name for name in self.ends if re.fullmatch(pattern, name)]


def draw(spans: list[Span], folder: Path, **asked: Any) -> Svg:
    picture.draw(spans, folder / "t.svg", **{"name": "a plan", "slowdown": 1.25, **asked})
    return Svg(folder / "t.svg")


@pytest.mark.parametrize("shape", PLANS, ids=str)
def test_every_box_is_where_the_plan_has_it(shape: tuple[str, int, int], tmp_path: Path) -> None:
    spans = timeline(*shape)
    svg = draw(spans, tmp_path)
    left, right = svg.ends["row-0"]
    scale = (right - left) / max(span.end for span in spans)
    expected = {}
    for span in spans:
        action = span.action
        if isinstance(action, Forward | Backward):
            kind = "forward" if isinstance(action, Forward) else "backward"
            name = f"{kind}-{span.stage}-{action.batch}-{action.microbatch}"
            expected[name] = pytest.approx((left + span.start * scale, left + span.end * scale), abs=0.01)
    assert len(expected) == 2 * shape[1] * shape[2] * BATCHES
    assert {name: svg.ends[name] for name in svg.named(r"(forward|backward)-.*")} == expected


def test_steps_are_marked_where_they_begin_and_finish(tmp_path: Path) -> None:
    svg = draw(timeline("2bw", 4, 8), tmp_path)
    assert len(svg.named("begin-.*")) == len(svg.named("finish-.*")) == 4 * BATCHES
    for stage in range(4):
        for batch in range(BATCHES):
            left, right = svg.ends[f"begin-{stage}-{batch}"]
            assert (left + right) / 2 == pytest.approx(svg.ends[f"backward-{stage}-{batch}-7"][1], abs=0.1)
        # V(1) exists from here on, and the next forward is the first on it.
        left, right = svg.ends[f"finish-{stage}-0"]
        assert (left + right) / 2 == pytest.approx(svg.ends[f"forward-{stage}-2-0"][0], abs=0.1)
    # On the first stage the last two steps finish together; their marks don't hide each other.
    assert svg.ends["finish-0-1"][1] <= svg.ends["finish-0-2"][0] + 0.01


@pytest.mark.parametrize(("name", "versions"), [("2bw", [0, 1]), ("1f1b", [0, 1, 2]), ("paci", [0, 1, 2])])
def test_it_says_which_weights_each_box_runs_on(name: str, versions: list[int], tmp_path: Path) -> None:
    spans = timeline(name, 4, 8)
    svg = draw(spans, tmp_path)
    for kind in ("forward", "backward"):
        found = [text for text in svg.texts if text.startswith(f"{kind}s on V")]
        assert Counter(found) == {f"{kind}s on V({version})": 4 for version in versions}
        # A strip starts and ends with the boxes that run on its version.
        for stage in range(4):
            strips = [svg.ends[strip] for strip in svg.named(f"weights-{kind}-{stage}-.*")]
            runs: dict[int, list[tuple[float, float]]] = {}
            for span in spans:
                if span.stage == stage and type(span.action).__name__.lower() == kind:
                    box = f"{kind}-{stage}-{span.action.batch}-{span.action.microbatch}"
                    runs.setdefault(span.action.version, []).append(svg.ends[box])
            assert strips == [pytest.approx((run[0][0], run[-1][1]), abs=0.01) for run in runs.values()]


def test_it_says_what_it_shows(tmp_path: Path) -> None:
    svg = draw(timeline("2bw", 4, 8), tmp_path, name="2bw", slowdown=1.0)
    assert "2bw: P = 4 pipeline stages, M = 8 microbatches per batch" in svg.texts
    # By hand: three batches of 8 x (1 + 2) and (P - 1) x (1 + 2) of start and end are 81, so 9 of 81 are idle.
    second = next(text for text in svg.texts if text.startswith("slowdown"))
    assert re.split(r"\s+\|\s+", second) == [
        "slowdown 1.000 in the long run (1 = the busiest stage only computes)",
        "11% of the time shown is idle, start and end included",
    ]
    assert svg.texts.count("11%") == 4
    assert {"batch 0", "batch 1", "batch 2", "idle", "its backward"} <= set(svg.texts)
    assert "within it" not in svg.texts, "a plan's steps take no time"
    assert "time (1 = the forward of one microbatch on the first stage)" in svg.texts
    assert svg.texts.count("7") == 4 * 2 * BATCHES, "the number of microbatch 7, in its forwards and backwards"


def test_batches_of_several_sizes_and_of_one_microbatch(tmp_path: Path) -> None:
    larger = [
        Span(0, Forward(1, 1, 0), 6.0, 7.0),
        Span(0, Backward(1, 1, 0), 7.0, 9.0),
    ]
    assert "a plan: P = 1 pipeline stage, M = 1 to 2 microbatches per batch" in (
        draw(timeline("1f1b", 1, 1, 2) + larger, tmp_path).texts
    )
    svg = draw(timeline("pipedream", 2, 2), tmp_path)
    assert "forward of a microbatch (number: its batch)" in svg.texts
    assert svg.texts.count("4") >= 2 * 2, "the boxes of the fifth update"


def test_numbers_are_left_out_where_boxes_are_too_small(tmp_path: Path) -> None:
    svg = draw(timeline("2bw", 2, 150, 1), tmp_path)
    assert len(svg.named("(forward|backward)-.*")) == 2 * 2 * 150
    assert "7" not in svg.texts
    assert "forward of a microbatch" in svg.texts


def test_a_measured_timeline_looks_like_the_plan(tmp_path: Path) -> None:
    spans = timeline("2bw", 2, 4)
    planned, real = draw(spans, tmp_path), draw(measured(spans), tmp_path, unit="seconds")
    assert "time in seconds" in real.texts
    assert real.ends.keys() == planned.ends.keys()
    for name, ends in planned.ends.items():
        assert real.ends[name] == pytest.approx(ends, abs=0.01)


def test_a_step_that_takes_time_is_a_box_and_not_idle(tmp_path: Path) -> None:
    spans = [
        Span(0, Forward(0, 0, 0), 0.0, 1.0),
        Span(0, Backward(0, 0, 0), 1.0, 3.0),
        Span(0, Begin(0), 3.0, 3.5),
        Span(0, Finish(0), 3.5, 4.0),
    ]
    svg = draw(spans, tmp_path)
    assert svg.ends["begin-0-0-box"] == pytest.approx((svg.ends["backward-0-0-0"][1], svg.ends["finish-0-0-box"][0]))
    assert svg.ends["finish-0-0-box"][1] == pytest.approx(svg.ends["row-0"][1])
    assert "0%" in svg.texts
    assert "within it" in svg.texts


def test_the_same_timeline_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        picture.draw(timeline("2bw", 2, 2), tmp_path / name, name="2bw", slowdown=1.0)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(
    ("shape", "first"),
    [
        *((shape, 0) for shape in [*PLANS, ("2bw", 16, 16), ("1f1b", 2, 40)]),
        # Late in a run: long numbers, and for PipeDream many batches.
        (("2bw", 4, 8), 123456),
        (("pipedream", 4, 8), 123456),
    ],
    ids=str,
)
def test_no_text_overlaps_another_or_leaves_the_page(
    shape: tuple[str, int, int], first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    spans = [replace(span, action=later(span.action, first)) for span in timeline(*shape)]
    picture.draw(spans, tmp_path / "t.png", name=shape[0], slowdown=1.0)
    (figure,) = figures
    FigureCanvasAgg(figure).draw()
    page = figure.bbox
    boxes = []
    ticks = {label for axes in figure.axes for label in axes.get_xticklabels()}
    for text in figure.findobj(Text):
        # A tick beyond the end of the axis exists, but isn't drawn.
        drawn = text not in ticks or text.get_position()[0] <= figure.axes[0].get_xlim()[1]
        if text.get_text() and drawn:
            extent = text.get_window_extent()
            assert page.x0 <= extent.x0 and extent.x1 <= page.x1, f"{text.get_text()!r} leaves the page"
            assert page.y0 <= extent.y0 and extent.y1 <= page.y1, f"{text.get_text()!r} leaves the page"
            boxes.append((extent.y1, extent.y0, extent.x0, extent.x1, text.get_text()))
    assert len(boxes) > 10
    for (top1, low1, left1, right1, text1), (top2, low2, left2, right2, text2) in combinations(boxes, 2):
        # A text's extent has the space for letters that reach below the line, so lines may touch.
        apart = right1 <= left2 or right2 <= left1 or top1 <= low2 + 2 or top2 <= low1 + 2
        assert apart, f"{text1!r} and {text2!r} overlap"


def checked_trace(file: Path) -> list[dict[str, Any]]:
    """The events of a trace that keeps to the Trace Event Format, names first."""
    trace = json.loads(file.read_text())
    assert set(trace) == {"traceEvents", "displayTimeUnit"} and trace["displayTimeUnit"] in {"ms", "ns"}
    events: list[dict[str, Any]] = trace["traceEvents"]
    for event in events:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["args"], dict)
        if event["ph"] == "M":
            key = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}[event["name"]]
            assert set(event["args"]) == {key}
            continue
        assert isinstance(event["tid"], int) and event["cat"]
        assert isinstance(event["ts"], int) and event["ts"] >= 0
        if event["ph"] == "X":
            assert isinstance(event["dur"], int) and event["dur"] >= 0
        else:
            assert event["ph"] == "i" and event["s"] in {"t", "p", "g"}
    kinds = [event["ph"] == "M" for event in events]
    assert kinds == sorted(kinds, reverse=True)
    return events


@pytest.mark.parametrize("seconds", [False, True])
@pytest.mark.parametrize("shape", PLANS, ids=str)
def test_trace(shape: tuple[str, int, int], seconds: bool, tmp_path: Path) -> None:
    _, stages, microbatches = shape
    spans = timeline(*shape)
    if seconds:
        perfetto.write(measured(spans), tmp_path / "t.json", name="pipeline", unit="seconds")
    else:
        perfetto.write(spans, tmp_path / "t.json", name="pipeline")
    events = checked_trace(tmp_path / "t.json")

    named = {(event["name"], event.get("tid")): event["args"] for event in events if event["ph"] == "M"}
    assert named.pop(("process_name", None)) == {"name": "pipeline"}
    threads = [args["name"] for (kind, _), args in named.items() if kind == "thread_name"]
    assert threads == [f"stage {stage}" for stage in range(stages)]
    assert len({event["pid"] for event in events}) == 1

    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    assert timed[0]["ts"] == 0
    count = Counter((event["tid"], event["cat"], event["ph"]) for event in timed)
    updates = sum(isinstance(span.action, Begin) for span in spans) // stages
    for tid in range(1, stages + 1):
        assert count.pop((tid, "forward", "X")) == count.pop((tid, "backward", "X")) == microbatches * BATCHES
        assert count.pop((tid, "step", "i")) == 2 * updates
        boxes = [event for event in timed if event["tid"] == tid and event["ph"] == "X"]
        assert all(before["ts"] + before["dur"] <= after["ts"] for before, after in pairwise(boxes))
    assert not count

    forward = 10_000 if seconds else 1_000
    found = Counter(
        (e["tid"] - 1, e["cat"], e["args"]["batch"], e["args"]["microbatch"], e["args"]["version"], e["ts"], e["dur"])
        for e in timed
        if e["ph"] == "X"
    )
    assert found == Counter(
        (
            span.stage,
            "forward" if isinstance(span.action, Forward) else "backward",
            span.action.batch,
            span.action.microbatch,
            span.action.version,
            round(span.start * forward),
            round((span.end - span.start) * forward),
        )
        for span in spans
        if isinstance(span.action, Forward | Backward)
    )


def test_trace_tells_a_microbatchs_way(tmp_path: Path) -> None:
    perfetto.write(timeline("2bw", 3, 4), tmp_path / "t.json", name="pipeline")
    ways: dict[str, list[dict[str, Any]]] = {}
    for event in checked_trace(tmp_path / "t.json"):
        if event["ph"] == "X":
            ways.setdefault(event["bind_id"], []).append(event)
    assert len(ways) == 4 * BATCHES
    for way in ways.values():
        assert [event["tid"] for event in way] == [1, 2, 3, 3, 2, 1]
        assert len({(event["args"]["batch"], event["args"]["microbatch"]) for event in way}) == 1
        assert [event.get("flow_out", False) for event in way] == [True] * 5 + [False]
        assert [event.get("flow_in", False) for event in way] == [False] + [True] * 5


def test_trace_of_measured_steps_and_of_times_that_are_no_whole_microseconds(tmp_path: Path) -> None:
    third = 1e-6 / 3
    spans = [Span(0, Forward(m, 0, 0), m * 5 * third, (m + 1) * 5 * third) for m in range(100)]
    spans += [Span(0, Begin(0), 500 * third, 500 * third), Span(0, Finish(0), 500 * third, 1e-3)]
    perfetto.write(spans, tmp_path / "t.json", name="pipeline", unit="seconds")
    events = [event for event in checked_trace(tmp_path / "t.json") if event["ph"] != "M"]
    boxes = [event for event in events if event["ph"] == "X"]
    assert all(before["ts"] + before["dur"] == after["ts"] for before, after in pairwise(boxes))
    assert boxes[-1]["name"] == "finish step 0" and boxes[-1]["args"] == {"batch": 0, "version": 1}
    assert [event["name"] for event in events if event["ph"] == "i"] == ["begin step 0"]


PLAN = ["timeline", "--schedule", "2bw", "--pp", "2", "--microbatches", "2"]


def test_the_command_writes_each_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main([*PLAN, "--out", str(tmp_path / "t.png")]) == 0
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert command_line.main([*PLAN, "--out", str(tmp_path / "t.svg"), "--batches", "2"]) == 0
    assert len(Svg(tmp_path / "t.svg").named("forward-.*")) == 2 * 2 * 2
    # Times are shown in forwards of the first stage, whatever unit they are given in.
    times = ["--forward", "10,20", "--backward", "30", "--latency", "5"]
    assert command_line.main([*PLAN, "--format", "perfetto", *times, "--out", str(tmp_path / "t.json")]) == 0
    boxes = [event for event in checked_trace(tmp_path / "t.json") if event["ph"] == "X"]
    assert {(event["tid"], event["cat"], event["dur"]) for event in boxes} == {
        *((1, "forward", 1000), (2, "forward", 2000), (1, "backward", 3000), (2, "backward", 3000))
    }
    assert min(event["ts"] for event in boxes if event["tid"] == 2) == 1500
    assert capsys.readouterr().out.splitlines() == [
        f"wrote {tmp_path / 't.png'}",
        f"wrote {tmp_path / 't.svg'}",
        f"wrote {tmp_path / 't.json'}: open it at https://ui.perfetto.dev",
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--out", "t.jpg"], "doesn't say what kind of picture to write: end its name in .png or .svg."),
        (["--out", "t"], "doesn't say what kind of picture to write: end its name in .png or .svg."),
        (["--out", "t.json"], "end its name in .png or .svg, or add --format perfetto."),
        (["--out", "t.png", "--format", "perfetto"], "end its name in .json, or add --format picture."),
        (["--out", "nowhere/t.png"], "can't be written (No such file or directory): give --out a file in a folder"),
        (["--out", "file/t.svg"], "can't be written (Not a directory): give --out a file in a folder"),
        (["--out", "nowhere/t.json", "--format", "perfetto"], "can't be written (No such file or directory): give"),
        (["--out", "t.png", "--pp", "3"], "at least 3 microbatches for --pp 3, but --microbatches is 2: raise it"),
        (["--out", "t.png", "--from", "x"], "and --schedule, --pp, --microbatches a plan: leave one of them out."),
        (["--out", "t.png", "--pp", "0"], "--pp 0 leaves nothing to show: give at least 1."),
        (["--out", "t.png", "--batches", "0"], "--batches 0 leaves nothing to show: give at least 1."),
        (["--out", "t.png", "--backward", "0"], "--backward 0 is no time that work takes: give numbers above 0."),
        (["--out", "t.png", "--forward", "nan"], "--forward nan is no number: give a time such as 1 or 0.25."),
        (["--out", "t.png", "--latency=-1"], "--latency -1 is no time that a message takes: give a number from"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_refuses_with_a_way_out(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as leaving:
        command_line.main([*PLAN, *words])
    assert leaving.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_plan_must_be_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as leaving:
        command_line.main(["timeline", "--schedule", "2bw", "--out", "t.png"])
    assert leaving.value.code == 2
    assert "--pp, --microbatches must be given to show a plan; to show what a run has" in capsys.readouterr().err


def test_only_a_picture_needs_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        command_line.main([*PLAN, "--out", str(tmp_path / "t.png")])
    assert capsys.readouterr().err == (
        "megatron_asyncpp: A picture is drawn with matplotlib: pip install matplotlib.\n"
    )
    assert command_line.main([*PLAN, "--format", "perfetto", "--out", str(tmp_path / "t.json")]) == 0


def test_matplotlib_is_imported_only_to_draw() -> None:
    program = (
        "import sys; import megatron_asyncpp.timeline_command, megatron_asyncpp.schedules.picture\n"
        "print([name for name in ('matplotlib', 'numpy', 'torch', 'megatron') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
