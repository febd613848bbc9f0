"""scripts/bench: arguments, logs, figures, failures, and real runs. No assertion is on a tight time."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from scripts.bench import bubble, latency, measure, ranks, run
from scripts.bench.measure import LAST, Length, Row, Setting
from scripts.bench.picture import draw
from scripts.bench.ranks import Job
from scripts.bench.timed import TimedStep
from scripts.bench.variants import VARIANTS
from tests.harness.forkserver import ROOT
from tests.harness.run import server

SCRIPT = ROOT / "scripts" / "bench" / "bubble.py"
SETTING = Setting(stages=4, microbatches=4, forward_ms=100.0)
LENGTH = Length(warm_up=3, iterations=6, rounds=1)
TIMES = [2500.0, 2200.0, 2190.0, 2100.0, 2140.5, 2110.0, 2160.0, 2130.0, 1900.0, 1800.0]
STEADY = [2100.0, 2140.5, 2110.0, 2160.0, 2130.0, 1900.0]
OUTPUT = """\
[before the start of training step] datetime: 2026-11-29 22:39:17.396571
 [2026-11-29 22:39:19.579561] iteration        1/       3 | consumed samples:            4 | elapsed time per \
iteration (ms): 2182.1 | learning rate: 1.000000E-03 | global batch size:     4 | lm loss: 4.169571E+00 | loss scale: \
1.0 | grad norm: 1.052 | number of skipped iterations:   0 | number of nan iterations:   0 |
Number of parameters in transformer layers in billions:  0.00
 [2026-11-29 22:39:21.735260] iteration        2/       3 | consumed samples:            8 | elapsed time per \
iteration (ms): 2167.7 | learning rate: 1.000000E-03 | global batch size:     4 | lm loss: 4.166E+00 |
half a line of something else [2026-11-29 22:39:23.884219] iteration        3/       3 | consumed samples:           \
12 | elapsed time per iteration (ms): 2146.0 | learning rate: 1.000000E-03 | global batch size:     4 |
[after training is done] datetime: 2026-11-29 22:39:34.816026
"""


def iteration_lines(times: list[float]) -> str:
    return "".join(
        f" [2026-11-29 22:39:19.579561] iteration {i:8d}/{len(times):8d} | consumed samples: {4 * i:12d} | "
        f"elapsed time per iteration (ms): {elapsed:.1f} | learning rate: 1.000000E-03 |\n"
        for i, elapsed in enumerate(times, start=1)
    )


def report_line(late: int, calls: int) -> str:
    part = {"calls": calls, "late": late, "own_ms": 3.0}
    return f"bench report: {json.dumps({'rank': 0, 'forward': part, 'backward': {**part, 'late': 0}})}\n"


@pytest.fixture
def folders(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs leave what they leave; torch's compiler has a folder elsewhere."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiler")))
    # The harness's, which has imported nearly all that the bench's own would import; it has a folder of its own.
    server()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def fake_ranks(
    monkeypatch: pytest.MonkeyPatch,
    stdout: dict[int, str] | None = None,
    stderr: dict[int, str] | None = None,
    fails: int | None = None,
    seconds: float = 0,
) -> None:
    """In place of a run: ranks that only print."""
    arguments = {"stdout": stdout or {}, "stderr": stderr or {}, "fails": fails, "seconds": seconds}
    monkeypatch.setattr(run, "job_of", lambda *args: Job("tests.bench_jobs:prints", arguments, SETTING.stages))


def of_a_run(times: list[float] = TIMES, late: int = 0) -> dict[int, str]:
    """What the four ranks of a run print."""
    reports = {rank: report_line(late if rank == 1 else 0, 20) for rank in range(SETTING.stages)}
    return {**reports, 3: iteration_lines(times) + reports[3]}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--pp 0", "--pp 0"),
        ("--pp 4,", "''"),
        ("--pp two", "'two'"),
        ("--microbatches 0", "--microbatches 0: '0' is no number"),
        ("--microbatches x", "--microbatches"),
        ("--microbatches 3 --variants 2bw,2bw-wide", "2bw at P=4, M=3: it needs M >= 4; without 2bw-wide"),
        ("--variants 1f1b,3bw", "'3bw', choose from 1f1b, interleaved, 2bw-blocking, 2bw"),
        ("--variants=", "no variant ''"),
        ("--variants 2bw,2bw", "twice"),
        ("--forward-ms 0", "--forward-ms 0"),
        ("--forward-ms -100", "--forward-ms -100"),
        ("--forward-ms 3", "own computation"),
        ("--forward-ms nan", "--forward-ms nan"),
        ("--forward-ms inf", "--forward-ms inf"),
        ("--latency -0.1", "--latency -0.1"),
        ("--latency 0,x", "'x' is no share of F"),
        ("--latency inf", "'inf'"),
        ("--iterations 0", "--iterations 0"),
        ("--warm-up 0", "--warm-up 0"),
        ("--rounds 0", "--rounds 0"),
        ("--picture bars.gif", ".png"),
        ("--picture /nowhere/bars.png", "no folder /nowhere"),
        ("--steps 3", "--steps"),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(
    words: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "server", None)
    with pytest.raises(SystemExit) as leaving:
        bubble.main(["--pp", "4", "--microbatches", "4", *words.split()])
    assert leaving.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and told in err and err.startswith("bubble.py: ") and err.count("\n") == 1


def test_lists_are_multiplied_and_what_cannot_run_is_left_out_with_a_reason() -> None:
    words = "--pp 2,4 --microbatches 1x,2x,6 --latency 0,0.2 --variants 1f1b,interleaved,2bw-wide"
    plan = bubble.arguments(words.split())
    pipelines = {(setting.stages, setting.microbatches) for setting, _ in plan.runs}
    assert pipelines == {(2, 2), (2, 4), (2, 6), (4, 4), (4, 8), (4, 6)}
    assert {setting.latency for setting, _ in plan.runs} == {0, 0.2}
    assert len(plan.runs) == 2 * (3 * 6 - len(plan.skipped)) == len(set(plan.runs))
    assert plan.skipped == [
        "without 2bw-wide at P=2, M=2: it needs M >= 3",
        "without 2bw-wide at P=4, M=4: it needs M >= 7",
        "without interleaved at P=4, M=6: M has to be a multiple of P = 4",
        "without 2bw-wide at P=4, M=6: it needs M >= 7",
    ]


def test_fewer_microbatches_than_stages_are_fine_without_a_delay() -> None:
    words = "--pp 4 --microbatches 1 --variants 1f1b,2bw"
    plan = bubble.arguments(words.split())
    assert plan.runs == [(Setting(4, 1, 100.0), "1f1b")] and len(plan.skipped) == 1


def test_the_shortest_forward_grows_with_the_stages_on_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--pp 8 --microbatches 8 --forward-ms {} --variants 1f1b"
    for cores, shortest in ((8, 4), (2, 16)):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        bubble.arguments(words.format(shortest).split())
        with pytest.raises(SystemExit):
            bubble.arguments(words.format(shortest - 1).split())


def test_the_estimate_is_of_all_rounds() -> None:
    words = "--pp 4 --microbatches 4 --variants 1f1b,2bw --warm-up 1 --iterations 3 --rounds"
    once, twice = (bubble.arguments([*words.split(), rounds]).seconds for rounds in "12")
    assert twice - once > 5 * 1.2 * (1.75 + 1.0)


def test_megatrons_lines_are_read() -> None:
    assert measure.logged_iterations(OUTPUT) == [2182.1, 2167.7, 2146.0]
    assert measure.logged_iterations(OUTPUT[: OUTPUT.index("2167.7") + 3]) == [2182.1]  # a line still being written


@pytest.mark.parametrize("spoil", [lambda log: log.replace(" 2/ ", " 3/ "), lambda log: log + log])
def test_missing_and_repeated_iterations_are_noticed(spoil) -> None:
    with pytest.raises(ValueError, match="consecutive"):
        measure.logged_iterations(spoil(OUTPUT))


def test_only_steady_iterations_of_whole_runs_count() -> None:
    assert LENGTH.of_a_run == len(TIMES)
    assert measure.steady_iterations(iteration_lines(TIMES), LENGTH) == TIMES[3:-LAST] == STEADY
    with pytest.raises(ValueError, match="10 of 11"):
        measure.steady_iterations(iteration_lines(TIMES), Length(4, 6, 1))


def test_slowdown_is_the_median_over_the_ideal_of_all_rounds() -> None:
    row = Row("1f1b", SETTING, [STEADY[:2], STEADY[2:5]], late=3, steps=40)
    assert SETTING.ideal_ms == 1200.0
    assert row.slowdown == pytest.approx(2130 / 1200)
    assert row.as_json() == {
        "variant": "1f1b",
        "slowdown": row.slowdown,
        "theory": 1.75,
        "pp": 4,
        "microbatches": 4,
        "forward_ms": 100.0,
        "latency": 0.0,
        "rounds_ms": [STEADY[:2], STEADY[2:5]],
        "late": 3,
        "steps": 40,
    }
    assert measure.table([row]).splitlines()[-1] == "| 1f1b | 4 | 4 | 100 | 0 F | 1.775 | 1.750 | 5, 1.750 to 1.800 |"


def test_a_timed_step_lasts_its_time() -> None:
    step = TimedStep(lambda x: x + 1, 0.05)
    began = time.perf_counter()
    assert [step(1), step(2)] == [2, 3]
    assert time.perf_counter() - began >= 0.1
    report = step.report(warm_up=1)
    assert report["calls"] == 1 and 0 < report["own_ms"] < 1000 * (time.perf_counter() - began)


def test_late_steps_are_counted_after_the_warm_up() -> None:
    step = TimedStep(time.sleep, 0.001)
    for seconds in (0.002, 0.0, 0.002):
        step(seconds)
    report = step.report(warm_up=1)
    assert report["calls"] == 2 and 1 <= report["late"] <= 2
    assert measure.late_steps(f"x\n{report_line(3, 20)}y\n") == (3, 40)
    with pytest.raises(ValueError, match="0 reports"):
        measure.late_steps("x\n")


def test_each_variant_has_its_flags(tmp_path: Path) -> None:
    jobs = {variant: run.job_of(variant, SETTING, LENGTH, tmp_path) for variant in VARIANTS}
    flags = {name: list(job.arguments.get("flags", [])) for name, job in jobs.items()}
    own = {name: " ".join(word for word in words if word.startswith("--asyncpp")) for name, words in flags.items()}
    assert own == {
        "1f1b": "",
        "interleaved": "",
        "2bw-blocking": "--asyncpp-schedule --asyncpp-blocking-step",
        "2bw": "--asyncpp-schedule",
        "2bw-wide": "--asyncpp-schedule --asyncpp-lead",
        "torch-1f1b": "",
        "torch-zb": "",
    }
    megatron = {name: " ".join(words) for name, words in flags.items() if words}
    assert set(VARIANTS) - set(megatron) == {"torch-1f1b", "torch-zb"}
    assert all(" --clip-grad 1.0 " in words and " --log-interval 1 " in words for words in megatron.values())
    # A stage takes F for a microbatch, however many chunks it has.
    assert {job.arguments["forward"] * VARIANTS[name].chunks for name, job in jobs.items()} == {0.1}
    assert {job.arguments["backward"] * VARIANTS[name].chunks for name, job in jobs.items()} == {0.2}


class _Clock:
    """A clock that only sleeping moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000
        monkeypatch.setattr("time.monotonic_ns", lambda: self.now)
        monkeypatch.setattr("time.sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


class _Work:
    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@pytest.mark.parametrize(("busy", "waits"), [(0, 500), (200, 300), (500, 0), (900, 0)])
def test_what_the_receiver_does_meanwhile_hides_the_latency(
    busy: int, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _Clock(monkeypatch)
    late = latency._Late(_Work(), lambda: 1_000, 500)
    clock.now += busy
    assert late.is_completed() == (waits == 0)
    assert late.wait() is True
    assert clock.now == 1_000 + busy + waits and late.is_completed()


def test_stamps_are_shared_by_both_ends(tmp_path: Path) -> None:
    sender, receiver = latency.Stamps(tmp_path / "channel"), latency.Stamps(tmp_path / "channel")
    for message in (0, 1, 5_000):
        sender[message] = 7 + message
    assert [receiver[message] for message in (0, 1, 5_000)] == [7, 8, 5_007]


def test_a_message_is_seen_no_earlier_than_its_latency_allows(folders: Path) -> None:
    seconds = 0.1

    def read(outputs: list[str]) -> list[list[int]]:
        return [[int(word) for word in line.split()] for line in outputs[1].splitlines()]

    def job(folder: Path) -> Job:
        return Job("tests.bench_jobs:exchanges", {"message": seconds, "folder": folder}, ranks=2)

    seen = run.followed("exchanges", job, 60, lambda done: None, read)
    assert len(seen) == 3 and all(at - sent >= seconds * 1e9 for sent, at in seen)


def test_json_is_all_there_is_on_stdout(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fake_ranks(monkeypatch, of_a_run(late=20))
    words = f"--pp 4 --microbatches 4 --variants 2bw --warm-up 3 --iterations 6 --json --picture {folders}/bars.png"
    assert bubble.main(words.split()) == 0
    out, err = capfd.readouterr()
    row = Row("2bw", SETTING, [STEADY], late=20, steps=160)
    assert out.count("\n") == 1 and json.loads(out) == {"rows": [row.as_json()]}
    assert "about 1 min" in err and "20 of 160 forwards and backwards took longer" in err
    assert measure.table([row]) in err
    assert [path.name for path in folders.iterdir()] == ["bars.png"]


def test_variants_take_turns_and_what_was_measured_survives_a_failure(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def train(variant: str, setting: Setting, length: Length, progress: Any) -> tuple[list[float], tuple[int, int]]:
        ran.append(variant)
        if len(ran) == 4:
            raise run.RunError("it failed")
        return [1200.0 * len(ran)], (0, 1)

    monkeypatch.setattr(bubble, "train", train)
    words = "--pp 4 --microbatches 4 --variants 1f1b,2bw --iterations 1 --rounds 2 --json"
    assert bubble.main(words.split()) == 1
    assert ran == ["1f1b", "2bw", "1f1b", "2bw"]
    out, err = capsys.readouterr()
    assert [row["rounds_ms"] for row in json.loads(out)["rows"]] == [[[1200.0], [3600.0]], [[2400.0]]]
    assert "it failed" in err


def test_the_picture_is_drawn_of_several_pipelines(tmp_path: Path) -> None:
    rows = [
        Row(variant, setting, [[setting.ideal_ms, 1.1 * setting.ideal_ms]])
        for setting in (SETTING, Setting(2, 4, 100.0, 0.2))
        for variant in ("1f1b", "2bw")
    ]
    draw(rows, tmp_path / "bars.svg")
    text = (tmp_path / "bars.svg").read_text()
    assert text.count("<!-- theory -->") == 1 and text.count("<!-- 2bw -->") == 1
    assert "<!-- P=4, M=4 -->" in text and "<!-- P=2, M=4 -->" in text and "<!-- latency 0.2 F -->" in text


def test_the_end_of_the_failed_ranks_output_is_shown(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stderr = {rank: "".join(f"{rank}: {i}\n" for i in range(99)) for rank in range(4)}
    fake_ranks(monkeypatch, stderr=stderr, fails=2, seconds=60)
    words = "--pp 4 --microbatches 4 --variants 1f1b"
    assert bubble.main(words.split()) == 1
    out, err = capsys.readouterr()
    assert out == "" and "2: 98\nit failed\n" in err and "2: 9\n" not in err and "1: 98" not in err
    (kept,) = folders.iterdir()
    assert f"The run 1f1b failed. All that its ranks printed is in {kept}." in err


@pytest.mark.parametrize(
    ("what", "silence", "told"),
    [
        ({}, 60, "0 reports"),
        ({"stdout": of_a_run(TIMES[:-1])}, 60, "9 of 10 iterations"),
        ({"fails": 0}, 60, "it failed"),
        ({"seconds": 60}, 0.5, "no iteration"),
    ],
)
def test_a_run_that_stops_early_or_hangs_has_failed(
    what: dict[str, Any], silence: float, told: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_SILENCE", silence)
    monkeypatch.setattr(run, "_SILENT_ITERATIONS", 0)
    fake_ranks(monkeypatch, **what)
    before = time.monotonic()
    with pytest.raises(run.RunError, match=told):
        run.train("2bw", SETTING, LENGTH, lambda done: None)
    assert time.monotonic() - before < 60


def test_a_failure_between_two_looks_is_seen(tmp_path: Path) -> None:
    ended: Any = SimpleNamespace(exitcode=1)
    with pytest.raises(run.RunError, match="ranks that ended first: 0 with 1"):
        run._follow([ended], tmp_path, lambda done: None, 60.0)


def test_every_variant_really_runs_and_none_beats_its_theory(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A latency as long as a forward: a schedule that didn't see it would be faster than theory with it.
    words = "--pp 2 --microbatches 4 --forward-ms 20 --latency 1 --iterations 3 --warm-up 1 --json --variants"
    assert bubble.main([*words.split(), ",".join(VARIANTS)]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["variant"] for row in rows] == [*VARIANTS]
    for row in rows:
        assert row["slowdown"] > 0.97 * row["theory"], row  # a busy machine only adds to it
        assert row["steps"] > 0 and [len(times) for times in row["rounds_ms"]] == [3]
    assert list(folders.iterdir()) == []


def test_one_real_run_from_elsewhere(tmp_path: Path) -> None:
    words = "--pp 2 --microbatches 1x --forward-ms 20 --iterations 3 --variants 1f1b --json"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words.split()], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    (row,) = json.loads(done.stdout)["rows"]
    (times,) = row.pop("rounds_ms")
    shown = row.pop("slowdown")
    assert 0 <= row.pop("late") <= row.pop("steps")
    assert row == {
        "variant": "1f1b",
        "theory": 1.5,
        "pp": 2,
        "microbatches": 2,
        "forward_ms": 20.0,
        "latency": 0.0,
    }
    assert len(times) == 3 and shown == statistics.median(times) / 120
    assert shown > 1.25  # a single stage has 1, two have 1.5, and a busy machine only adds to it
    assert list(tmp_path.glob("bench_*")) == []


@pytest.mark.parametrize("sent", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_an_interrupt_and_a_kill_stop_the_real_run(sent: signal.Signals, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    words = "--pp 2 --microbatches 2 --iterations 999 --variants 1f1b"
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), *words.split()],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What runs in the background ignores Ctrl-C, and its children do too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        me, family = psutil.Process(process.pid), []
        while len(list(tmp_path.glob("bench_*/*.stdout"))) < 2 and process.poll() is None:
            time.sleep(0.05)
        family = me.children(recursive=True)
        process.send_signal(sent)
        out, errors = process.communicate(timeout=60)
    gone, alive = psutil.wait_procs(family, timeout=20)
    assert not alive and len(gone) >= 3  # the server and its ranks
    if sent == signal.SIGINT:
        assert process.returncode == 130 and out == "" and "Traceback" not in errors
        assert list(tmp_path.glob("bench_*")) == []
