"""What the doctor says of a checkpoint folder; and that nothing in one is run, neither by it nor by a run."""

from __future__ import annotations

import pickle
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron_asyncpp.doctor import examined, main
from megatron_asyncpp.errors import AsyncPPError
from tests.resumes import Shape, loading, saving

RUN = Shape(options=(("iterations", 4),))


@pytest.fixture(scope="module", params=["torch_dist", "torch"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def saved(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of iterations 2 and 4; the run ends with the latter."""
    folder = tmp_path_factory.mktemp(kind)
    RUN.train(*saving(folder, 2, kind))
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def test_it_says_what_is_there(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (first, second), complete = examined(folder)
    rest = f"optimizer adam; format {kind}; TP 1, PP 2, DP 1"
    of = "schedule 2bw, Error Feedback lambda 1; holds"
    assert first == f"iteration 2: {of} V(2) and the stale weights V(1); {rest}"
    assert second == f"iteration 4 (a run continues from here): {of} V(4); {rest}"
    assert complete
    arguments = type("Arguments", (), {"folder": folder})()
    assert main(arguments) == 0  # type: ignore[arg-type]
    assert capsys.readouterr().out == f"{first}\n{second}\n"


def test_it_says_what_is_missing(kind: str, folder: Path) -> None:
    last = folder / "iter_0000004"
    name = {"torch_dist": ".metadata", "torch": "mp_rank_00_001/model_optim_rng.pt"}[kind]
    (last / name).unlink()
    lines, complete = examined(folder)
    assert lines[1] == f"iteration 4 (a run continues from here): incomplete, {name} is missing"
    assert not complete
    shutil.rmtree(last)
    lines, complete = examined(folder)
    assert lines[-1] == "latest_checkpointed_iteration.txt names iteration 4, which isn't there"
    assert not complete
    (folder / "latest_checkpointed_iteration.txt").unlink()
    lines, complete = examined(folder)
    assert "no save has ended" in lines[-1]
    assert not complete


def test_a_file_that_ends_early_is_incomplete(folder: Path, kind: str) -> None:
    if kind == "torch":
        file = folder / "iter_0000004/mp_rank_00_000/model_optim_rng.pt"
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        lines, complete = examined(folder)
        assert "incomplete, the end of mp_rank_00_000/model_optim_rng.pt is missing" in lines[1]
        assert not complete


def test_an_empty_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(AsyncPPError, match="holds no checkpoint: name the folder"):
        examined(tmp_path)


class Hostile:
    """A pickle of it makes a file when it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.trace,))


def test_nothing_in_it_is_run(kind: str, folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    last = folder / "iter_0000004"
    if kind == "torch":
        for part in last.glob("mp_rank_*/model_optim_rng.pt"):
            state = torch.load(part, weights_only=False)
            state["asyncpp"]["weights"] = Hostile(trace)
            torch.save(state, part)
        torch.load(part, weights_only=False)
    else:
        index = pickle.loads((last / ".metadata").read_bytes())
        index.planner_data = Hostile(trace)
        (last / ".metadata").write_bytes(pickle.dumps(index))
        pickle.loads((last / ".metadata").read_bytes())
    assert trace.exists(), "the pickle isn't hostile"
    trace.unlink()
    with pytest.raises(AsyncPPError, match="holds more than tensors and settings, and was not opened"):
        examined(folder)
    assert not trace.exists()
    if kind == "torch":
        done = Shape(options=(("iterations", 6),)).train(*loading(folder, kind), check=False)
        assert all(rank.exit_code for rank in done.ranks), "went on without the checkpoint"
        assert "the checkpoint can't be loaded, for the reason printed above" in done.ranks[0].stderr
        assert not trace.exists()


def test_without_a_folder_it_lists_what_is_replaced_and_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron_asyncpp import doctor
    from megatron_asyncpp.integration import megatron, repairs
    from megatron_asyncpp.refusals import REFUSALS

    assert doctor.main(Namespace(folder=None)) == 0
    told = capsys.readouterr().out
    assert "megatron-core 0.19" in told
    assert "FAILS" not in told
    for patch in (*megatron.PATCHES, *repairs.PATCHES):
        assert f"{patch.target}: {patch.why}" in told
    for refusal in REFUSALS:
        assert f"{refusal.flag}: {refusal.why}" in told


def test_a_symbol_that_a_new_megatron_lacks_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_asyncpp import doctor
    from megatron_asyncpp.integration import repairs
    from megatron_asyncpp.integration.patching import VERSIONS, Patch

    gone = Patch("megatron.core.timers:Timer.gone", lambda original: original, "a test", VERSIONS)
    monkeypatch.setattr(repairs, "PATCHES", (gone,))
    assert doctor.main(Namespace(folder=None)) == 1
    assert "megatron.core.timers:Timer.gone: a test - FAILS: " in capsys.readouterr().out
