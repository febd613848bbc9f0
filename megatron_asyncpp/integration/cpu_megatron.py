"""CPU mode, Megatron's part: what still asks for a GPU, or for TransformerEngine or Apex, once torch is patched."""

from __future__ import annotations

import copy
import functools
import importlib.util
from typing import Any

import torch

from megatron_asyncpp.integration.patching import Patch

_READ_IN = ">=0.19,<0.20"


def _allows_no_cuda(initialize: Any) -> Any:
    return functools.wraps(initialize)(functools.partial(initialize, allow_no_cuda=True))


def _compiles_what_is_missing(compile_helpers: Any) -> Any:
    @functools.wraps(compile_helpers)
    def compile_missing_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            compile_helpers()

    return compile_missing_helpers


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


MEGATRON_PATCHES: tuple[Patch, ...] = (
    Patch(
        "megatron.training.initialize:initialize_megatron",
        _allows_no_cuda,
        "allow_no_cuda is Megatron's own switch, but pretrain() can't reach it",
        _READ_IN,
    ),
    Patch(
        "megatron.core.datasets.utils:compile_helpers",
        _compiles_what_is_missing,
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
)
