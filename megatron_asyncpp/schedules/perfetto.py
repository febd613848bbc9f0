"""A timeline as a trace that https://ui.perfetto.dev and chrome://tracing open.

The format is the "Trace Event Format", in JSON: complete events ("X") for what takes time, instant events ("i") for
what doesn't, metadata ("M") for names. Its times are microseconds, from zero on here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megatron_asyncpp.schedules.actions import Backward, Begin, Compute, Finish, Forward
from megatron_asyncpp.schedules.measured import Blocked, Row
from megatron_asyncpp.schedules.simulate import Span

Event = dict[str, Any]

# A planned forward shows as a millisecond.
_MICROSECONDS = {"forwards": 1_000, "seconds": 1_000_000}
_PROCESS = 1
_NAMES: dict[type, str] = {Forward: "forward", Backward: "backward", Begin: "begin step", Finish: "finish step"}


def write(spans: Sequence[Span], out: Path, *, name: str, unit: Literal["forwards", "seconds"] = "forwards") -> None:
    """Write a timeline into a file.

    Args:
        spans: what the stages did and when, from any time on, each stage's in the order in which it did it.
        out: the file, .json.
        name: what it is a timeline of, such as "2bw".
        unit: what the times are in. One of "forwards" is the time that the first stage takes for a forward.
    """
    zero = min(span.start for span in spans)
    threads = {stage: f"stage {stage}" for stage in sorted({span.stage for span in spans})}
    _write(_names(_PROCESS, name, threads), _timed(_PROCESS, spans, zero, _MICROSECONDS[unit]), out)


def write_measured(pipelines: Mapping[int, Sequence[Row]], out: Path, *, name: str) -> None:
    """Write what all ranks of a run did into a file, as a process for each pipeline and a thread for each stage.

    Args:
        pipelines: by the rank of each one's first stage, its ranks by stage. Their times are in seconds.
        out: the file, .json.
        name: what it is a timeline of.
    """
    zero = min(each.start for rows in pipelines.values() for row in rows for each in row.all)
    named: list[Event] = []
    timed: list[Event] = []
    for process, (first, rows) in enumerate(sorted(pipelines.items()), start=_PROCESS):
        of = f", pipeline of rank {first}" if len(pipelines) > 1 else ""
        threads = {stage: f"stage {stage} (rank {row.rank})" for stage, row in enumerate(rows)}
        named += _names(process, name + of, threads)
        timed += _timed(process, [each for row in rows for each in row.all], zero, _MICROSECONDS["seconds"])
    _write(named, sorted(timed, key=lambda event: event["ts"]), out)


def _write(named: list[Event], timed: list[Event], out: Path) -> None:
    trace = {"displayTimeUnit": "ms", "traceEvents": named + timed}
    out.write_text(json.dumps(trace), encoding="utf-8")


def _names(process: int, name: str, threads: Mapping[int, str]) -> list[Event]:
    named: list[Event] = [_metadata("process_name", {"name": name}, process)]
    for stage, thread in threads.items():
        named.append(_metadata("thread_name", {"name": thread}, process, stage))
        named.append(_metadata("thread_sort_index", {"sort_index": stage}, process, stage))
    return named


def _timed(process: int, done: Sequence[Span | Blocked], zero: float, microseconds: int) -> list[Event]:
    """What happened in one pipeline, by time."""
    timed = []
    for each in sorted(done, key=lambda each: each.start):
        # Whole microseconds, and a duration between rounded times: so boxes that touch never come to overlap, which
        # the format forbids.
        start, end = round((each.start - zero) * microseconds), round((each.end - zero) * microseconds)
        event = {"pid": process, "tid": _thread(each.stage), "ts": start}
        timed.append(event | (_event(each, end - start) if isinstance(each, Span) else _blocked(each, end - start)))
    _connect(process, timed)
    return timed


def _metadata(name: str, args: Event, process: int, stage: int | None = None) -> Event:
    event: Event = {"ph": "M", "name": name, "pid": process, "args": args}
    return event if stage is None else {**event, "tid": _thread(stage)}


def _thread(stage: int) -> int:
    # Thread 0 is a kernel's idle thread to some readers of the format.
    return stage + 1


def _event(span: Span, duration: int) -> Event:
    action, kind = span.action, _NAMES[type(span.action)]
    event: Event = {"args": {"batch": action.batch}}
    if isinstance(action, Compute):
        event |= {"name": f"{kind} {action.batch}.{action.microbatch}", "cat": kind}
        event["args"] |= {"microbatch": action.microbatch, "version": action.version}
    else:
        event |= {"name": f"{kind} {action.batch}", "cat": "step"}
        if isinstance(action, Finish):
            event["args"]["version"] = action.batch + 1
    if isinstance(action, Compute) or duration > 0:
        return event | {"ph": "X", "dur": duration}
    return event | {"ph": "i", "s": "t"}


def _blocked(blocked: Blocked, duration: int) -> Event:
    return {"name": blocked.what, "cat": "blocked", "ph": "X", "dur": duration, "args": {}}


def _connect(process: int, timed: Sequence[Event]) -> None:
    """Join the boxes of each microbatch by arrows: a viewer shows its way through the stages and back."""
    ways: dict[tuple[int, int], list[Event]] = {}
    for event in timed:
        if "microbatch" in event["args"]:
            ways.setdefault((event["args"]["batch"], event["args"]["microbatch"]), []).append(event)
    for number, way in enumerate(ways.values(), start=1):
        for event in way:
            event["bind_id"] = hex((process << 32) + number)
        for event in way[:-1]:
            event["flow_out"] = True
        for event in way[1:]:
            event["flow_in"] = True
