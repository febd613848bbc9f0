"""The bench of the plugin's own cost: what it reads, what it makes of it, and one short real run."""

from __future__ import annotations

import json

import pytest

from scripts.bench import overhead
from scripts.bench.overhead import Report


def output(times: list[float], functions: dict[str, tuple[float, float]] | None = None) -> str:
    report = {"rank": 0, "iterations_ms": times, "functions": functions or {}}
    return f"...\nbench own: {json.dumps(report)}\n"


def test_what_a_rank_printed_is_read() -> None:
    report = overhead.report_of(output([10.0, 12.0], {"a.py:1 f": (0.5, 2.0), "b.py:7 g": (0.25, 1.0)}))
    assert report == Report([10.0, 12.0], {"a.py:1 f": (0.5, 2.0), "b.py:7 g": (0.25, 1.0)})
    assert report.python_ms == 0.75


@pytest.mark.parametrize(("text", "sentence"), [("", "0 reports"), (output([1.0]) * 2, "2 reports")])
def test_a_log_that_is_not_whole_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        overhead.report_of(text)


def reports(own: tuple[float, float], thread: tuple[float, float]) -> list[list[Report]]:
    """Of three rounds; most iterations were disturbed, and in one round the profiler was."""
    return [
        [Report([t, *[1e6] * 9, 0.0][:length], {"f": (o * more, 3.0)}) for t, o in zip(thread, own, strict=True)]
        for length, more in ((1, 1.0), (11, 1.0), (1, 100.0))
    ]


def test_the_cost_of_a_microbatch_and_of_an_iteration_are_told_apart() -> None:
    few, many = overhead.FEW, overhead.MANY
    measured = {
        ("1f1b", few): reports((0.5, 0.5), (30.0, 20.0)),
        ("1f1b", many): reports((0.5, 0.5), (110.0, 120.0)),
        # On stage 0 it is 2 + 0.25 M, and on stage 1 it is 1 + 0.5 M, and the thread takes as much longer.
        ("2bw", few): reports((2.5 + 0.25 * few, 1.5 + 0.5 * few), (33.0, 23.0)),
        ("2bw", many): reports((2.5 + 0.25 * many, 1.5 + 0.5 * many), (117.0, 131.0)),
    }
    rows = overhead.costs("2bw", measured)
    assert [(row["stage"], row["microbatch_ms"], row["iteration_ms"]) for row in rows] == [
        (0, 0.25, 2.0),
        (1, 0.5, 1.0),
    ]
    assert [(row["thread_ms_4"], row["thread_ms_20"]) for row in rows] == [(3.0, 7.0), (3.0, 11.0)]
    assert "| 2bw | 0 | +0.25 | +2.00 | +3.00 | +7.00 | 30.00 | 110.00 |" in overhead.table(rows)


def test_the_functions_are_listed_by_their_own_time_where_that_is_most() -> None:
    first, second = Report([], {"f": (1.0, 5.0), "g": (2.0, 1.0)}), Report([], {"f": (3.0, 6.0)})
    assert overhead.profile([[first, second]] * 3) == [("f", 3.0, 6.0), ("g", 2.0, 1.0)]
    assert "   3.000     6.0  f" in overhead.listing("2bw", [("f", 3.0, 6.0)])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--variants 1f1b", "'1f1b' is none of the plugin's, choose from 2bw-blocking, 2bw, 2bw-wide"),
        ("--iterations 19", "--iterations 19 leaves too few after the warm-up: give at least 20"),
        ("--rounds 0", "--rounds 0 measures nothing: give at least 1"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        overhead.main(words.split())
    assert leaving.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"overhead.py: {line.removeprefix('overhead.py: ')}"
    assert sentence in line


@pytest.mark.slow
def test_a_real_run_gives_a_cost_for_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert overhead.main(["--variants", "2bw", "--iterations", "20", "--rounds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["variant"], row["stage"]) for row in found["rows"]] == [("2bw", 0), ("2bw", 1)]
    assert all(row["megatron_thread_ms_20"] > row["megatron_thread_ms_4"] > 0 for row in found["rows"])
    calls = {name.split()[-1]: calls for name, _, calls in found["profiles"]["2bw"]}
    assert calls["_just_in_time"] == pytest.approx(4 * overhead.MANY, abs=4)  # forward, exchange, backward, exchange
