"""Where a stage's time goes: how much of it is spent blocked, always; and when it did what, while that is recorded.

Times are between two events on the current CUDA stream. On a GPU that is the time that the stream itself was held up by
a message, or had nothing to do because the host waited: a host only launches, and seldom waits itself. In CPU mode an
event is a reading of ``time.perf_counter``, and its time that of the host.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron_asyncpp.schedules.actions import Action
from megatron_asyncpp.schedules.exchanges import Exchange, Payload


@dataclass(frozen=True, slots=True)
class Sums:
    """Wait for what the batch's optimizer step needs to know of the other ranks."""

    batch: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """Wait for a message that was posted ahead and is needed now."""

    payload: Payload


Timed = Action | Exchange | Sums | Arrival


class Record(NamedTuple):
    """Something that was done, from one CUDA event to another."""

    what: Timed
    start: Any
    end: Any


class Clock:
    """One rank's. All that it costs is two events for each message and each wait."""

    def __init__(self) -> None:
        """Count from now on."""
        self._since = time.perf_counter()
        self._paused = False
        self._waits: deque[tuple[Any, Any]] = deque()  # events, whose time isn't counted yet
        self._records: list[Record] | None = None

    def start(self, what: Timed) -> Any:
        """Now it begins. Returns what ``stop`` must be given."""
        return None if self._records is None and isinstance(what, Action) else event()

    def stop(self, what: Timed, started: Any) -> None:
        """Now it has ended."""
        if started is None:
            return
        ended = event()
        if not isinstance(what, Action):
            self._waits.append((started, ended))
        if self._records is not None:
            self._records.append(Record(what, started, ended))

    def share(self) -> float:
        """The share of the time since it was last asked that was spent in messages and waits. It doesn't wait itself.

        On a GPU, messages that the host has launched and the stream hasn't come to yet are counted the next time: the
        sum over several iterations is right, and that of one is off by what the host is ahead.
        """
        blocked = 0.0
        while self._waits and self._waits[0][1].query():
            started, ended = self._waits.popleft()
            blocked += started.elapsed_time(ended) / 1000
        since, self._since = self._since, time.perf_counter()
        return blocked / (self._since - since)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within the context time isn't counted: it is no part of an iteration, as in Megatron's time of it."""
        if self._paused:
            yield
            return
        began, self._paused = time.perf_counter(), True
        try:
            yield
        finally:
            self._since += time.perf_counter() - began
            self._paused = False

    def record(self, records: list[Record] | None) -> None:
        """From now on put all that is done into a list, or, with None, nowhere."""
        self._records = records


def event() -> Any:
    """A CUDA event that is recorded now, on the current stream."""
    recorded = torch.cuda.Event(enable_timing=True)
    recorded.record()
    return recorded
