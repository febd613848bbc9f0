"""What the doctor says of a checkpoint folder; and that nothing in one is run, neither by it nor by a run."""

from __future__ import annotations

import importlib.util
import pickle
import re
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron_asyncpp import installation
from megatron_asyncpp.builds import found
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
        assert f"{patch.target}: {patch.why} - is there\n" in told
    for refusal in REFUSALS:
        state = "Megatron's default asks for it" if refusal.flag == "--rerun-mode" else "not asked for by default"
        assert f"{refusal.flag}: {refusal.why}; {refusal.instead} - {state}\n" in told
    assert re.search(r"^NCCL \d", told, re.MULTILINE)
    assert told.endswith("nothing that was looked at stands in the way of a run\n")


def test_a_symbol_that_a_new_megatron_lacks_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_asyncpp import doctor
    from megatron_asyncpp.integration import repairs
    from megatron_asyncpp.integration.patching import VERSIONS, Patch

    gone = Patch("megatron.core.timers:Timer.gone", lambda original: original, "a test", VERSIONS)
    monkeypatch.setattr(repairs, "PATCHES", (gone,))
    assert doctor.main(Namespace(folder=None)) == 1
    told = capsys.readouterr().out
    assert "megatron.core.timers:Timer.gone: a test - FAILS: " in told
    assert "a run would be refused or fail: megatron.core.timers:Timer.gone does not exist" in told


def test_another_version_of_megatron_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_asyncpp.integration import patching

    monkeypatch.setattr(patching, "megatron_version", lambda: "0.20.0rc1")
    lines, fine = installation.examined()
    assert not fine
    assert "a run would be refused or fail: Megatron 0.20.0rc1 is none of >=0.19,<0.20" in "\n".join(lines)


def package(folder: Path, module: str, version: str | None, *parts: str) -> None:
    """A package of that name and version, with so many submodules."""
    (folder / module).mkdir(parents=True)
    for part in ("__init__", *parts):
        (folder / module / f"{part}.py").touch()
    if version is not None:
        record = folder / f"{module}-{version}.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(f"Name: {module}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("folder", "version", "own"),
    [
        ("lib/python3.12/site-packages", "2.14.1", False),
        ("lib/python3.12/dist-packages", "2.14.1+cu130", False),
        ("lib/python3.12/dist-packages", "2.14.1+rocm6.4", False),
        ("lib/python3.12/dist-packages", "2.9.0a0+50eac811a6.nv25.09", True),
        ("opt/megatron-lm", None, True),
        ("opt/megatron-lm", "1.0", True),
    ],
)
def test_a_containers_own_builds_are_told_from_packages(
    folder: str, version: str | None, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path / folder, "made_up", version)
    monkeypatch.syspath_prepend(tmp_path / folder)
    build = found("made-up", "made_up")
    assert build.is_own == own
    assert str(build).startswith(f"made-up {version or '(no version)'}")
    assert str(build).endswith(", a build of this machine's own") == own
    assert (str(tmp_path) in str(build)) == folder.startswith("opt")


def test_what_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("made_up", "made_up.part"):
        build = found("made-up", module)
        assert (str(build), build.is_own) == ("made-up is not installed", False)


@pytest.fixture
def imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has imported all that the doctor imports, so that Megatron never meets a package that a test makes up."""
    monkeypatch.setattr(installation, "_records", lambda: iter(()))
    monkeypatch.setattr(installation, "_refusals", lambda: iter(()))
    assert installation.examined()[1]


@pytest.mark.parametrize(("part", "told"), [("optimizers", False), ("forms", True)])
def test_the_other_apex_is_found(
    part: str, told: bool, imports_nothing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path / "site-packages", "apex", "0.1", part)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    (line,) = (line for line in installation.examined()[0] if line.startswith("apex "))
    assert ("PyPI's package of that name" in line) == told


@pytest.mark.parametrize(
    ("module", "version", "problem"),
    [
        ("transformer_engine", "2.9.0", "transformer-engine is installed, and Megatron would take its CUDA kernels"),
        ("apex", "0.1", "apex is installed, and Megatron would take its CUDA kernels"),
        ("emerging_optimizers", "0.4.0", "emerging-optimizers 0.4.0 is none that Megatron 0.19 works with"),
    ],
)
def test_packages_that_end_a_run_are_named(
    module: str, version: str, problem: str, imports_nothing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path / "site-packages", module, version)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    lines, fine = installation.examined()
    assert not fine
    assert lines[-1].startswith(f"a run would be refused or fail: {problem}")


@pytest.mark.parametrize("missing", ["emerging_optimizers", "tqdm"])
def test_a_missing_package_is_named(missing: str, imports_nothing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    lines, fine = installation.examined()
    assert not fine
    assert f"importing megatron.training fails without {missing.replace('_', '-')}: pip install" in lines[-1]


def test_gpus_are_listed_and_need_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    device = Namespace(name="A GPU", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    lines, problems = installation._devices({})
    assert [line.partition(", CUDA")[0] for line in lines[1:]] == ["GPU 0: A GPU, 80 GiB", "GPU 1: A GPU, 80 GiB"]
    assert problems == []
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    lines, (problem,) = installation._devices({})
    assert lines[0] == "NCCL: torch was built without it"
    assert "needs a torch with NCCL" in problem
