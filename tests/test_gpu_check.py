"""The check for machines with GPUs: what makes it fail; and, slow, all of it on the CPU."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts import gpu_check
from scripts.gpu.report import Check, Failed, NotHere, report
from scripts.gpu.runs import ITERATIONS, Machine, Runs, Trained, _reason, compare, launch
from tests.harness.forkserver import ROOT


def passes() -> str:
    return "all is\nwell"


def fails() -> str:
    raise Failed("it is wrong")


def breaks() -> str:
    raise ZeroDivisionError("a fault of the check")


def is_elsewhere() -> str:
    raise NotHere("no GPU")


@pytest.mark.parametrize(
    ("checks", "code", "counts"),
    [
        ([passes], 0, "1 passed, 0 failed, 0 can't be made here"),
        ([passes, is_elsewhere], 0, "1 passed, 0 failed, 1 can't be made here"),
        ([passes, fails, passes], 1, "2 passed, 1 failed, 0 can't be made here"),
        ([passes, breaks], 1, "1 passed, 1 failed, 0 can't be made here"),
        ([is_elsewhere], 1, "0 passed, 0 failed, 1 can't be made here"),
    ],
)
def test_any_failure_makes_the_exit_code(checks: list, code: int, counts: str) -> None:
    outputs = io.StringIO(), io.StringIO()
    assert report("a title", [Check(check.__name__, check) for check in checks], outputs) == code
    assert outputs[0].getvalue() == outputs[1].getvalue()
    title, *lines, last = outputs[0].getvalue().splitlines()
    assert (title, last) == ("a title", counts)
    told = {
        passes: "pass  passes: all is well",
        fails: "FAIL  fails: it is wrong",
        breaks: "FAIL  breaks: ZeroDivisionError: a fault of the check",
        is_elsewhere: "none  is_elsewhere: no GPU",
    }
    assert [line.rpartition(" (")[0] for line in lines] == [told[check] for check in checks]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Trained, Trained]:
    """Two equal runs of two stages."""
    runs = []
    for name in ("one", "other"):
        run = Trained(name, tmp_path / name, {number: f"{number}.5E+00" for number in range(1, ITERATIONS + 1)})
        for stage in range(2):
            part = run.folder / f"iter_{ITERATIONS:07d}" / f"mp_rank_00_{stage:03d}"
            part.mkdir(parents=True)
            state = {"model": {"w": torch.ones(3) * stage}, "optimizer": [{"m": torch.zeros(2)}, 1], "args": name}
            torch.save(state, part / "model_optim_rng.pt")
        runs.append(run)
    return runs[0], runs[1]


def test_equal_runs_are_equal(pair: tuple[Trained, Trained]) -> None:
    assert compare(*pair) == "12 losses and 4 tensors of the last checkpoints are equal"
    # A run that began later, of which Megatron logs the mean of the first two losses in the second line.
    pair[1].losses = {number: loss for number, loss in pair[1].losses.items() if number > 6} | {8: "8.0E+00"}
    assert compare(*pair, since=7).startswith("5 losses and 4 tensors")
    pair[1].losses[7] = "7.6E+00"
    with pytest.raises(Failed, match="iteration 7"):
        compare(*pair, since=7)


def test_another_loss_or_bit_is_found(pair: tuple[Trained, Trained]) -> None:
    pair[1].losses[9] = "9.500001E+00"
    with pytest.raises(Failed, match=r"iteration 9 has the loss 9.5E\+00 in one, 9.500001E\+00 in other"):
        compare(*pair)
    pair[1].losses[9] = pair[0].losses[9]
    part = pair[1].folder / f"iter_{ITERATIONS:07d}" / "mp_rank_00_001" / "model_optim_rng.pt"
    state = torch.load(part)
    state["optimizer"][0]["m"][1] = 1e-30
    torch.save(state, part)
    with pytest.raises(Failed, match=r"mp_rank_00_001/model_optim_rng.pt:optimizer:0:m differs by up to 1.0e-30"):
        compare(*pair)
    part.unlink()
    with pytest.raises(Failed, match="isn't there"):
        compare(*pair)


def losses(name: str, *values: str) -> Trained:
    return Trained(name, Path(name), dict(enumerate(values, 1)))


def test_a_schedule_that_did_not_run_is_found() -> None:
    delayed, plain = losses("2bw", "5.0", "5.0", "4.9"), losses("megatron", "5.0", "4.9", "4.8")
    assert gpu_check._trains(delayed, plain) == "loss 5.000 to 4.900; Megatron's own run, flushed: 4.800"
    for other, message in (
        (plain, "the schedule didn't run"),
        (losses("2bw", "4.9", "4.9", "4.8"), "Megatron's own is 5.0"),
        (losses("2bw", "5.0", "5.0", "5.1"), "the loss goes from 5.0 to 5.1"),
        (losses("2bw", "5.0", "nan", "4.9"), "the loss goes from"),
    ):
        with pytest.raises(Failed, match=message):
            gpu_check._trains(other, plain)


def test_a_program_that_fails_is_quoted_and_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text("raise ValueError('of the program')\n")
    with pytest.raises(Failed, match=r"exit code 1: .*ValueError: of the program; all of it is in "):
        launch([str(program)], 1, tmp_path / "log")
    refused = "megatron_asyncpp: CPU mode adds nothing\nmegatron_asyncpp: no.\n torch.ChildFailedError: \n"
    assert _reason(refused) == "no."
    assert _reason("") == "no error was printed"
    started: list[list[str]] = []

    def fail(program: list[str], processes: int, log: Path) -> None:
        started.append(program)
        raise Failed("no")

    monkeypatch.setattr("scripts.gpu.runs.launch", fail)
    runs = Runs(Machine(True, 2, tmp_path))
    for _ in range(2):
        with pytest.raises(Failed, match="no"):
            runs.train("run", ["--flag"])
    assert len(started) == 1
    assert started[0][:5] == ["-m", "megatron_asyncpp", "run", "--cpu", "pretrain_gpt"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "torch finds no GPU here: add --cpu"),
        (["--cpu", "--stages", "0"], "--stages 0 is none of 1 to any number: give another"),
        (["--cpu", "--out", "/nowhere/report"], "--out /nowhere/report can't be written (No such file or directory)"),
    ],
)
def test_a_wrong_call_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        gpu_check.main(words)
    assert left.value.code == 2
    assert f"gpu_check.sh: {message}" in capsys.readouterr().err


@pytest.mark.slow
def test_all_of_it_on_the_cpu(tmp_path: Path) -> None:
    program = [sys.executable, str(ROOT / "scripts/gpu_check.py"), "--cpu", "--out", str(tmp_path / "report")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=580, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    told = (tmp_path / "report").read_text()
    assert told in done.stdout
    assert told.splitlines()[-1] == "8 passed, 0 failed, 1 can't be made here"
