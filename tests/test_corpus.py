"""The corpus command: what it writes, what it leaves out, and how it refuses."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from megatron_asyncpp import __main__ as command_line
from megatron_asyncpp import corpus
from megatron_asyncpp.errors import AsyncPPError

FILES = ["train_document.bin", "train_document.idx", "valid_document.bin", "valid_document.idx"]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    for number in range(20):
        path = folder / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text {number} äöü\n" * (number + 1))
    return folder


def documents(prefix: Path) -> list[bytes]:
    """Reads with Megatron's own reader; checks and cuts off the end-of-document tokens."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert len(dataset.document_indices) == len(dataset) + 1  # one sequence a document
    read = [dataset[number] for number in range(len(dataset))]
    assert all(tokens[-1] == 256 and tokens[:-1].max() < 256 for tokens in read)
    return [tokens[:-1].astype(numpy.uint8).tobytes() for tokens in read]


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_every_file_is_one_document_of_one_split(texts: Path, tmp_path: Path) -> None:
    report = corpus.build([texts], tmp_path / "out", valid_fraction=0.2, progress=False)
    train, valid = documents(report.prefixes["train"]), documents(report.prefixes["valid"])
    assert (len(train), len(valid)) == (16, 4)
    assert sorted(train + valid) == sorted(path.read_bytes() for path in texts.rglob("*.txt"))
    assert report.train_tokens == sum(map(len, train)) + 16
    assert report.valid_tokens == sum(map(len, valid)) + 4
    assert (report.files, report.skipped) == (20, [])
    assert listing(tmp_path / "out") == FILES


def test_result_depends_on_relative_paths_only(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(texts, tmp_path / "elsewhere")
    corpus.build([texts], tmp_path / "a", progress=False)
    walk = Path.walk

    def list_backwards(folder: Path, **kwargs: object) -> Iterator[tuple[Path, list[str], list[str]]]:
        for at, folders, files in walk(folder, **kwargs):
            folders.reverse()
            yield at, folders, files[::-1]

    monkeypatch.setattr(Path, "walk", list_backwards)
    corpus.build([tmp_path / "elsewhere"], tmp_path / "b", progress=False)
    for name in FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_file_given_twice_is_one_document(texts: Path, tmp_path: Path) -> None:
    report = corpus.build([texts, texts / "part0", texts / "part1" / "1.txt"], tmp_path / "out", progress=False)
    assert report.files == 20


def test_unreadable_and_binary_files_are_named_and_skipped(texts: Path, tmp_path: Path) -> None:
    (texts / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (texts / "zeros.dat").write_bytes(b"a\0b")
    (texts / "gone.txt").symlink_to(texts / "nowhere")
    os.mkfifo(texts / "pipe")
    (texts / "empty.txt").touch()
    (texts / ".hidden").write_text("hidden")
    report = corpus.build([texts], tmp_path / "out", progress=False)
    assert report.files == 20
    reasons = {Path(line.split(":")[0]).name: line for line in report.skipped}
    assert sorted(reasons) == ["gone.txt", "latin.txt", "pipe", "zeros.dat"]
    assert "not UTF-8 text (byte 2)" in reasons["latin.txt"]
    assert "zero bytes" in reasons["zeros.dat"]
    assert "No such file" in reasons["gone.txt"]
    assert "not a regular file" in reasons["pipe"]


def test_corpus_within_its_own_source_folder_is_not_read(texts: Path) -> None:
    first = corpus.build([texts], texts, progress=False)
    second = corpus.build([texts], texts, progress=False)
    assert second == first


def test_default_is_the_standard_library_without_tests() -> None:
    names = [str(source.path) for source in corpus._find_sources(None, Path("unused"), [])]
    assert any(name.endswith("/argparse.py") for name in names)
    assert any(name.endswith("/asyncio/base_events.py") for name in names)
    assert not any("/site-packages/" in name or "/test/" in name or not name.endswith(".py") for name in names)


@pytest.mark.parametrize(
    ("paths", "fraction", "sentence"),
    [
        (["missing"], 0.1, "There is no file or folder"),
        (["folder"], 0.1, "No text was found in"),
        (["binary"], 0.1, "No text was found in .*the first: .*zero bytes"),
        (["one.txt"], 0.1, "The train split is empty"),
        (["one.txt", "binary"], 0.1, "split is empty"),
        (["one.txt"], 0.0, "--valid-fraction must lie between 0 and 1"),
    ],
)
def test_refusals(paths: list[str], fraction: float, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "one.txt").write_text("one")
    (tmp_path / "binary").write_bytes(b"\0")
    with pytest.raises(AsyncPPError, match=sentence):
        corpus.build([tmp_path / path for path in paths], tmp_path / "out", fraction, progress=False)
    assert not (tmp_path / "out").exists() or not listing(tmp_path / "out")


def test_unwritable_folder(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AsyncPPError, match="can't be written to"):
        corpus.build([texts], tmp_path / "file" / "out", progress=False)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)  # root may write anywhere, so folder modes can't show this
    with pytest.raises(AsyncPPError, match=r"can't be written to \(Permission denied\)"):
        corpus.build([texts], tmp_path / "out", progress=False)


def test_too_little_space_is_found_before_anything_is_written(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 100))
    with pytest.raises(AsyncPPError, match="Not enough disk space .* MiB are needed and 0.0 MiB are free"):
        corpus.build([texts], tmp_path / "out", progress=False)
    assert not listing(tmp_path / "out")


@pytest.mark.parametrize("keeps_failing", [False, True])
def test_disk_that_fills_up_leaves_the_old_corpus(
    keeps_failing: bool, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    corpus.build([texts], tmp_path / "out", progress=False)
    before = {name: (tmp_path / "out" / name).read_bytes() for name in FILES}
    (texts / "more.txt").write_text("more")

    class FullDisk:
        def __init__(self, file: object) -> None:
            self.file = file

        def write(self, data: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            self.file.close()
            if keeps_failing:
                raise OSError(errno.EIO, "still full")

    class Builder(IndexedDatasetBuilder):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.data_file = FullDisk(self.data_file)

    monkeypatch.setattr("megatron.core.datasets.indexed_dataset.IndexedDatasetBuilder", Builder)
    with pytest.raises(AsyncPPError, match="the disk filled up while writing"):
        corpus.build([texts], tmp_path / "out", progress=False)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in listing(tmp_path / "out")} == before


def test_leftover_of_a_killed_run_is_removed_and_of_a_living_one_kept(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stem = f".unfinished-{os.uname().nodename}-"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        (out / f"{stem}{other.pid}").mkdir(parents=True)
        corpus.build([texts], out, progress=False)
        assert listing(out) == [f"{stem}{other.pid}", *FILES]
        other.communicate(b"\n")
    corpus.build([texts], out, progress=False)
    assert listing(out) == FILES


def test_killed_while_moving_leaves_no_index_without_its_data(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    corpus.build([texts], out, progress=False)
    move, moved = os.replace, []

    def watch(source: Path, target: Path) -> None:
        seen = set(listing(out))
        assert "valid_document.idx" not in seen
        assert "train_document.idx" not in seen or moved[-1].name == "train_document.idx"
        move(source, target)
        moved.append(target)

    monkeypatch.setattr(os, "replace", watch)
    corpus.build([texts], out, progress=False)
    assert moved[-1].name == "valid_document.idx" and len(moved) == 4


def test_printed_flags_are_what_megatron_reads(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.arguments import parse_args
    from megatron.training.utils import get_blend_and_blend_per_split

    out = tmp_path / "a folder"
    assert command_line.main(["corpus", "--out", str(out), str(texts)]) == 0
    printed = capsys.readouterr().out
    flags = corpus.megatron_flags({split: out / f"{split}_document" for split in corpus.SPLITS})
    assert printed.splitlines()[-1].strip().replace("'", "") == " ".join(flags)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pretrain", *flags])
        args = parse_args()
    args.rank, args.tensor_model_parallel_size = 0, 1
    tokenizer = build_tokenizer(args)
    assert (tokenizer.eod, tokenizer.vocab_size) == (corpus.EOD, corpus.VOCAB_SIZE)

    blend, per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=16,
        blend=blend,
        blend_per_split=per_split,
        split=args.split,
        tokenizer=tokenizer,
        path_to_cache=str(tmp_path / "cache"),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, [8, 4, 0], lambda: True, config).build()
    assert len(train) >= 8 and len(valid) >= 4
    assert train[0]["tokens"].shape == (16,)
    assert int(train[0]["tokens"].max()) <= corpus.EOD
