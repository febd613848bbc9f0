"""The leaves of Megatron's optimizer tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params


def leaves(optimizer: Any) -> list[Any]:
    """The Megatron optimizers that step parameters themselves, in order.

    ``get_megatron_optimizer`` returns chains of chains; a leaf holds one inner torch optimizer. A rank without
    trainable parameters has stub leaves, which are left out.
    """
    return [leaf for leaf, _ in _descend(optimizer, layer_wise=False)]


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside the leaves: what makes u_k from a gradient."""
    return [leaf.optimizer for leaf in leaves(optimizer)]


def replicas(optimizer: Any) -> list[int]:
    """How many ranks of the run hold each gradient of each leaf; duplicates over tensor parallelism don't count.

    What is summed over all ranks is divided by it, so that leaves which are whole on every data-parallel rank, sharded
    leaves, and leaves of experts go together in one sum.

    Returns:
        A number for each of ``leaves(optimizer)``, in their order.
    """
    world = torch.distributed.get_world_size()
    # The leaves of a layer-wise optimizer hold other parameters on each data-parallel rank, but report the
    # model-parallel group.
    return [
        1 if layer_wise else world // leaf.get_grad_stats_parallel_group().size()
        for leaf, layer_wise in _descend(optimizer, layer_wise=False)
    ]


def stepped(leaf: Any, weight: torch.nn.Parameter) -> torch.Tensor | None:
    """What a leaf's inner optimizer steps for a weight of the model, or None if it steps nothing of it on this rank.

    That is the weight itself, its fp32 master, or, in a distributed optimizer, this rank's shard of either.
    """
    if isinstance(leaf, DistributedOptimizer):
        models = [*leaf.model_float16_groups, *leaf.model_fp32_groups]
        shards = [*leaf.shard_fp32_from_float16_groups, *leaf.shard_fp32_groups]
    elif isinstance(leaf, Float16OptimizerWithFloat16Params):
        models = [*leaf.float16_groups, *leaf.fp32_from_fp32_groups]
        shards = [*leaf.fp32_from_float16_groups, *leaf.fp32_from_fp32_groups]
    else:
        models = shards = [leaf.get_parameters()]
    for model_group, shard_group in zip(models, shards, strict=True):
        for model, shard in zip(model_group, shard_group, strict=True):
            if model is weight:
                tensor: torch.Tensor = shard
                return tensor
    return None


def _descend(optimizer: Any, layer_wise: bool) -> Iterator[tuple[Any, bool]]:
    if hasattr(optimizer, "chained_optimizers"):
        layer_wise = layer_wise or isinstance(optimizer, LayerWiseDistributedOptimizer)
        for chained in optimizer.chained_optimizers:
            yield from _descend(chained, layer_wise)
    elif not optimizer.is_stub_optimizer:
        yield optimizer, layer_wise
