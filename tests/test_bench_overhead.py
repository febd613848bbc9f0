"""The bench of the plugin's own cost: what it reads, what it makes of it, and one short real run."""

from __future__ import annotations

import json

import pytest

from scripts.bench import overhead


def output(times: list[float]) -> str:
    return f"...\nbench own: {json.dumps({'rank': 0, 'iterations_ms': times})}\n"


def test_the_first_iterations_and_the_last_do_not_count() -> None:
    warm, steady, drained = [900.0] * 5, [10.0, 12.0, 11.0], [700.0]
    assert overhead.own_time(output([*warm, *steady, *drained]), iterations=10) == 11.0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("", "0 reports"), (output([1.0] * 9) * 2, "2 reports"), (output([1.0] * 8), "times of 8 of 9")],
)
def test_a_log_that_is_not_whole_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        overhead.own_time(text, iterations=10)


def test_the_cost_of_a_microbatch_and_of_an_iteration_are_told_apart() -> None:
    # Megatron: 30 + 10 M on stage 0, 20 + 10 M on stage 1. The plugin: 31 + 10.5 M, and 22 + 10.25 M.
    few, many = overhead.FEW, overhead.MANY
    times = {
        ("1f1b", few): [[30 + 10 * few, 20 + 10 * few]] * 3,
        ("1f1b", many): [[30 + 10 * many, 20 + 10 * many]] * 3,
        ("2bw", few): [[31 + 10.5 * few, 22 + 10.25 * few], [1e6, 1e6], [0.0, 0.0]],
        ("2bw", many): [[0.0, 0.0], [31 + 10.5 * many, 22 + 10.25 * many], [1e6, 1e6]],
    }
    rows = overhead.costs("2bw", times)
    assert [(row["stage"], row["microbatch_ms"], row["iteration_ms"]) for row in rows] == [
        (0, 0.5, 1.0),
        (1, 0.25, 2.0),
    ]
    assert [row["megatron_microbatch_ms"] for row in rows] == [10, 10]
    assert [row["megatron_iteration_ms"] for row in rows] == [30, 20]
    assert "| 2bw | 0 | +0.50 | +1.00 | 10.00 | 30.00 |" in overhead.table(rows)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--variants 1f1b", "'1f1b' is none of the plugin's, choose from 2bw-blocking, 2bw, 2bw-wide"),
        ("--iterations 9", "--iterations 9 leaves too few after the warm-up: give at least 10"),
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
    assert overhead.main(["--variants", "2bw", "--iterations", "10", "--rounds", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["variant"], row["stage"]) for row in rows] == [("2bw", 0), ("2bw", 1)]
    assert all(row["megatron_microbatch_ms"] > 0 for row in rows)
