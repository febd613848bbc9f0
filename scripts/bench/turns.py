"""Several jobs that are alive at the same time and take turns, so that all of them meet the same machine.

A core whose caches and clock other tenants share isn't as fast in one half minute as in the next, and jobs that run
one after another are compared by that. Here a job runs for a second or two, is stopped as a whole (SIGSTOP), and the
next one goes on, so every half minute has a part of each.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from scripts.bench.ranks import Job, started
from scripts.bench.run import RunError, hung, kept_if_it_fails, logged, raise_if_failed, result_of

_POLL = 0.2  # seconds, while a job starts


class RunningTime:
    """The time that a job has been running, in seconds; what passes while it is stopped is left out."""

    def __init__(self, turns: list[tuple[float, float]]) -> None:
        """Set up.

        Args:
            turns: when each began and ended, by ``time.monotonic``, in order.
        """
        self._turns = turns

    def at(self, moment: float) -> float:
        """How long it had been running at a moment by ``time.monotonic``."""
        return sum(max(0.0, min(moment, end) - begin) for begin, end in self._turns)


class _Alive:
    """A job that takes turns."""

    def __init__(self, name: str, processes: list[BaseProcess], folder: Path, patience: float) -> None:
        self.name = name
        self.processes = processes
        self.folder = folder
        self.turns: list[tuple[float, float]] = []
        self._patience = patience
        self._heard = (0, 0.0)  # of so many iterations, after so long a running time

    @property
    def running(self) -> list[BaseProcess]:
        """Its processes that haven't ended.

        Raises:
            RunError: one has failed. Whoever looks is told, so no failure is overlooked that comes between two looks.
        """
        running = [process for process in self.processes if process.exitcode is None]
        try:
            raise_if_failed(self.processes, self.folder)
        except RunError as error:
            raise RunError(f"{error} ({self.name})") from None
        return running

    @property
    def logged(self) -> int:
        """Iterations that its last rank has logged."""
        return logged(self.folder, len(self.processes) - 1)

    def take_turn(self, seconds: float) -> None:
        """Run for so long, or until all processes have ended.

        Raises:
            RunError: one has failed, or the job hangs.
        """
        began = time.monotonic()
        self._send(signal.SIGCONT)
        while (left := began + seconds - time.monotonic()) > 0 and (running := self.running):
            wait([process.sentinel for process in running], left)
        self._send(signal.SIGSTOP)
        self.turns.append((began, time.monotonic()))
        iterations, ran = self.logged, sum(end - begin for begin, end in self.turns)
        if iterations > self._heard[0]:
            self._heard = (iterations, ran)
        elif self.running and ran > self._heard[1] + self._patience:
            raise RunError(f"{hung(self.folder, len(self.processes), self._patience)} ({self.name})")

    def _send(self, number: signal.Signals) -> None:
        for process in self.running:
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                os.kill(process.pid, number)


def in_turns[Result](
    name: str,
    jobs: Mapping[str, Job],
    turns: Mapping[str, float],
    warm_up: int,
    patience: float,
    progress: Callable[[int], None],
    read: Callable[[str, list[str], RunningTime], Result],
) -> dict[str, Result]:
    """Run jobs until all have ended, and read what their ranks printed.

    Each one first runs alone for its first iterations, in which memory is allocated. Every second time the turns are
    taken in reverse, so that a machine that gets slower and slower is as slow for each of them.

    Args:
        name: of all of them, for a message.
        jobs: by name.
        turns: seconds that each one's turn lasts. As long as its iterations take in comparison, and all end together.
        warm_up: iterations that a job runs alone.
        patience: seconds of a job's own time that an iteration, or the start, may take.
        progress: called after each turn with the number of iterations that all last ranks together have logged.
        read: makes a result of a job's name, its ranks' standard outputs, and when it ran.

    Raises:
        RunError: a rank failed or a job hung, or an output can't be read. It is left in the folder that the message
            names.
    """
    with kept_if_it_fails(name) as folder:
        with contextlib.ExitStack() as stack:
            alive: list[_Alive] = []
            for key, job in jobs.items():
                (folder / key).mkdir()
                processes = stack.enter_context(started(job, folder / key))
                alive.append(_Alive(key, processes, folder / key, patience))
                while alive[-1].logged < warm_up and alive[-1].running:
                    alive[-1].take_turn(_POLL)
                    progress(sum(one.logged for one in alive))
            while any(one.running for one in alive):
                for one in alive:
                    one.take_turn(turns[one.name])
                    progress(sum(each.logged for each in alive))
                alive.reverse()
        return {
            one.name: result_of(
                one.folder,
                len(one.processes),
                lambda outputs, one=one: read(one.name, outputs, RunningTime(one.turns)),
            )
            for one in alive
        }
