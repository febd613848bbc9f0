"""scripts/bench/compute.py: arguments, figures, and one short real run. No assertion is on how fast anything is."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from scripts.bench import compute, ranks
from scripts.bench.compute import Result
from scripts.bench.measure import Length
from scripts.bench.run import RunError
from scripts.bench.turns import RunningTime
from tests.harness.run import server

LENGTH = Length(warm_up=1, iterations=3, rounds=2)
# By variant, the iterations' times in two rounds.
TIMES = {"1f1b": (150.0, 160.0), "interleaved": (130.0, 125.0), "2bw": (104.0, 100.0), "bound": (100.0, 99.0)}
RESULTS = {(2, variant): [Result(time, 10.0, 20.0) for time in times] for variant, times in TIMES.items()}


def output(ends: list[float], forward: tuple[float, float], backward: tuple[float, float]) -> str:
    """Of a rank whose iterations end at these moments, in seconds, and whose forwards and backwards are all alike."""
    spans = {
        "iteration": [(0.0, end) for end in ends],
        # Those of the warm-up, M = 2, take longer.
        "forward": [(0.0, 9.0)] * 2 + [forward] * len(ends),
        "backward": [(0.0, 9.0)] * 2 + [backward] * len(ends),
    }
    return f"a line\nbench report: {json.dumps({'rank': 0, **spans})}\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--microbatches 3", "multiples of the 2 stages"),
        ("--microbatches 2,x", "--microbatches 2,x"),
        ("--microbatches 0", "--microbatches 0"),
        ("--rounds 0", "--rounds 0"),
        ("--warm-up 0", "--warm-up 0"),
        ("--hidden-size 100", "multiple of 64"),
        ("--seq-length -1", "--seq-length -1"),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(
    words: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "server", None)
    with pytest.raises(SystemExit) as leaving:
        compute.main(words.split())
    assert leaving.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and told in err and err.startswith("compute.py: ") and err.count("\n") == 1


def test_a_machine_of_one_core_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    with pytest.raises(SystemExit):
        compute.arguments([])
    assert "one core only" in capsys.readouterr().err


def test_the_bound_is_two_processes_that_know_nothing_of_each_other() -> None:
    jobs = {name: compute.job_of(name, compute.arguments([]), 4, LENGTH) for name in compute.VARIANT_NAMES}
    sizes = {name: (job.ranks, job.copies, job.pinned) for name, job in jobs.items()}
    assert sizes == {"bound": (1, 2, True)} | dict.fromkeys(("1f1b", "interleaved", "2bw", "2bw-wide"), (2, 1, True))
    flags = {name: " ".join(job.arguments["flags"]) for name, job in jobs.items()}
    # All have as many layers a process, and as many microbatches an iteration.
    assert " --num-layers 2 " in flags["bound"]
    assert all(" --num-layers 4 " in words for name, words in flags.items() if name != "bound")
    assert all(" --global-batch-size 4 " in words and " --clip-grad 1.0 " in words for words in flags.values())
    assert "--asyncpp-schedule 2bw" in flags["2bw"] and "asyncpp" not in "".join(flags[n] for n in ("1f1b", "bound"))


def test_a_wide_lead_runs_where_there_are_enough_microbatches() -> None:
    assert [n for n in compute.VARIANT_NAMES if n not in compute.variants_at(2)] == ["2bw-wide"]
    assert compute.variants_at(4) == [*compute.VARIANT_NAMES]
    results = {(4, variant): [Result(200.0, 10.0, 20.0)] for variant in compute.VARIANT_NAMES}
    assert [(ratio.of, ratio.to) for ratio in compute.ratios(results, 4)][:2] == [
        ("bound", "2bw"),
        ("bound", "2bw-wide"),
    ]


def test_a_result_is_the_mean_of_both_ranks_without_the_time_in_which_they_were_stopped() -> None:
    # Stopped from 3 to 10. One iteration of warm-up, three that count, and the last one doesn't.
    ran = RunningTime([(0.0, 3.0), (10.0, 99.0)])
    first = output([1.0, 2.0, 11.0, 13.0, 50.0], (0.0, 0.25), (1.0, 1.5))
    outputs = [first, output([1.0, 10.0, 12.0, 14.0, 50.0], (2.75, 10.25), (12.0, 13.0))]
    read = partial(compute.read, outputs=outputs, ran=ran, microbatches=2, length=LENGTH)
    found = read("2bw")
    # From 1 to 6 = 13 - 7 takes 5 seconds, and from 1 to 7 = 14 - 7 takes 6.
    assert found.iteration_ms == pytest.approx(1000 * (5 / 3 + 6 / 3) / 2)
    assert (found.forward_ms, found.backward_ms) == pytest.approx((375.0, 750.0))
    # A chunk of interleaved 1F1B is half a stage.
    assert read("interleaved").forward_ms == pytest.approx(750.0)
    outputs[1] = output([1.0, 10.0, 12.0, 14.0], (2.75, 10.25), (12.0, 13.0))
    with pytest.raises(ValueError, match="4 of 5"):
        read("bound")


def test_ratios_are_taken_round_by_round() -> None:
    found = {ratio.of: ratio for ratio in compute.ratios(RESULTS, 2)}
    assert {name: ratio.predicted for name, ratio in found.items()} == {"bound": 1.0, "1f1b": 1.5, "interleaved": 1.25}
    assert found["1f1b"].rounds == pytest.approx([150 / 104, 1.6])
    assert found["bound"].median == pytest.approx((100 / 104 + 0.99) / 2)
    lines = compute.table(RESULTS).splitlines()
    assert "| 2 | 2bw | 102 | 100 to 104 | 10 | 20 |" in lines
    assert "| 2 | 1f1b | 2bw | 1.521 | 1.442 to 1.600 | 1.500 | 1.014 |" in lines


def test_a_failed_run_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(args: object, length: object, results: object) -> None:
        raise RunError("it failed")

    monkeypatch.setattr(compute, "_measure", measure)
    assert compute.main([]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "it failed" in err and "about " in err


@pytest.mark.slow
def test_a_short_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    server()  # before: it has a temporary folder of its own
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    words = "--microbatches 2 --hidden-size 64 --seq-length 16 --rounds 1 --iterations 1 --warm-up 1 --json"
    assert compute.main(words.split()) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert [(run["variant"], run["microbatches"], run["round"]) for run in found["runs"]] == [
        (variant, 2, 0) for variant in compute.variants_at(2)
    ]
    for run in found["runs"]:
        assert run["iteration_ms"] > 2 * run["forward_ms"] > 0 and run["backward_ms"] > 0
    assert [(ratio["of"], len(ratio["rounds"])) for ratio in found["ratios"]] == [
        ("bound", 1),
        ("1f1b", 1),
        ("interleaved", 1),
    ]
    assert "use a larger --seq-length than 16" in err
    assert list(tmp_path.iterdir()) == []
