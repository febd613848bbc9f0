"""Finds what a model's modules keep besides parameters: Megatron's routers, and whoever declared something."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron_asyncpp.runtime.batch_state import TensorPlace
from megatron_asyncpp.state import declared_state

# Buffers of Megatron's routers, as read in megatron-core 0.19: what one that has the first sums over a batch.
_ROUTER_PER_BATCH = {
    "expert_bias": ("local_tokens_per_expert",),
    "global_tokens_per_expert": ("global_tokens_per_expert", "ga_steps"),
    "qb_beta": ("qb_beta_accum", "qb_beta_count"),
}
_ROUTER_PER_VERSION = ("expert_bias", "qb_beta")


@dataclass(frozen=True)
class ModuleState:
    """What a model's modules keep.

    Attributes:
        per_batch: what belongs to a batch.
        per_version: by name in the model, the buffers that belong to a version of the weights.
        updates: what modules declared to make the next version of the latter.
    """

    per_batch: tuple[TensorPlace, ...]
    per_version: dict[str, torch.Tensor]
    updates: tuple[Callable[[], None], ...]


def module_state(model: torch.nn.Module) -> ModuleState:
    """Look through all modules of a model."""
    per_batch: list[TensorPlace] = []
    per_version: dict[str, torch.Tensor] = {}
    updates: list[Callable[[], None]] = []
    for prefix, module in model.named_modules():
        declared = declared_state(module)
        buffers = {name for name, buffer in module.named_buffers(recurse=False) if buffer is not None}
        summed = [name for having, names in _ROUTER_PER_BATCH.items() if having in buffers for name in names]
        per_batch.extend(TensorPlace(module, name) for name in (*summed, *declared.per_batch))
        for name in (*(name for name in _ROUTER_PER_VERSION if name in buffers), *declared.per_version):
            per_version[f"{prefix}.{name}" if prefix else name] = module.get_buffer(name)
        if declared.update is not None:
            updates.append(getattr(module, declared.update))
    return ModuleState(tuple(per_batch), per_version, tuple(updates))


@contextmanager
def updates_left_to_the_step(model: torch.nn.Module) -> Iterator[None]:
    """Within the context a call of a declared ``update`` method does nothing; ``ModuleState.updates`` still do."""
    replaced = [(module, name) for module in model.modules() if (name := declared_state(module).update) is not None]
    for module, name in replaced:
        vars(module)[name] = lambda: None
    try:
        yield
    finally:
        for module, name in replaced:
            del vars(module)[name]
