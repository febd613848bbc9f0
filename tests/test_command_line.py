"""`python -m megatron_asyncpp`: which module a command reaches, and with what."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import megatron_asyncpp
from megatron_asyncpp import __main__ as command_line
from megatron_asyncpp.errors import AsyncPPError


def test_run_passes_everything_on_unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    launch = types.ModuleType("megatron_asyncpp.launch")
    launch.main = lambda argv: seen.extend(argv) or 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron_asyncpp.launch", launch)
    words = ["--cpu", "pretrain_gpt", "--help", "--lr", "1e-3", "--", "-x"]
    assert command_line.main(["run", *words]) == 3
    assert seen == words


@pytest.mark.parametrize("words", [[], ["--cpu"]], ids=" ".join)
def test_a_script_runs_as_python_would_run_it_but_for_the_plugin(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder comes first on the path before anything of Megatron is imported: a checkout's script needs its own."""
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(__name__, sys.argv[1:], sys.path[0])\n")
    seen: list[object] = []

    def install() -> None:
        seen.extend([sys.path[0], sys.argv, os.environ.get(megatron_asyncpp.CPU_VARIABLE)])

    monkeypatch.setattr(megatron_asyncpp, "install", install)
    monkeypatch.setattr(sys, "path", ["the current folder", *sys.path])
    monkeypatch.setattr(sys, "argv", ["python -m"])
    monkeypatch.setenv(megatron_asyncpp.CPU_VARIABLE, "")
    assert command_line.main(["run", *words, str(script), "--lr", "1"]) == 0
    assert seen == [str(tmp_path), [str(script), "--lr", "1"], "1" if words else ""]
    assert capsys.readouterr().out == f"__main__ ['--lr', '1'] {tmp_path}\n"


@pytest.mark.parametrize(("rank", "printed"), [(None, True), ("0", True), ("1", False)])
def test_refusal_is_one_sentence_of_rank_0_and_exit_code_2(
    rank: str | None, printed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(argv: list[str]) -> int:
        raise AsyncPPError("It can't be done.")

    launch = types.ModuleType("megatron_asyncpp.launch")
    launch.main = refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron_asyncpp.launch", launch)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as leaving:
        command_line.main(["run", "script.py"])
    assert leaving.value.code == 2
    assert capsys.readouterr().err == ("megatron_asyncpp: It can't be done.\n" if printed else "")


def test_help_and_refusals_import_neither_torch_nor_megatron(tmp_path: Path) -> None:
    program = (
        "import sys; from megatron_asyncpp.__main__ import main\n"
        "for argv in (['--help'], ['corpus', '--help'], ['corpus', '--out', sys.argv[1], 'missing'], ['nonsense']):\n"
        "    try:\n        main(argv)\n    except SystemExit as leaving:\n        print('left with', leaving.code)\n"
        "assert not {'torch', 'megatron'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("left")] == [
        "left with 0",
        "left with 0",
        "left with 2",
        "left with 2",
    ]
    assert "megatron_asyncpp: There is no file or folder missing" in done.stderr
    assert "invalid choice: 'nonsense'" in done.stderr
    assert "Traceback" not in done.stderr
