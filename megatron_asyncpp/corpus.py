"""Makes Megatron's .bin/.idx files from text files, with bytes as tokens.

A file is a document: its bytes (tokens 0 to 255), then the end-of-document token 256. Files are split into train and
valid by a hash of their relative path, so the split depends neither on the machine nor on the order of listing.
"""

import argparse
import contextlib
import errno
import hashlib
import os
import shlex
import shutil
import socket
import stat
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_asyncpp.errors import AsyncPPError

EOD = 256
VOCAB_SIZE = 257
SPLITS = ("train", "valid")

# Folders of a standard library that hold no library: what pip installed, and tests (over half of all bytes).
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
# The index keeps a document's length in an int32.
_LONGEST = 2**31 - 2


@dataclass(frozen=True)
class CorpusReport:
    """What `build` made.

    Attributes:
        files: Documents written, both splits together.
        skipped: One "path: reason" for each file left out.
        train_tokens: Tokens of the training split, end-of-document tokens included.
        valid_tokens: The same of the validation split.
        prefixes: "train" and "valid", each with its Megatron prefix (the path of the .bin without that ending).
    """

    files: int
    skipped: list[str]
    train_tokens: int
    valid_tokens: int
    prefixes: dict[str, Path]


@dataclass(frozen=True)
class _Source:
    path: Path
    key: bytes  # orders files for the split
    size: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the `corpus` command."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the .bin and .idx files")
    parser.add_argument(
        "--valid-fraction",
        type=float,
        default=0.08,
        help="share of the files kept for validation (default %(default)s)",
    )
    parser.add_argument(
        "paths",
        type=Path,
        nargs="*",
        metavar="PATHS",
        help="text files, or folders of them (default: the sources of this Python's standard library)",
    )


def main(args: argparse.Namespace) -> int:
    """Run the `corpus` command: build, then print what was made and the Megatron flags that read it."""
    report = build(args.paths or None, args.out, args.valid_fraction)
    for line in report.skipped:
        print(f"skipped {line}", file=sys.stderr)
    print(
        f"{report.files} files: {report.train_tokens} tokens to train on, {report.valid_tokens} to validate on; "
        f"{len(report.skipped)} files skipped."
    )
    print("Megatron reads them with:\n  " + shlex.join(megatron_flags(report.prefixes)))
    return 0


def megatron_flags(prefixes: dict[str, Path]) -> list[str]:
    """Return the flags with which a Megatron entry script reads the files that `build` wrote to `prefixes`.

    NullTokenizer takes the last of its `--vocab-size` tokens as end of document, which is 256 here.
    """
    data = [word for split in SPLITS for word in (f"--{split}-data-path", str(prefixes[split].absolute()))]
    return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE), *data]


def build(paths: Sequence[Path] | None, out: Path, valid_fraction: float = 0.08, progress: bool = True) -> CorpusReport:
    """Write `out/train_document.bin/.idx` and `out/valid_document.bin/.idx`.

    All is written into a hidden folder of `out` first. Index files are moved into place last, `valid_document.idx`
    last of all, so where that file is, the corpus is whole; a run that is killed leaves the hidden folder at most,
    and the next one removes it.

    Args:
        paths: Text files and folders of them, searched through (hidden entries and links to folders are left out).
            None for the sources of the running Python's standard library, without its tests.
        out: The folder to write to, made if needed.
        valid_fraction: Share of the files for the validation split, between 0 and 1; one file at least.
        progress: Whether to show a progress bar on stderr.

    Returns:
        The counts, the files skipped (unreadable, not UTF-8 text, too long) and the prefixes. Empty files are no
        documents and aren't counted.

    Raises:
        AsyncPPError: A path doesn't exist, no text was found, a split would be empty, there is no space, or `out`
            can't be written to.
    """
    if not 0 < valid_fraction < 1:
        raise AsyncPPError(f"--valid-fraction must lie between 0 and 1, not at {valid_fraction}.")
    skipped: list[str] = []
    sources = _find_sources(paths, out, skipped)
    if not sources:
        raise AsyncPPError(f"No text was found in {_name(paths)}{_skipped_note(skipped)}.")
    valid_count = max(1, round(len(sources) * valid_fraction))
    valid_paths = {source.path for source in sorted(sources, key=lambda source: source.key)[:valid_count]}

    with _scratch_folder(out) as scratch:
        _check_space(sources, out)
        make_builder = _import_builder(progress)
        with _explain_os_errors(out):
            tokens, files = _write(make_builder, sources, valid_paths, scratch, skipped, progress)
        if not files:
            raise AsyncPPError(f"No text was found in {_name(paths)}{_skipped_note(skipped)}.")
        for split in SPLITS:
            if not tokens[split]:
                raise AsyncPPError(
                    f"The {split} split is empty: files are split whole, and {files} came out as text; give more "
                    f"files, or another --valid-fraction than {valid_fraction}{_skipped_note(skipped)}."
                )
        with _explain_os_errors(out):
            _publish(scratch, out)
    prefixes = {split: out / f"{split}_document" for split in SPLITS}
    return CorpusReport(files, skipped, tokens["train"], tokens["valid"], prefixes)


def _find_sources(paths: Sequence[Path] | None, out: Path, skipped: list[str]) -> list[_Source]:
    """List the non-empty files of `paths`, each once, sorted by relative path."""
    if paths is None:
        root = Path(sysconfig.get_path("stdlib"))
        listed = [
            (path, relative)
            for path, relative in _walk(root, skipped)
            if path.suffix == ".py" and not _NOT_LIBRARY.intersection(relative.parts)
        ]
    else:
        listed = []
        for path in paths:
            if not os.path.exists(path):  # False, not an error, where a folder above can't be read
                raise AsyncPPError(f"There is no file or folder {path} that can be read.")
            listed += _walk(path, skipped) if path.is_dir() else [(path, Path(path.name))]
    # A corpus made earlier is no text.
    seen = {(out / f"{split}_document{ending}").resolve() for split in SPLITS for ending in (".bin", ".idx")}
    sources = []
    for path, relative in sorted(listed, key=lambda item: (item[1].as_posix(), item[0].as_posix())):
        try:
            # A link that leads in a circle raises in either call, by version of Python.
            resolved, status = path.resolve(), path.stat()
        except (OSError, RuntimeError) as error:
            skipped.append(f"{path}: {_reason(error)}")
            continue
        if resolved in seen:
            continue
        seen.add(resolved)
        if not stat.S_ISREG(status.st_mode):
            skipped.append(f"{path}: not a regular file")
        elif status.st_size:
            key = hashlib.sha256(os.fsencode(relative.as_posix())).digest()
            sources.append(_Source(path, key, status.st_size))
    return sources


def _walk(root: Path, skipped: list[str]) -> list[tuple[Path, Path]]:
    """Return every file below `root` with its path relative to it, but for hidden ones and Python's caches."""

    def skip(error: OSError) -> None:
        skipped.append(f"{error.filename}: {_reason(error)}")

    found = []
    for folder, folders, files in root.walk(on_error=skip):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        found += [
            (folder / name, (folder / name).relative_to(root))
            for name in files
            if not name.startswith(".") and not (folder / name).is_dir()
        ]
    return found


def _write(
    make_builder: Callable[..., Any],
    sources: list[_Source],
    valid_paths: set[Path],
    folder: Path,
    skipped: list[str],
    progress: bool,
) -> tuple[dict[str, int], int]:
    """Write both splits into `folder`. Return the tokens of each, and the files that were text."""
    import numpy
    from tqdm import tqdm

    tokens = dict.fromkeys(SPLITS, 0)
    files = 0
    builders = {split: make_builder(str(folder / f"{split}_document.bin"), dtype=numpy.uint16) for split in SPLITS}
    total = sum(source.size for source in sources)
    try:
        with tqdm(total=total, unit="B", unit_scale=True, desc="corpus", disable=not progress) as bar:
            for source in sources:
                bar.update(source.size)
                try:
                    text = _read_text(source)
                except (OSError, ValueError) as error:
                    skipped.append(f"{source.path}: {_reason(error)}")
                    continue
                document = numpy.full(len(text) + 1, EOD, dtype=numpy.uint16)
                document[:-1] = numpy.frombuffer(text, dtype=numpy.uint8)
                split = "valid" if source.path in valid_paths else "train"
                builders[split].add_document(document, [len(document)])
                tokens[split] += len(document)
                files += 1
        for split, builder in builders.items():
            builder.finalize(str(folder / f"{split}_document.idx"))
    finally:
        for builder in builders.values():
            # On a full disk closing fails once more, on what is still buffered; the first error is the one to tell.
            with contextlib.suppress(OSError):
                builder.data_file.close()
    return tokens, files


def _read_text(source: _Source) -> bytes:
    """Read a file. Raise ValueError, with the reason, if it can't be a document."""
    if source.size > _LONGEST:
        raise ValueError("longer than 2 GiB, which Megatron's index can't hold: cut it into parts")
    data = source.path.read_bytes()
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start})") from error
    if b"\0" in data:
        raise ValueError("binary, not text (it holds zero bytes)")
    return data


def _check_space(sources: list[_Source], out: Path) -> None:
    # Two bytes a token; in the index a length, an offset and a document number for each file.
    needed = sum(2 * (source.size + 1) + 20 for source in sources) + 4096
    with _explain_os_errors(out):
        free = shutil.disk_usage(out).free
    if free < needed:
        raise AsyncPPError(_no_space(out, f"{_mib(needed)} are needed and {_mib(free)} are free"))


def _import_builder(progress: bool) -> Callable[..., Any]:
    """Import Megatron's builder, without the warnings that importing Megatron prints where there is no GPU."""
    if progress:
        print("corpus: loading Megatron (some 10 seconds) ...", file=sys.stderr, flush=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    except ImportError as error:
        raise AsyncPPError(f"Megatron can't be imported ({error}): pip install megatron_asyncpp brings it.") from error
    return IndexedDatasetBuilder


@contextlib.contextmanager
def _scratch_folder(out: Path) -> Iterator[Path]:
    """A hidden folder in `out`, gone afterwards. Removes those of earlier runs on this machine that were killed."""
    import psutil

    # The machine is in the name because a shared file system shows the folders of processes that run elsewhere.
    stem = f".unfinished-{socket.gethostname()}-"
    scratch = out / f"{stem}{os.getpid()}"
    with _explain_os_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        for old in out.glob(f"{stem}*"):
            pid = old.name.removeprefix(stem)
            if pid == str(os.getpid()) or (pid.isdigit() and not psutil.pid_exists(int(pid))):
                shutil.rmtree(old)
        scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _publish(scratch: Path, out: Path) -> None:
    """Move the files into place. At every moment an index that is there belongs to the data beside it."""
    for split in SPLITS:
        (out / f"{split}_document.idx").unlink(missing_ok=True)
    for ending in (".bin", ".idx"):
        for split in SPLITS:
            os.replace(scratch / f"{split}_document{ending}", out / f"{split}_document{ending}")


@contextlib.contextmanager
def _explain_os_errors(out: Path) -> Iterator[None]:
    """Turn an error of the file system while writing to `out` into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise AsyncPPError(_no_space(out, "the disk filled up while writing")) from error
        raise AsyncPPError(
            f"The output folder {out} can't be written to ({_reason(error)}): choose another."
        ) from error


def _no_space(out: Path, why: str) -> str:
    return f"Not enough disk space for the corpus in {out}: {why}; free some, or choose another --out."


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _name(paths: Sequence[Path] | None) -> str:
    return ", ".join(map(str, paths)) if paths else f"the standard library in {sysconfig.get_path('stdlib')}"


def _skipped_note(skipped: list[str]) -> str:
    return f" ({len(skipped)} files skipped, the first: {skipped[0]})" if skipped else ""
