"""The patch for a Megatron-LM checkout: put on and taken off a miniature one, and every refusal, in one sentence."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PATCHES = sorted((ROOT / "patches").glob("*.patch"))
VERSION = "0.19.1"
CALL = "import megatron_asyncpp\n\nmegatron_asyncpp.install()\n\n"
NOBODY = 65534


def old_lines(patch: Path) -> str:
    """What the patch expects to find, from its only hunk."""
    _, hunk = re.split(r"^@@ .* @@\n", patch.read_text(), flags=re.MULTILINE)
    return "".join(line[1:] or "\n" for line in hunk.splitlines(keepends=True) if line[0] != "+")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A miniature checkout, in a folder with a blank, that is no repository."""
    folder = tmp_path / "a checkout"
    package = folder / "megatron" / "core"
    (package / "datasets").mkdir(parents=True)
    (package / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 1\nPRE_RELEASE = ''\n")
    lines = old_lines(ROOT / "patches" / f"megatron-lm-{VERSION}.patch")
    (folder / "pretrain_gpt.py").write_text(f"# a line of its own\n\n{lines}print('trains')\n")
    return folder


def apply(*words: str | Path, code: int = 0, scripts: Path = ROOT / "scripts", **kwargs: object) -> str:
    """Call the script; returns what it printed. Whatever isn't done is refused in one line."""
    done = subprocess.run(
        [scripts / "apply_patch.sh", *words], capture_output=True, text=True, timeout=60, cwd="/", **kwargs
    )  # type: ignore[call-overload]
    assert done.returncode == code, done.stderr
    if code:
        assert done.stdout == ""
        assert re.fullmatch(r"apply_patch\.sh: [^\n]+\n", done.stderr), done.stderr
    return done.stderr if code else done.stdout


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.name)
def test_a_patch_adds_the_call_and_nothing_else(patch: Path) -> None:
    changed = [line for line in patch.read_text().splitlines() if re.match(r"[+-](?![+-]{2} )", line)]
    assert "".join(f"{line[1:]}\n" for line in changed) == CALL
    assert all(line[0] == "+" for line in changed)


def test_it_is_put_on_once_and_taken_off(checkout: Path) -> None:
    script, before = checkout / "pretrain_gpt.py", contents(checkout)
    assert f"{checkout} is patched (Megatron-LM {VERSION}): pretrain_gpt.py\n" in apply(checkout)
    assert script.read_text().count(CALL) == 1
    assert script.read_text().replace(CALL, "").encode() == before[script]
    patched = contents(checkout)
    assert apply(checkout) == f"{checkout} is patched already: nothing to do.\n"
    assert contents(checkout) == patched
    assert "is as it was before the patch" in apply(checkout, "--reverse")
    assert contents(checkout) == before
    assert apply("--reverse", checkout) == f"{checkout} isn't patched: nothing to do.\n"
    assert contents(checkout) == before


def test_missing_helpers_are_pointed_out(checkout: Path) -> None:
    assert "helpers_cpp" in apply(checkout)
    apply(checkout, "--reverse")
    (checkout / "megatron" / "core" / "datasets" / "helpers_cpp.cpython-312.so").touch()
    assert "helpers_cpp" not in apply(checkout)


@pytest.mark.parametrize("where", ["around it", "in it", "named in the environment"])
def test_repositories_make_no_difference(where: str, checkout: Path) -> None:
    """`git apply` alone would skip all files of a folder inside another repository, and report success."""
    repository = checkout if where == "in it" else checkout.parent
    subprocess.run(["git", "init", "-q", repository], check=True)
    environment = dict(os.environ)
    if where == "named in the environment":
        environment |= {"GIT_DIR": str(repository / ".git"), "GIT_WORK_TREE": str(repository)}
    assert "is patched (" in apply(checkout, env=environment)
    assert CALL in (checkout / "pretrain_gpt.py").read_text()


def test_changes_elsewhere_in_the_file_stay(checkout: Path) -> None:
    script = checkout / "pretrain_gpt.py"
    script.write_text(f"# mine\n# mine\n{script.read_text()}# mine\n")
    before = script.read_text()
    apply(checkout)
    assert script.read_text().replace(CALL, "") == before


def test_a_file_changed_where_the_patch_belongs_is_refused(checkout: Path) -> None:
    script = checkout / "pretrain_gpt.py"
    script.write_text(script.read_text().replace("from functools import", "from functools import cache,"))
    before = contents(checkout)
    for more in ((), ("--reverse",)):
        message = apply(checkout, *more, code=2)
        assert f"pretrain_gpt.py in {checkout} isn't that of Megatron-LM {VERSION}" in message
        assert "git checkout -- pretrain_gpt.py" in message
    assert contents(checkout) == before


@pytest.mark.parametrize(("field", "version"), [("MINOR = 20", "0.20.1"), ("PRE_RELEASE = 'rc0'", "0.19.1rc0")])
def test_another_version_is_refused(field: str, version: str, checkout: Path) -> None:
    package = checkout / "megatron" / "core" / "package_info.py"
    name = field.partition(" ")[0]
    package.write_text(re.sub(f"^{name} = .*$", field, package.read_text(), flags=re.MULTILINE))
    before = contents(checkout)
    message = apply(checkout, code=2)
    assert f"is Megatron-LM {version}, and there is a patch for {VERSION} only" in message
    assert "the launcher" in message
    assert contents(checkout) == before


@pytest.mark.parametrize("missing", ["pretrain_gpt.py", "megatron/core/package_info.py"])
def test_another_folder_is_refused(missing: str, checkout: Path) -> None:
    (checkout / missing).unlink()
    assert f"{checkout} is no Megatron-LM checkout" in apply(checkout, code=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no folder is given"),
        (["--reverse"], "no folder is given"),
        (["/nowhere/at/all"], "there is no folder /nowhere/at/all"),
        (["/tmp", "/"], "/tmp and / are two folders"),
        (["/tmp", "--revert"], "there is no option --revert"),
    ],
)
def test_a_wrong_call_is_refused(words: list[str], message: str) -> None:
    assert f"{message}: call it as ./scripts/apply_patch.sh DIR [--reverse]" in apply(*words, code=2)


@pytest.fixture
def unwritable(checkout: Path) -> Iterator[tuple[Path, dict[str, object]]]:
    """The checkout without the right to write, and how to run a process that lacks it: root has all rights."""
    for folder in (checkout, *checkout.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o555)
    checkout.chmod(0o555)
    yield checkout, ({"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {})
    checkout.chmod(0o755)


def test_an_unwritable_folder_is_refused(unwritable: tuple[Path, dict[str, object]], tmp_path: Path) -> None:
    checkout, as_somebody = unwritable
    for name in ("scripts", "patches"):  # that somebody may not read the project's own folder
        (tmp_path / "copy" / name).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "apply_patch.sh", tmp_path / "copy" / "scripts")
    for patch in PATCHES:
        shutil.copy(patch, tmp_path / "copy" / "patches")
    before = contents(checkout)
    message = apply(checkout, code=2, scripts=tmp_path / "copy" / "scripts", **as_somebody)
    assert f"{checkout}/pretrain_gpt.py can't be written by " in message
    assert contents(checkout) == before
