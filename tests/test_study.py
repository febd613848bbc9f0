"""The study's report and process handling, on logs made up here. Nothing is trained."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_asyncpp import study
from megatron_asyncpp.errors import AsyncPPError
from megatron_asyncpp.study_report import (
    SCHEDULES,
    Run,
    format_table,
    latest_iteration,
    make_rows,
    read_curve,
    read_curves,
    write_report,
)

REAL_PYTHON = sys.executable
ITERATIONS = 60
FIRST_LOSS = "5.978465E+00"
BANNERS = {
    "sync": "",
    "2bw": "megatron_asyncpp: schedule 2bw: P = 2 stages, M = 2 microbatches, delay 1 step(s), 2 weight version(s), "
    "Error Feedback off\n",
    "2bw-ef": "megatron_asyncpp: schedule 2bw: P = 2 stages, M = 2 microbatches, delay 1 step(s), 2 weight version(s), "
    "Error Feedback lambda 1\n",
}
# AdamW: Error Feedback recovers 0.3 of 0.4. Muon: 0.05 of 0.1.
FINALS = {
    "AdamW": {"sync": 1.7, "2bw": 2.1, "2bw-ef": 1.8},
    "Muon": {"sync": 1.5, "2bw": 1.6, "2bw-ef": 1.55},
}


def iteration_line(iteration: int, loss: str) -> str:
    return (
        f" [2026-11-29 19:40:48.712125] iteration {iteration:8d}/{ITERATIONS:8d} | consumed samples:"
        f" {16 * iteration:12d} | elapsed time per iteration (ms): 299.6 | learning rate: 1.000000E-03"
        f" | global batch size:    16 | lm loss: {loss} | loss scale: 1.0 | number of nan iterations:   0 |\n"
    )


def validation_line(iteration: int, loss: float, at_end: bool = False) -> str:
    where = f"{iteration} on validation set" if at_end else str(iteration)
    return f" validation loss at iteration {where} | lm loss value: {loss:.6E} | lm loss PPL: 1.0E+01 | \n"


def log_lines(schedule: str, final: float, first_loss: str = FIRST_LOSS) -> list[str]:
    """A log in Megatron's format. The mean of its two last validation losses is `final`."""
    return [
        "some warning\n",
        BANNERS[schedule],
        iteration_line(1, first_loss),
        iteration_line(30, "3.0E+00"),
        validation_line(30, final + 1),
        iteration_line(ITERATIONS, "2.0E+00"),
        validation_line(ITERATIONS, final - 0.01),
        validation_line(ITERATIONS, final + 0.01, at_end=True),
    ]


def make_runs(folder: Path, finals: dict[str, dict[str, float]] = FINALS) -> list[Run]:
    (folder / "runs").mkdir()
    runs = []
    for optimizer, by_schedule in finals.items():
        for schedule, final in by_schedule.items():
            log = folder / "runs" / f"{optimizer}-{schedule}.log"
            log.write_text("".join(log_lines(schedule, final)))
            runs.append(Run(optimizer, schedule, ["python", "-m", "x", f"--{schedule} y"], log, 12.3))
    return runs


def test_a_log_is_read(tmp_path: Path) -> None:
    curve = read_curve(make_runs(tmp_path)[0], ITERATIONS)
    assert curve.first_loss == FIRST_LOSS
    assert curve.validation == pytest.approx({30: 2.7, ITERATIONS: 1.7})
    assert curve.final == pytest.approx(1.7)


def test_a_line_that_another_rank_began_is_read(tmp_path: Path) -> None:
    run = make_runs(tmp_path)[0]
    run.log.write_text(run.log.read_text().replace(" [2026", "half a line of rank 0 [2026"))
    assert read_curve(run, ITERATIONS).final == pytest.approx(1.7)


def test_a_missing_log_is_refused_and_named(tmp_path: Path) -> None:
    runs = make_runs(tmp_path)
    runs[4].log.unlink()
    with pytest.raises(AsyncPPError, match=f"{runs[4].log.name} can't be read"):
        write_report(runs, ITERATIONS, [], tmp_path)
    assert not (tmp_path / "report.md").exists() and not (tmp_path / "curves.png").exists()


# Without the first iteration; without the final validation loss; cut off within its line; and an earlier stop.
@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.replace(iteration_line(1, FIRST_LOSS), ""),
        lambda text: text.replace(validation_line(ITERATIONS, 1.71, at_end=True), ""),
        lambda text: text[:-40],
        lambda text: text.replace(f"at iteration {ITERATIONS} on", "at iteration 50 on"),
    ],
)
def test_an_incomplete_log_is_refused(tmp_path: Path, spoil: Callable[[str], str]) -> None:
    run = make_runs(tmp_path)[0]
    whole = run.log.read_text()
    run.log.write_text(spoil(whole))
    assert run.log.read_text() != whole
    with pytest.raises(AsyncPPError, match=f"{run.log.name} is incomplete"):
        read_curve(run, ITERATIONS)


def test_the_last_iteration_need_not_fall_on_the_log_interval(tmp_path: Path) -> None:
    run = make_runs(tmp_path)[0]
    run.log.write_text(run.log.read_text().replace(iteration_line(ITERATIONS, "2.0E+00"), ""))
    assert read_curve(run, ITERATIONS).final == pytest.approx(1.7)


@pytest.mark.parametrize("claimed", SCHEDULES)
@pytest.mark.parametrize("real", SCHEDULES)
def test_a_log_of_another_schedule_is_refused(tmp_path: Path, claimed: str, real: str) -> None:
    log = tmp_path / "a.log"
    log.write_text("".join(log_lines(real, 2.0)))
    run = Run("AdamW", claimed, [], log, 1.0)
    if claimed == real:
        read_curve(run, ITERATIONS)
    else:
        with pytest.raises(AsyncPPError, match="not of a run with the schedule"):
            read_curve(run, ITERATIONS)


def test_differing_first_losses_are_refused(tmp_path: Path) -> None:
    runs = make_runs(tmp_path)
    runs[5].log.write_text("".join(log_lines("2bw-ef", 1.55, first_loss="5.978466E+00")))
    with pytest.raises(AsyncPPError, match="Muon runs can't be compared"):
        read_curves(runs, ITERATIONS)


def test_first_losses_of_different_optimizers_may_differ(tmp_path: Path) -> None:
    runs = make_runs(tmp_path)
    for run in runs[3:]:
        run.log.write_text("".join(log_lines(run.schedule, FINALS["Muon"][run.schedule], first_loss="6.0E+00")))
    assert read_curves(runs, ITERATIONS)["Muon"]["sync"].first_loss == "6.0E+00"


def test_two_runs_that_ended_alike_are_refused(tmp_path: Path) -> None:
    runs = make_runs(tmp_path, {"AdamW": {"sync": 1.7, "2bw": 1.7, "2bw-ef": 1.8}})
    with pytest.raises(AsyncPPError, match="ignored its schedule"):
        read_curves(runs, ITERATIONS)


def test_a_missing_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AsyncPPError, match="no Muon run 2BW"):
        read_curves([run for run in make_runs(tmp_path) if run.log.stem != "Muon-2bw"], ITERATIONS)


def test_table(tmp_path: Path) -> None:
    rows = make_rows(read_curves(make_runs(tmp_path), ITERATIONS))
    assert [(row.optimizer, row.schedule) for row in rows] == [(o, s) for o in FINALS for s in SCHEDULES]
    assert [row.gap for row in rows] == [None, *map(pytest.approx, (0.4, 0.1)), None, *map(pytest.approx, (0.1, 0.05))]
    assert [row.recovered for row in rows] == [None, None, pytest.approx(75), None, None, pytest.approx(50)]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in format_table(rows).splitlines()]
    assert table[2:5] == [
        ["AdamW", "synchronous", "1.700", "", ""],
        ["AdamW", "2BW", "2.100", "+0.400", ""],
        ["AdamW", "2BW + Error Feedback", "1.800", "+0.100", "75 %"],
    ]
    assert len({len(line) for line in format_table(rows).splitlines()}) == 1


# Nothing to recover; made worse by Error Feedback; better than synchronous with it.
@pytest.mark.parametrize(("delayed", "feedback", "recovered"), [(1.6, 1.5, None), (2.0, 2.3, -100), (2.0, 1.4, 200)])
def test_unusual_shares(tmp_path: Path, delayed: float, feedback: float, recovered: float | None) -> None:
    finals = {"AdamW": {"sync": 1.7, "2bw": delayed, "2bw-ef": feedback}}
    row = make_rows(read_curves(make_runs(tmp_path, finals), ITERATIONS))[2]
    assert row.recovered == (None if recovered is None else pytest.approx(recovered))


def test_report(tmp_path: Path) -> None:
    table = write_report(make_runs(tmp_path), ITERATIONS, [("model", "a small one")], tmp_path)
    report = (tmp_path / "report.md").read_text()
    for expected in (table, "- model: a small one", "- AdamW, 2BW: 12 s", "python -m x '--2bw-ef y'", "- torch: "):
        assert expected in report
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_latest_iteration() -> None:
    assert latest_iteration(b"nothing yet\n") is None
    assert latest_iteration((iteration_line(10, "3.1E+00") + iteration_line(20, "2.5E+00")).encode()) == (20, "2.5E+00")


def test_runs_differ_in_optimizer_and_schedule_only(tmp_path: Path) -> None:
    prefixes = {"train": tmp_path / "t", "valid": tmp_path / "v"}
    plans = study._plans(prefixes, 600, seed=7)
    assert len({plan.name for plan in plans}) == 6
    assert all(plan.flags[plan.flags.index("--seed") + 1] == "7" for plan in plans)
    synchronous = {plan.optimizer: plan.flags for plan in plans if plan.schedule == "sync"}
    for plan in plans:
        common = synchronous[plan.optimizer]
        assert plan.flags[: len(common)] == common
        own = plan.flags[len(common) :]
        assert own == study._SCHEDULE_FLAGS[plan.schedule].split()
        assert bool(own) == (plan.schedule != "sync")


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """The command's arguments, with a corpus that is there and a launcher that only prints a log."""
    out = tmp_path / "out"
    (out / "corpus").mkdir(parents=True)
    for split in ("train", "valid"):
        for ending in (".bin", ".idx"):
            (out / "corpus" / f"{split}_document{ending}").write_bytes(bytes(8))
    for optimizer, by_schedule in FINALS.items():
        for schedule, final in by_schedule.items():
            (tmp_path / f"{'adam' if optimizer == 'AdamW' else 'muon'}-{schedule}").write_text(
                # As with a last iteration off the log interval: the bar must be filled up all the same.
                "".join(log_lines(schedule, final)).replace(iteration_line(ITERATIONS, "2.0E+00"), "")
            )
    launcher = tmp_path / "python"
    launcher.write_text(
        f"""#!/bin/sh
case "$*" in *muon*) name=muon ;; *) name=adam ;; esac
case "$*" in *error-feedback*) name=$name-2bw-ef ;; *2bw*) name=$name-2bw ;; *) name=$name-sync ;; esac
cat "{tmp_path}/$name" || exit 3
"""
    )
    launcher.chmod(0o755)
    monkeypatch.setattr(study.sys, "executable", str(launcher))
    parser = argparse.ArgumentParser()
    study.add_arguments(parser)
    return parser.parse_args(["--out", str(out), "--iters", str(ITERATIONS)])


def test_the_whole_command(arguments: argparse.Namespace, capfd: pytest.CaptureFixture[str]) -> None:
    assert study.main(arguments) == 0
    printed = capfd.readouterr()
    assert "75 %" in printed.out and "report.md" in printed.out
    assert f"{6 * ITERATIONS}/{6 * ITERATIONS}" in printed.err
    assert len(list((arguments.out / "runs").glob("*.log"))) == 6
    assert (arguments.out / "report.md").read_text().count("--pipeline-model-parallel-size 2") == 6


def test_a_failed_run_is_named_and_leaves_no_old_report(
    arguments: argparse.Namespace, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert study.main(arguments) == 0
    (tmp_path / "muon-2bw").unlink()
    with pytest.raises(AsyncPPError, match=r"run muon-2bw failed with exit code 3.*muon-2bw\.log"):
        study.main(arguments)
    assert "No such file" in capfd.readouterr().err
    assert not (arguments.out / "report.md").exists() and not (arguments.out / "curves.png").exists()


def test_too_few_iterations_are_refused(arguments: argparse.Namespace) -> None:
    arguments.iters = 3
    with pytest.raises(AsyncPPError, match="--iters 3"):
        study.main(arguments)


def test_what_the_launcher_adds_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("".join(f"line {i}\n\n" for i in range(30)) + "E torch/distributed/elastic/x.py failed\nmore\n")
    assert study._last_words(log).splitlines() == [f"line {i}" for i in range(10, 30)]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_run(arguments: argparse.Namespace, tmp_path: Path, number: int, code: int) -> None:
    launcher = Path(study.sys.executable)
    launcher.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/new && mv {tmp_path}/new {tmp_path}/pid\nexec sleep 60\n")
    script = (
        f"from argparse import Namespace; from pathlib import Path; from megatron_asyncpp import study; "
        f"study.sys.executable = {str(launcher)!r}; "
        f"raise SystemExit(study.main(Namespace(out=Path({str(arguments.out)!r}), iters={ITERATIONS}, seed=1)))"
    )
    with subprocess.Popen(
        [REAL_PYTHON, "-c", script],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # a background job may ignore it
    ) as process:
        while not (tmp_path / "pid").exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == code and "Traceback" not in errors
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
