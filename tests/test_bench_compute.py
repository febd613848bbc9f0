"""scripts/bench/compute.py: arguments, figures, and one short real run. No assertion is on how fast anything is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.bench import compute, ranks
from scripts.bench.compute import Result
from scripts.bench.measure import Length
from scripts.bench.run import RunError
from tests.harness.run import server

LENGTH = Length(warm_up=1, iterations=3, rounds=2)
# By variant, the iterations' times in two rounds.
TIMES = {"1f1b": (150.0, 160.0), "interleaved": (130.0, 125.0), "2bw": (104.0, 100.0), "bound": (100.0, 99.0)}
RESULTS = {(2, variant): [Result(time, 10.0, 20.0) for time in times] for variant, times in TIMES.items()}


def log(times: list[float], forward: float | None = None) -> str:
    lines = [
        f" iteration {i:8d}/{len(times):8d} | elapsed time per iteration (ms): {elapsed:.1f} |\n"
        for i, elapsed in enumerate(times, start=1)
    ]
    parts = {} if forward is None else {"forward": {"own_ms": forward}, "backward": {"own_ms": 2 * forward}}
    return "".join([*lines, f"bench report: {json.dumps({'rank': 0, **parts})}\n"])


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


def test_a_result_is_of_the_rank_that_logs_or_of_both_processes_of_the_bound() -> None:
    times = [[900.0, 10.0, 12.0, 50.0, 1.0], [900.0, 20.0, 24.0, 50.0, 1.0]]
    assert compute.read("2bw", [log([], 4.0), log(times[1], 6.0)], LENGTH) == Result(24.0, 5.0, 10.0)
    # A chunk of interleaved 1F1B is half a stage.
    assert compute.read("interleaved", [log([], 2.0), log(times[1], 3.0)], LENGTH) == Result(24.0, 5.0, 10.0)
    assert compute.read("bound", [log(times[0], 4.0), log(times[1], 6.0)], LENGTH) == Result(18.0, 5.0, 10.0)
    with pytest.raises(ValueError, match="4 of 5"):
        compute.read("bound", [log(times[0], 4.0), log(times[1][1:], 6.0)], LENGTH)


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
