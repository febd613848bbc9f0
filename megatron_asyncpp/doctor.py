"""``python -m megatron_asyncpp doctor [DIR]``: what is usable here, or what is in a checkpoint folder.

A folder is read without running anything in it.
"""

from __future__ import annotations

import argparse
import io
import pickle
import re
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_asyncpp.arguments import config_of_saved
from megatron_asyncpp.errors import AsyncPPError

_TRACKER = "latest_checkpointed_iteration.txt"
_PART = "model_optim_rng.pt"
# The classes that torch writes into the index of a sharded checkpoint, which it reads with pickle itself.
_INDEX_CLASSES = {
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata", "TensorStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}
_ITERATION = re.compile(r"iter_(\d{7,})")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "folder",
        metavar="DIR",
        type=Path,
        nargs="?",
        help="the folder that --save names; without it: versions, what is replaced in Megatron, and what is refused",
    )


def main(args: Namespace) -> int:
    """Print what is there.

    Returns:
        0 if there is a complete checkpoint that a run would continue from, or, without a folder, if all that the plugin
        replaces is there; else 1.

    Raises:
        AsyncPPError: the folder holds no checkpoint.
    """
    if args.folder is None:
        from megatron_asyncpp.installation import examined as examined_installation

        lines, complete = examined_installation()
    else:
        lines, complete = examined(args.folder)
    print("\n".join(lines))
    return int(not complete)


def examined(folder: Path) -> tuple[list[str], bool]:
    """What to print of a folder, and whether the checkpoint that a run would continue from is complete.

    Raises:
        AsyncPPError: it holds no checkpoint.
    """
    found = {
        int(match[1]): path for path in sorted(folder.glob("iter_*")) if (match := _ITERATION.fullmatch(path.name))
    }
    tracker = folder / _TRACKER
    latest = tracker.read_text().strip() if tracker.is_file() else None
    if not found and latest is None:
        raise AsyncPPError(f"{folder} holds no checkpoint: name the folder that was given to --save")
    lines, complete = [], False
    for iteration, path in found.items():
        missing = list(_missing(path))
        here = latest == str(iteration)
        complete |= here and not missing
        lines.append(
            f"iteration {iteration}{' (a run continues from here)' if here else ''}: "
            + (f"incomplete, {missing[0]} is missing" if missing else "; ".join(_described(path)))
        )
    if latest is None:
        lines.append(f"no {_TRACKER}: no save has ended, and a run needs --ckpt-step to continue from one of these")
    elif latest != "release" and int(latest) not in found:
        lines.append(f"{_TRACKER} names iteration {latest}, which isn't there")
    return lines, complete


def _missing(folder: Path) -> Iterator[str]:
    """The files without which this checkpoint can't be loaded."""
    if not list(folder.glob("mp_rank_*")):
        # Written by one rank, once all have written their parts.
        yield from (name for name in (".metadata", "metadata.json") if not (folder / name).is_file())
        return
    parts = sorted(folder.glob(f"mp_rank_*/{_PART}"))
    if not parts:
        yield _PART
        return
    try:
        settings = _read(parts[0])["args"]
    except (RuntimeError, EOFError):
        yield f"the end of {parts[0].relative_to(folder)}"
        return
    stages, shards = settings.pipeline_model_parallel_size, settings.tensor_model_parallel_size
    for stage in range(stages):
        for shard in range(shards):
            name = f"mp_rank_{shard:02d}" + (f"_{stage:03d}" if stages > 1 else "")
            if not (folder / name / _PART).is_file():
                yield f"{name}/{_PART}"


def _described(folder: Path) -> Iterator[str]:
    parts = sorted(folder.glob(f"mp_rank_*/{_PART}"))
    state = _read(parts[0]) if parts else _common_state(folder)
    settings, iteration = state["args"], state["iteration"]
    config = config_of_saved(settings)
    yield "no schedule of this plugin" if config is None else f"schedule {config.name}, {config.correction()}"
    stale = state.get("asyncpp", {}).get("stale")
    yield f"holds V({iteration})" + (f" and the stale weights V({iteration - 1})" if stale else "")
    yield f"optimizer {settings.optimizer}{', without its state' if settings.no_save_optim else ''}"
    yield f"format {'torch' if parts else 'torch_dist'}"
    yield (
        f"TP {settings.tensor_model_parallel_size}, PP {settings.pipeline_model_parallel_size}, "
        f"DP {settings.data_parallel_size}"
    )


class _Index(pickle.Unpickler):
    """Reads the index of a sharded checkpoint, and no other classes than torch writes there."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _INDEX_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of an index")
        return super().find_class(module, name)


def _common_state(folder: Path) -> Any:
    """What a sharded checkpoint has once for all ranks."""
    if (folder / "common.pt").is_file():  # of an older Megatron
        return _read(folder / "common.pt")
    index = folder / ".metadata"
    with index.open("rb") as file, _trusting_nothing(index):
        storage = _Index(file).load().storage_data
    ((name, start, length),) = (
        (info.relative_path, info.offset, info.length)
        for item, info in storage.items()
        if item.fqn.startswith("common_state/")
    )
    data = (folder / name).resolve()
    if data.parent != folder.resolve():
        raise AsyncPPError(f"{index} names a file outside of its folder: don't load this checkpoint")
    with data.open("rb") as file:
        file.seek(start)
        (state,) = _read(data, io.BytesIO(file.read(length)))
    return state


def _read(file: Path, content: io.BytesIO | None = None) -> Any:
    """Read a file of tensors and plain values; of other classes only those that Megatron declares as safe.

    Raises:
        AsyncPPError: it holds anything else.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is faster with other packages
        import megatron.core  # noqa: F401  (declares the classes)
    import torch

    with _trusting_nothing(file):
        if content is not None:
            return torch.load(content, map_location="cpu", weights_only=True)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


@contextmanager
def _trusting_nothing(file: Path) -> Iterator[None]:
    try:
        yield
    except pickle.UnpicklingError as error:
        raise AsyncPPError(
            f"{file} holds more than tensors and settings, and was not opened: don't load this checkpoint unless you "
            f"trust who wrote it ({str(error).strip().splitlines()[0]})"
        ) from error
