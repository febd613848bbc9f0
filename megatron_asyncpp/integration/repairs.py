"""Repairs of Megatron's distributed optimizer where TransformerEngine and Apex are missing, with a GPU or without.

Megatron then steps with torch's AdamW, which counts its steps per parameter, in a tensor ``step`` beside the moments.
Megatron saves one count for all, and loads it wrongly: a resumed run fails, or goes on with another bias correction.
Each replacement calls the original unless a schedule was asked for, or CPU mode is on.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from megatron_asyncpp import arguments
from megatron_asyncpp.integration.patching import VERSIONS, Patch

_always = False


def apply_always() -> None:
    """Repair whatever was asked for, from now on: CPU mode is for runs without a schedule too."""
    global _always
    _always = True


def _are_wanted() -> bool:
    if _always:
        return True
    from megatron.training import global_vars

    args = global_vars._GLOBAL_ARGS  # None in a program that uses Megatron's optimizers without its training loop
    return args is not None and arguments.config_from(args) is not None


def _counts_steps_per_parameter() -> bool:
    """Whether Megatron has found neither TransformerEngine nor Apex, and so steps with torch's optimizer."""
    from megatron.core.optimizer import distrib_optimizer

    return not distrib_optimizer.HAVE_APEX_OR_TE


def _state_dict_before_first_step(state_dict: Any) -> Any:
    @functools.wraps(state_dict)
    def state_dict_with_step(self: Any) -> Any:
        if _are_wanted() and _counts_steps_per_parameter() and not self.is_stub_optimizer:
            _give_state(self)
        return state_dict(self)

    return state_dict_with_step


def _give_state(distributed: Any) -> None:
    """Give each parameter shard the state that its optimizer would start from, and a ``step``."""
    inner = distributed.optimizer
    if not inner.state:
        distributed.init_state_fn(inner, distributed.config)
    for group in inner.param_groups:
        for shard in group["params"]:
            state = inner.state[shard]
            for key in distributed.optimizer_state_keys:  # what Megatron saves and loads
                if key not in state:
                    state[key] = torch.zeros_like(shard)
            state.setdefault("step", torch.tensor(0.0))


def _load_keeps_step(load_state_dict: Any) -> Any:
    @functools.wraps(load_state_dict)
    def load(self: Any, state_dict: Any) -> None:
        if not _are_wanted():
            load_state_dict(self, state_dict)
            return
        with torch.no_grad():  # in fp32 the shards that are loaded into are views of the model's leaves
            load_state_dict(self, state_dict)
        if _counts_steps_per_parameter():
            for group in self.optimizer.param_groups:
                for shard in group["params"]:
                    self.optimizer.state[shard]["step"] = torch.tensor(float(group["step"]))

    return load


def _leaves_step_alone(set_states: Any) -> Any:
    @functools.wraps(set_states)
    def set_without_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        if _are_wanted() and _counts_steps_per_parameter():
            tensors = {**tensors, "step": None}  # what is no tensor is skipped
        set_states(self, model_param, tensors)

    return set_without_step


PATCHES: tuple[Patch, ...] = (
    Patch(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.state_dict",
        _state_dict_before_first_step,
        "without TransformerEngine and Apex a checkpoint can't be loaded before the first step: there is no "
        "state yet to read 'step' from",
        VERSIONS,
    ),
    Patch(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict",
        _load_keeps_step,
        "without TransformerEngine and Apex all parameters come to share one 'step' tensor, which then counts "
        "once for each of them, and which a placeholder 0 overwrites, so that Adam restarts its bias correction; "
        "in fp32, with them too, the values of a shard can't be loaded into the leaf that it is a view of",
        VERSIONS,
    ),
    Patch(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
        _leaves_step_alone,
        "without TransformerEngine and Apex a fully_reshardable checkpoint can't be loaded: 'step' is wanted here, "
        "where only tensors with a shape are given",
        VERSIONS,
    ),
)
