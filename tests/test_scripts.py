"""The shell scripts: which Python they take, and when they make, repair, complete or trust .venv.

Nothing is installed here. A stub stands for Python: it passes code on to the real one, writes down what it was asked
to make or install, and fails at it when told to.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SLURM = ROOT / "scripts" / "slurm"
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), *sorted(SLURM.glob("*")), ROOT / ".ci" / "run"]

STUB = f"""#!/bin/bash
case "$1 $2" in
  "-m venv") echo "venv" >>"$STUB_LOG"; mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-m pip")
    case "$3" in
      --version) ;;
      install)
        echo "pip $*" >>"$STUB_LOG"
        if [[ -n "${{STUB_PIP_FAILS:-}}" ]]; then echo "ERROR: no such package"; exit 1; fi ;;
    esac ;;
  *) export PYTHONPATH="{ROOT}"; exec "{sys.executable}" "$@" ;;
esac
"""
BROKEN = "#!/bin/bash\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


class Project:
    """A project folder with only what the scripts look at."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder / "a project", folder / "log"
        (self.folder / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "common.sh", self.folder / "scripts")
        shutil.copy(ROOT / "setup.py", self.folder)
        self.stub = executable(folder / "stub" / "python", STUB)
        self.venv = self.folder / ".venv"

    def bash(self, commands: str, **environment: str) -> subprocess.CompletedProcess[str]:
        script = f"set -euo pipefail; source {str(self.folder / 'scripts' / 'common.sh')!r}; {commands}"
        return subprocess.run(
            ["bash", "-c", script],
            env={**os.environ, "PYTHON": str(self.stub), "STUB_LOG": str(self.log), **environment},
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def prepare(self, **environment: str) -> list[str]:
        """Calls prepare_venv. Returns what was made and installed: "venv" and "pip"."""
        self.log.write_text("")
        done = self.bash("prepare_venv", **environment)
        assert done.returncode == 0, done.stderr
        return [line.split()[0] for line in self.log.read_text().splitlines()]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_syntax(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK) == (script.name != "common.sh")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck() -> None:
    subprocess.run(["shellcheck", "-x", *map(str, SCRIPTS)], check=True, cwd=ROOT)


def find_python(project: Project, path: Path, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    # The tools that the script needs, without the Pythons that lie beside them.
    tools = path.parent / "tools"
    tools.mkdir()
    for tool in ("bash", "cat", "dirname"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    return project.bash(
        "find_python", **{"PYTHON": "", "PATH": f"{path}:{tools}", "HOME": str(home), "PYENV_ROOT": ""} | environment
    )


def test_broken_shim_first_on_the_path_is_passed_over(project: Project, tmp_path: Path) -> None:
    for name in ("python3.13", "python3.12"):
        executable(tmp_path / "bin" / name, BROKEN)
    working = executable(tmp_path / "bin" / "python3", STUB)
    done = find_python(project, tmp_path / "bin", tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, str(working))


def test_python_of_pyenv_is_found_behind_its_shims(project: Project, tmp_path: Path) -> None:
    for name in ("python3.13", "python3.12", "python3"):
        executable(tmp_path / "bin" / name, BROKEN)
    working = executable(tmp_path / ".pyenv" / "versions" / "3.12.9" / "bin" / "python", STUB)
    done = find_python(project, tmp_path / "bin", tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, str(working))


def test_named_python_comes_first(project: Project, tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "python3.12", STUB)
    done = find_python(project, tmp_path / "bin", tmp_path, PYTHON=str(project.stub))
    assert (done.returncode, done.stdout.strip()) == (0, str(project.stub))


def test_other_version_does_not_answer(project: Project, tmp_path: Path) -> None:
    # Answers, but as 3.11 would.
    old = STUB.replace('"$@"', '-c "import sys; sys.version_info = (3, 11, 7); exec(sys.argv[1])" "$2"')
    executable(tmp_path / "bin" / "python3", old)
    assert find_python(project, tmp_path / "bin", tmp_path).returncode == 1


def test_no_python_says_what_to_install(project: Project, tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "python3.12", BROKEN)
    done = find_python(project, tmp_path / "bin", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "No Python 3.12 or 3.13" in done.stderr
    assert "apt-get install python3.12-venv" in done.stderr


def test_second_call_does_nothing(project: Project) -> None:
    assert project.prepare() == ["venv", "pip"]
    assert f"-e {project.folder}[plots,test]" in project.log.read_text()
    assert project.prepare() == []


def test_changed_setup_is_installed_into_the_same_environment(project: Project) -> None:
    project.prepare()
    with (project.folder / "setup.py").open("a") as setup:
        setup.write("# one more package\n")
    assert project.prepare() == ["pip"]
    assert project.prepare() == []


def test_failed_install_is_shown_and_made_anew(project: Project) -> None:
    done = project.bash("prepare_venv; echo went on", STUB_PIP_FAILS="1")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "ERROR: no such package" in done.stderr
    assert project.prepare() == ["venv", "pip"]
    assert project.prepare() == []


def test_environment_without_its_python_is_made_anew(project: Project) -> None:
    project.prepare()
    executable(project.venv / "bin" / "python", BROKEN)
    assert project.prepare() == ["venv", "pip"]


def test_environment_that_lost_a_package_is_made_anew(project: Project) -> None:
    project.prepare()
    # pip would find the package's record and do nothing. -I -S hides all packages.
    executable(project.venv / "bin" / "python", STUB.replace('"$@"', '-I -S "$@"'))
    assert project.prepare() == ["venv", "pip"]


def test_removal_cut_short_is_not_taken_for_an_environment(project: Project) -> None:
    project.bash("prepare_venv", STUB_PIP_FAILS="1")
    # Killed in rm, when the marks are gone already and packages are not.
    project.bash('rm() { if [[ -e ${!#} ]]; then command rm -f "${!#}"/.[cu]*; exit 1; fi; }; prepare_venv')
    assert project.prepare() == ["venv", "pip"]
    assert not project.venv.with_name(".venv.old").exists()


def test_moved_environment_is_installed_again(project: Project, tmp_path: Path) -> None:
    project.prepare()
    project.folder = project.folder.rename(tmp_path / "elsewhere")
    assert project.prepare() == ["pip"]


def test_empty_folder_in_its_place_is_replaced(project: Project) -> None:
    project.venv.mkdir()
    assert project.prepare() == ["venv", "pip"]


def test_environment_made_by_hand_is_completed(project: Project) -> None:
    executable(project.venv / "bin" / "python", STUB)
    assert project.prepare() == ["pip"]
