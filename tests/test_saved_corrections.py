"""What Error Feedback keeps from step to step is in a checkpoint: of every weight, whole, and with the right values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint

from tests import rows
from tests.harness.flags import tiny_flags
from tests.harness.results import RankResult, Run, renumber
from tests.harness.run import run

KEY = "previous_update"
DISTRIBUTED = ("--use-distributed-optimizer",)
REPLICAS = {"data_parallel": 2, "bf16": True}
OPTIMIZERS: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {  # ranks, flags, options of tiny_flags
    "fp32": (2, (), {}),
    "bf16": (2, (), {"bf16": True}),
    "muon fp32": (2, rows.MUON, {}),
    "layer-wise muon bf16": (4, (*DISTRIBUTED, *rows.MUON), REPLICAS),
    "distributed bf16": (4, DISTRIBUTED, REPLICAS),
}
# In a checkpoint a norm's weight has the name that it has where it is fused with the next linear layer.
NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def train(optimizer: str, save: Path, kind: str, *more: str) -> tuple[Run, Path]:
    """Train four iterations and save after the last; the run, and the checkpoint's folder."""
    ranks, extra, options = OPTIMIZERS[optimizer]
    saving = ("--save", str(save), "--save-interval", "4", "--ckpt-format", kind)
    flags = tiny_flags(
        2, 4, iterations=4, extra=(*extra, *rows.TWO_BW, *rows.feedback_flags(1.0), *saving, *more), **options
    )
    return run(flags, ranks, hooks="tests.faults:keep_previous_updates"), save / "iter_0000004"


def kept_by(rank: RankResult) -> Iterator[tuple[str, torch.Tensor, int | None]]:
    """A rank's weights by their global names, what was kept for each, and its place if that is of a part only."""
    for name, (kept, start) in rank.extra["by weight"].items():  # type: ignore[attr-defined]
        yield renumber(name, rank.layer_offset), kept, start


def read(folder: Path) -> dict[str, torch.Tensor]:
    """The kept tensors in a torch_dist checkpoint, by what follows the key in their names, or comes before it."""
    reader = checkpoint.FileSystemReader(folder)
    saved = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if KEY in name
    }
    checkpoint.load(saved, storage_reader=reader, no_dist=True)
    return {name.split(f"{KEY}.")[-1]: tensor for name, tensor in saved.items()}


def place(name: str) -> tuple[str, int | None]:
    """Where a weight is in a torch_dist checkpoint: the name of the tensor, and the index of its layer in it."""
    found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
    if found is None:
        return name, None
    return f"decoder.layers.{NORMS.get(found[2], found[2])}", int(found[1])


@pytest.mark.parametrize("optimizer", ["fp32", "bf16", "muon fp32", "layer-wise muon bf16"])
def test_the_sharded_checkpoint_has_it_by_weight(optimizer: str, tmp_path: Path) -> None:
    done, folder = train(optimizer, tmp_path, "torch_dist")
    saved = read(folder)
    compared = {}
    for rank in done.ranks:
        for name, kept, start in kept_by(rank):
            key, layer = place(name)
            assert start is None, f"{name} is split"
            assert kept.abs().max() > 0, f"{name} was never stepped"
            assert torch.equal(saved[key] if layer is None else saved[key][layer], kept), f"{name} was saved wrongly"
            compared[name] = kept.numel()
    assert compared.keys() == done.merged("final").keys()
    assert sum(compared.values()) == sum(tensor.numel() for tensor in saved.values())


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_the_sharded_checkpoint_has_it_by_buffer(dtype: str, tmp_path: Path) -> None:
    done, folder = train("distributed bf16", tmp_path, "torch_dist", "--asyncpp-error-feedback-dtype", dtype)
    saved = read(folder)
    for stage in (0, 1):
        (buffer,) = (tensor for name, tensor in saved.items() if f"dp_group_idx_{stage}." in name)
        assert buffer.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        compare_buffer(done, stage, buffer)


def compare_buffer(done: Run, stage: int, buffer: torch.Tensor) -> None:
    """All parts that the ranks of a stage have are in its buffer, and make up its weights."""
    ranks = [rank for rank in done.ranks if rank.pipeline_rank == stage]
    parts = [part for rank in ranks for part in kept_by(rank)]
    for name, kept, start in parts:
        assert start is not None, f"{name} isn't split"
        assert torch.equal(buffer[start : start + kept.numel()], kept), f"{name} was saved wrongly"
    assert {name for name, _, _ in parts} == ranks[0].named("final").keys()
    assert sum(kept.numel() for _, kept, _ in parts) == sum(tensor.numel() for tensor in ranks[0].final.values())


def kept_in(state: Any) -> Iterator[torch.Tensor]:
    """The kept tensors anywhere in a torch checkpoint, in order."""
    for value in state.values() if isinstance(state, dict) else state:
        if isinstance(value, dict | list):
            yield from kept_in(value)
    if isinstance(state, dict) and KEY in state:
        yield state[KEY]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_torch_checkpoint_has_it(optimizer: str, tmp_path: Path) -> None:
    done, folder = train(optimizer, tmp_path, "torch")
    for rank in done.ranks:
        stage, replica = rank.pipeline_rank, rank.rank % (len(done.ranks) // 2)
        (folder_of_stage,) = (path for path in folder.iterdir() if re.fullmatch(rf"mp_rank_00(_00{stage})?", path.name))
        file = {
            "layer-wise muon bf16": f"layer_wise_optimizer_{replica}.pt",
            "distributed bf16": "distrib_optim.pt",
        }.get(optimizer, "model_optim_rng.pt")
        saved = list(kept_in(torch.load(folder_of_stage / file, weights_only=False)))
        if optimizer == "distributed bf16":
            assert len(saved) == 1
            compare_buffer(done, stage, saved[0])
            continue
        kept: Any = rank.extra["in order"]
        assert len(saved) == len(kept) == len(rank.extra["by weight"]) > 0  # type: ignore[arg-type]
        assert all(torch.equal(one, other) for one, other in zip(saved, kept, strict=True))
