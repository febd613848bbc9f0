"""scripts/bench/turns.py: of jobs that take turns, one runs at a time, and none is left behind."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.bench import turns
from scripts.bench.ranks import Job
from scripts.bench.run import RunError
from scripts.bench.turns import RunningTime
from tests.harness.run import server

LINE = " iteration        1/       1 | elapsed time per iteration (ms): 1.0 |"
# Between the call that stops a process and its last instruction, on a machine with other work.
LATE = 0.01


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs leave what they leave."""
    # The harness's, which has imported nearly all that the bench's own would import; it has a folder of its own.
    server()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def take_turns(jobs: Mapping[str, Job], read: Any = lambda *_: None, patience: float = 60.0) -> dict[str, Any]:
    lengths = dict.fromkeys(jobs, 0.2)
    return turns.in_turns("of two", jobs, lengths, 1, patience, lambda done: None, read)


def test_what_passes_while_a_job_is_stopped_is_no_time_of_its_own() -> None:
    ran = RunningTime([(10.0, 11.0), (20.0, 22.0)])
    assert [ran.at(moment) for moment in (9.0, 10.5, 11.0, 15.0, 20.5, 30.0)] == [0.0, 0.5, 1.0, 1.0, 1.5, 3.0]


def test_one_job_runs_at_a_time(folders: Path) -> None:
    job = Job("tests.bench_jobs:computes", {"line": LINE, "seconds": 1.0}, ranks=1, copies=2)
    taken: dict[str, list[tuple[float, float]]] = {}

    def read(name: str, outputs: list[str], ran: RunningTime) -> list[list[float]]:
        taken[name] = ran._turns
        return [json.loads(output.splitlines()[-1]) for output in outputs]

    moments = take_turns({"a": job, "b": job}, read)
    for name, other in (("a", "b"), ("b", "a")):
        for process in moments[name]:
            assert len(process) > 100
            of_the_other = [m for m in process for begin, end in taken[other] if begin + LATE < m < end]
            assert of_the_other == []
    # After both have started alone they take turns in the order a b, b a, a b, and so on.
    alone = taken["b"][0][0]
    order = [name for _, name in sorted((begin, name) for name in taken for begin, _ in taken[name] if begin > alone)]
    shared = order[order.index("a") :][:8]
    assert shared == list("abbaabba")[: len(shared)]
    assert len(shared) > 4
    assert list(folders.iterdir()) == []


def test_a_rank_that_fails_stops_all(folders: Path) -> None:
    good = Job("tests.bench_jobs:computes", {"line": LINE, "seconds": 60.0}, ranks=1)
    prints = {"stdout": {0: LINE}, "stderr": {0: "a reason\n"}, "fails": 0, "seconds": 0.0}
    bad = Job("tests.bench_jobs:prints", prints, ranks=1)
    before = time.monotonic()
    with pytest.raises(
        RunError, match="(?s)a reason.*ranks that ended first: 0 with 1 .bad.*The run of two failed"
    ) as told:
        take_turns({"good": good, "bad": bad})
    assert time.monotonic() - before < 50
    (kept,) = folders.iterdir()
    assert f"{kept}" in str(told.value)


def test_a_failure_between_two_looks_is_seen(tmp_path: Path) -> None:
    ended: Any = SimpleNamespace(exitcode=1)
    with pytest.raises(RunError, match=r"0 with 1 \(bad\)"):
        turns._Alive("bad", [ended], tmp_path, 60.0).take_turn(0.0)


def test_a_job_that_hangs_is_given_up(folders: Path) -> None:
    prints = {"stdout": {}, "stderr": {}, "fails": None, "seconds": 60.0}
    with pytest.raises(RunError, match=r"no iteration ended in 1 s, so it was stopped \(hangs\)"):
        take_turns({"hangs": Job("tests.bench_jobs:prints", prints, ranks=1)}, patience=1.0)


def test_an_output_that_cant_be_read_is_an_error(folders: Path) -> None:
    def read(*_: Any) -> None:
        raise ValueError("it has 0 reports")

    job = Job("tests.bench_jobs:computes", {"line": LINE, "seconds": 0.0}, ranks=1)
    with pytest.raises(RunError, match="it has 0 reports"):
        take_turns({"a": job}, read)
