"""scripts/bench/bubble.py: arguments, logs, figures, failures, and one real run. No assertion is on a tight time."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from scripts.bench import bubble, measure, run
from scripts.bench.measure import FIRST, LAST, MINIMUM_ITERATIONS, Row, Setting
from scripts.bench.sleeping_stages import TimedStep
from scripts.bench.variants import VARIANTS
from tests.harness.run import ROOT

SCRIPT = ROOT / "scripts" / "bench" / "bubble.py"
SETTING = Setting(stages=4, microbatches=4, forward_ms=100.0, iterations=10)
TIMES = [2500.0, 2200.0, 2190.0, 2100.0, 2140.5, 2110.0, 2160.0, 2130.0, 1900.0, 1800.0]
STEADY = [2100.0, 2140.5, 2110.0, 2160.0, 2130.0]
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
TORCHRUN = """\
E1129 22:49:58.470000 2741 torch/distributed/elastic/multiprocessing/api.py:988] failed (exitcode: 1) local_rank: 2
============================================================
megatron_asyncpp FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-29_22:49:58
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -15 (pid: 2753)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 2753
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-29_22:49:55
  host      : localhost
  rank      : 2 (local_rank: 2)
  exitcode  : 1 (pid: 2754)
  error_file: <N/A>
============================================================
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
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs leave what they leave."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def fake_torchrun(monkeypatch: pytest.MonkeyPatch, outputs: dict[str, str], program: str = "") -> None:
    """In place of a run: a process that leaves its ranks' output where torchrun does, and then runs `program`."""
    begin = (
        "import os, sys, time\n"
        f"for name, text in {outputs!r}.items():\n"
        "    path = os.path.join(sys.argv[1], 'none_x', 'attempt_0', name)\n"
        "    os.makedirs(os.path.dirname(path), exist_ok=True)\n"
        "    open(path, 'w').write(text)\n"
    )
    monkeypatch.setattr(
        run, "command", lambda variant, setting, logs: [sys.executable, "-c", begin + program, str(logs)]
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--pp 0", "--pp 0"),
        ("--pp two", "'two'"),
        ("--microbatches 0 --variants 1f1b", "--microbatches 0 is no number"),
        ("--microbatches 3", "2bw-blocking needs at least as many microbatches as stages"),
        ("--microbatches 3 --variants 1f1b,2bw", "leave 2bw out of --variants"),
        ("--variants 1f1b,3bw", "'3bw', choose from 1f1b, 2bw-blocking, 2bw"),
        ("--variants=", "no variant ''"),
        ("--variants 2bw,2bw", "twice"),
        ("--forward-ms 0", "--forward-ms 0"),
        ("--forward-ms -100", "--forward-ms -100"),
        ("--forward-ms 3", "own computation"),
        ("--forward-ms nan", "--forward-ms nan"),
        ("--forward-ms inf", "--forward-ms inf"),
        (f"--iterations {MINIMUM_ITERATIONS - 1}", f"give at least {MINIMUM_ITERATIONS}"),
        ("--steps 3", "--steps"),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(
    words: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(SystemExit) as leaving:
        bubble.main(["--pp", "4", "--microbatches", "4", *words.split()])
    assert leaving.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and told in err and err.startswith("bubble.py: ") and err.count("\n") == 1


def test_fewer_microbatches_than_stages_are_fine_without_a_delay() -> None:
    setting, variants, _ = bubble.arguments(["--pp", "4", "--microbatches", "1", "--variants", "1f1b"])
    assert (setting.stages, setting.microbatches, setting.forward_ms) == (4, 1, 100.0) and variants == ["1f1b"]


def test_the_shortest_forward_grows_with_the_stages_on_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--pp 8 --microbatches 8 --forward-ms {} --variants 1f1b"
    for cores, shortest in ((8, 4), (2, 16)):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        bubble.arguments(words.format(shortest).split())
        with pytest.raises(SystemExit):
            bubble.arguments(words.format(shortest - 1).split())


def test_megatrons_lines_are_read() -> None:
    assert measure.logged_iterations(OUTPUT) == [2182.1, 2167.7, 2146.0]
    assert measure.logged_iterations(OUTPUT[: OUTPUT.index("2167.7") + 3]) == [2182.1]  # a line still being written


@pytest.mark.parametrize("spoil", [lambda log: log.replace(" 2/ ", " 3/ "), lambda log: log + log])
def test_missing_and_repeated_iterations_are_noticed(spoil) -> None:
    with pytest.raises(ValueError, match="consecutive"):
        measure.logged_iterations(spoil(OUTPUT))


def test_only_steady_iterations_of_whole_runs_count() -> None:
    assert measure.steady_iterations(iteration_lines(TIMES), 10) == TIMES[FIRST:-LAST] == STEADY
    with pytest.raises(ValueError, match="10 of 11"):
        measure.steady_iterations(iteration_lines(TIMES), 11)


def test_slowdown_is_the_median_over_the_ideal() -> None:
    row = Row("1f1b", SETTING, STEADY)
    assert SETTING.ideal_ms == 1200.0
    assert row.slowdown == pytest.approx(2130 / 1200)
    assert row.as_json() == {
        "variant": "1f1b",
        "slowdown": row.slowdown,
        "theory": 1.75,
        "pp": 4,
        "microbatches": 4,
        "forward_ms": 100.0,
        "iterations_ms": STEADY,
    }
    assert measure.table([row]).splitlines()[-1] == "| 1f1b | 4 | 4 | 100 | 1.775 | 1.750 | 5, 1.750 to 1.800 |"


@pytest.mark.parametrize(
    ("stages", "theory"),
    [(4, {"1f1b": 1.75, "2bw-blocking": 1.5, "2bw": 1.0}), (8, {"1f1b": 1.875, "2bw-blocking": 19 / 12, "2bw": 1.0})],
)
def test_theory(stages: int, theory: dict[str, float]) -> None:
    found = {name: variant.theory(stages, stages) for name, variant in VARIANTS.items()}
    assert found == pytest.approx(theory)


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
    commands = {variant: run.command(variant, SETTING, tmp_path) for variant in VARIANTS}
    own = {name: [word for word in words if word.startswith("--asyncpp")] for name, words in commands.items()}
    assert own == {
        "1f1b": [],
        "2bw-blocking": ["--asyncpp-schedule", "--asyncpp-blocking-step"],
        "2bw": ["--asyncpp-schedule"],
    }
    assert all(" --clip-grad 1.0 " in " ".join(words) for words in commands.values())
    assert all(" --log-interval 1 " in " ".join(words) for words in commands.values())


def test_json_is_all_there_is_on_stdout(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fake_torchrun(
        monkeypatch,
        {
            "0/stdout.log": report_line(0, 20),
            "1/stdout.log": report_line(20, 20),
            "2/stdout.log": report_line(0, 20),
            "3/stdout.log": iteration_lines(TIMES) + report_line(0, 20),
        },
        "print('launched')",
    )
    assert bubble.main(["--pp", "4", "--microbatches", "4", "--variants", "2bw", "--json"]) == 0
    out, err = capfd.readouterr()
    assert out.count("\n") == 1 and json.loads(out) == {"rows": [Row("2bw", SETTING, STEADY).as_json()]}
    assert "about 1 min" in err and "20 of 160 forwards and backwards took longer" in err
    assert list(folders.iterdir()) == []


def test_the_end_of_the_failed_ranks_output_is_shown(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.failed_ranks(TORCHRUN) == [2]
    outputs = {f"{rank}/stderr.log": "".join(f"{rank}: {i}\n" for i in range(99)) for rank in range(4)}
    fake_torchrun(monkeypatch, outputs, f"print({TORCHRUN!r}); sys.exit(1)")
    assert bubble.main(["--pp", "4", "--microbatches", "4", "--variants", "1f1b"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "2: 98\n" in err and "2: 9\n" not in err and "1: 98" not in err
    (kept,) = folders.iterdir()
    assert f"The run 1f1b failed. All that its ranks printed is in {kept}." in err


@pytest.mark.parametrize(
    ("program", "silence", "told"),
    [("", 60, "0 reports"), ("sys.exit('no torch')", 60, "no torch"), ("time.sleep(60)", 0.5, "No iteration")],
)
def test_a_run_that_stops_early_or_hangs_has_failed(
    program: str, silence: float, told: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_SILENCE", silence)
    monkeypatch.setattr(run, "_SILENT_ITERATIONS", 0)
    fake_torchrun(monkeypatch, {}, program)
    with pytest.raises(run.RunError, match=told):
        run.train("2bw", SETTING, lambda done: None)


def test_one_real_run_from_elsewhere(tmp_path: Path) -> None:
    words = "--pp 2 --microbatches 2 --forward-ms 20 --iterations 9 --variants 1f1b --json"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words.split()], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    (row,) = json.loads(done.stdout)["rows"]
    times = row.pop("iterations_ms")
    slowdown = row.pop("slowdown")
    assert row == {"variant": "1f1b", "theory": 1.5, "pp": 2, "microbatches": 2, "forward_ms": 20.0}
    assert len(times) == 9 - FIRST - LAST and slowdown == statistics.median(times) / 120
    assert slowdown > 1.25  # a single stage has 1, two have 1.5, and a busy machine only adds to it
    assert list(tmp_path.glob("bubble_*")) == []


def test_an_interrupt_stops_the_real_run(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), "--pp", "2", "--microbatches", "2", "--variants", "1f1b"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What runs in the background ignores Ctrl-C, and its children do too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        me, family = psutil.Process(process.pid), []
        while len(family) < 3 and process.poll() is None:  # torchrun and its ranks
            time.sleep(0.05)
            family = me.children(recursive=True)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and out == "" and "Traceback" not in errors
    assert len(family) == 3 and not any(member.is_running() for member in family)
    assert list(tmp_path.glob("bubble_*")) == []
