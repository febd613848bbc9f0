"""A timeline as a trace that https://ui.perfetto.dev and chrome://tracing open.

The format is the "Trace Event Format", in JSON: complete events ("X") for what takes time, instant events ("i") for
what doesn't, metadata ("M") for names. Its times are microseconds, from zero on here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from megatron_asyncpp.schedules.actions import Backward, Begin, Compute, Finish, Forward
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
    trace = {"displayTimeUnit": "ms", "traceEvents": events(spans, name, unit)}
    out.write_text(json.dumps(trace), encoding="utf-8")


def events(spans: Sequence[Span], name: str, unit: Literal["forwards", "seconds"]) -> list[Event]:
    """The trace's events: the names of the pipeline and of its stages, and then what happened, by time."""
    spans = sorted(spans, key=lambda span: span.start)
    named: list[Event] = [_metadata("process_name", {"name": name})]
    for stage in sorted({span.stage for span in spans}):
        named.append(_metadata("thread_name", {"name": f"stage {stage}"}, stage))
        named.append(_metadata("thread_sort_index", {"sort_index": stage}, stage))
    timed = [_event(span, spans[0].start, _MICROSECONDS[unit]) for span in spans]
    _connect(timed)
    return named + timed


def _metadata(name: str, args: Event, stage: int | None = None) -> Event:
    event: Event = {"ph": "M", "name": name, "pid": _PROCESS, "args": args}
    return event if stage is None else {**event, "tid": _thread(stage)}


def _thread(stage: int) -> int:
    # Thread 0 is a kernel's idle thread to some readers of the format.
    return stage + 1


def _event(span: Span, zero: float, microseconds: int) -> Event:
    # Whole microseconds, and a duration between rounded times: so boxes that touch never come to overlap, which the
    # format forbids.
    start, end = round((span.start - zero) * microseconds), round((span.end - zero) * microseconds)
    action, kind = span.action, _NAMES[type(span.action)]
    event: Event = {"pid": _PROCESS, "tid": _thread(span.stage), "ts": start, "args": {"batch": action.batch}}
    if isinstance(action, Compute):
        event |= {"name": f"{kind} {action.batch}.{action.microbatch}", "cat": kind}
        event["args"] |= {"microbatch": action.microbatch, "version": action.version}
    else:
        event |= {"name": f"{kind} {action.batch}", "cat": "step"}
        if isinstance(action, Finish):
            event["args"]["version"] = action.batch + 1
    if isinstance(action, Compute) or end > start:
        return event | {"ph": "X", "dur": end - start}
    return event | {"ph": "i", "s": "t"}


def _connect(timed: Sequence[Event]) -> None:
    """Join the boxes of each microbatch by arrows: a viewer shows its way through the stages and back."""
    ways: dict[tuple[int, int], list[Event]] = {}
    for event in timed:
        if "microbatch" in event["args"]:
            ways.setdefault((event["args"]["batch"], event["args"]["microbatch"]), []).append(event)
    for number, way in enumerate(ways.values(), start=1):
        for event in way:
            event["bind_id"] = hex(number)
        for event in way[:-1]:
            event["flow_out"] = True
        for event in way[1:]:
            event["flow_in"] = True
