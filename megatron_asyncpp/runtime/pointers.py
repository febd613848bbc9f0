"""What Megatron keeps that points into the storage of the weights, besides ``param.data``.

Read in megatron-core 0.19. Each of these must follow the newest version, or a step's result ends up in another
version's buffer, or is never gathered: losses move by 1e-2 to 1e-1, or, for the views, by 7e-5 while the weights are
wrong by 1e-2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, override

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


class Pointer(Protocol):
    """A place that holds a tensor in the weights' storage; None if it is empty, or is made anew when it is needed."""

    def get(self) -> torch.Tensor | None:
        """The tensor that it holds."""

    def set(self, tensor: torch.Tensor | None) -> None:
        """Put another in its place."""


@dataclass(frozen=True)
class Attribute(Pointer):
    """A tensor that is looked up by its owner's attribute."""

    owner: Any
    name: str

    @override
    def get(self) -> torch.Tensor | None:
        tensor: torch.Tensor | None = getattr(self.owner, self.name)
        return tensor

    @override
    def set(self, tensor: torch.Tensor | None) -> None:
        setattr(self.owner, self.name, tensor)


@dataclass(frozen=True)
class View(Pointer):
    """A tensor that others know by its identity (an optimizer's state is keyed by it): its data moves."""

    tensor: torch.Tensor

    @override
    def get(self) -> torch.Tensor:
        return self.tensor.data

    @override
    def set(self, tensor: torch.Tensor | None) -> None:
        assert tensor is not None
        self.tensor.data = tensor


@dataclass(frozen=True)
class ShardCache(Pointer):
    """A bucket group's views of its buckets' shards, which it makes when it first gathers, and never again."""

    group: Any

    @override
    def get(self) -> None:
        return None

    @override
    def set(self, tensor: torch.Tensor | None) -> None:
        self.group.cached_param_buffer_shard_list = [None] * len(self.group.buckets)


def pointers(model: Any, leaves: Iterable[Any]) -> list[Pointer]:
    """All pointers of a model chunk and of the leaves of its optimizer.

    Args:
        model: wrapped in Megatron's DistributedDataParallel.
        leaves: as ``optim.leaves.leaves`` lists them. Of these only a DistributedOptimizer has any.
    """
    found: list[Pointer] = []
    for buffer in [*model.buffers, *model.expert_parallel_buffers]:
        found.append(Attribute(buffer, "param_data"))
        found.extend(Attribute(bucket, "param_data") for bucket in buffer.buckets)
    for group in [*model.bucket_groups, *model.expert_parallel_bucket_groups]:
        found.append(ShardCache(group))
    for leaf in leaves:
        if isinstance(leaf, DistributedOptimizer):
            for group in (*leaf.shard_float16_groups, *leaf.shard_fp32_groups):
                found.extend(View(tensor) for tensor in group if tensor is not None)
    return found
