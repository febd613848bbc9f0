"""CPU mode, Megatron's part: what still asks for a GPU, or for TransformerEngine or Apex, once torch is patched."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

from megatron_asyncpp.integration.patching import Patch

_READ_IN = ">=0.19,<0.20"


def _allows_no_cuda(initialize: Any) -> Any:
    return functools.wraps(initialize)(functools.partial(initialize, allow_no_cuda=True))


def _compiles_nothing(compile_helpers: Any) -> Any:
    return lambda: None


def _converts_on_cpu(maybe_move: Any) -> Any:
    @functools.wraps(maybe_move)
    def convert(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return convert


def _norm_with_sequence_parallel(new: Any) -> Any:
    @functools.wraps(new)
    def new_norm(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = new(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():  # the mark by which finalize_model_grads sums over the TP ranks
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return new_norm


def _state_dict_before_first_step(state_dict: Any) -> Any:
    @functools.wraps(state_dict)
    def state_dict_with_step(self: Any) -> Any:
        if not self.is_stub_optimizer:
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
    @torch.no_grad()  # in fp32 the shards that are loaded into are views of the model's leaves
    def load(self: Any, state_dict: Any) -> None:
        load_state_dict(self, state_dict)
        for group in self.optimizer.param_groups:
            for shard in group["params"]:
                self.optimizer.state[shard]["step"] = torch.tensor(float(group["step"]))

    return load


def _leaves_step_alone(set_states: Any) -> Any:
    @functools.wraps(set_states)
    def set_without_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        set_states(self, model_param, {**tensors, "step": None})  # what is no tensor is skipped

    return set_without_step


MEGATRON_PATCHES: tuple[Patch, ...] = (
    Patch(
        "megatron.training.initialize:initialize_megatron",
        _allows_no_cuda,
        "allow_no_cuda is Megatron's own switch, but pretrain() can't reach it",
        _READ_IN,
    ),
    Patch(
        "megatron.core.datasets.utils:compile_helpers",
        _compiles_nothing,
        "the wheel has the dataset helpers compiled, but no Makefile: make would fail and Megatron exit",
        _READ_IN,
    ),
    Patch(
        "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
        _converts_on_cpu,
        "the expert all-to-all wants its split sizes as numpy, and Megatron only converts what comes from a GPU",
        _READ_IN,
    ),
    Patch(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        _norm_with_sequence_parallel,
        "the local norm refuses sequence parallelism although it needs no more than the mark on its weights",
        _READ_IN,
    ),
    Patch(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.state_dict",
        _state_dict_before_first_step,
        "without TransformerEngine and Apex a checkpoint can't be loaded before the first step: there is no "
        "state yet to read 'step' from",
        _READ_IN,
    ),
    Patch(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict",
        _load_keeps_step,
        "without TransformerEngine and Apex all parameters come to share one 'step' tensor, which then counts "
        "once for each of them, and which a placeholder 0 overwrites, so that Adam restarts its bias correction",
        _READ_IN,
    ),
    Patch(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
        _leaves_step_alone,
        "without TransformerEngine and Apex a fully_reshardable checkpoint can't be loaded: 'step' is wanted here, "
        "where only tensors with a shape are given",
        _READ_IN,
    ),
)
