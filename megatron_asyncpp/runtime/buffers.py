"""Finds what forwards and backwards change besides gradients, and that nobody has declared.

Under a delay forwards of the next batch run before the end of a batch, so what they leave in a module would be of two
batches at once: wrong, and nothing says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_asyncpp.runtime.batch_state import TensorPlace


@contextmanager
def unchanged_buffers(model: torch.nn.Module, per_batch: Sequence[TensorPlace], what: str) -> Iterator[None]:
    """Compare the model's registered buffers before and after the context.

    Args:
        model: a stage's.
        per_batch: what may change, since each batch has its own.
        what: runs in the context, for the message.

    Raises:
        RuntimeError: another one changed.
    """
    ignored = {(place.module, place.name) for place in per_batch}
    before = {key: (name, buffer.detach().clone()) for key, name, buffer in _buffers(model) if key not in ignored}
    yield
    for key, name, buffer in _buffers(model):
        if key not in ignored and not _same(before.get(key), buffer):
            raise RuntimeError(
                f"{what} changes the buffer {name} of the model, which an asynchronous schedule would leave in the "
                f"state of another batch than the weights: call megatron_asyncpp.declare_state in the constructor of "
                f"its module, a {type(key[0]).__name__}, with {key[1]} in per_batch if it gathers something over a "
                f"batch, or in per_version if it is a weight that changes at the end of a batch; if it is neither, "
                f"train this model without --asyncpp-schedule 2bw"
            )


@contextmanager
def listed_attributes(model: torch.nn.Module, per_batch: Sequence[TensorPlace]) -> Iterator[list[str]]:
    """List the plain tensor attributes of the model's modules that change within the context.

    Unlike buffers they can't be refused: many a module sets one and reads it within the same forward.

    Args:
        model: a stage's.
        per_batch: what may change, since each batch has its own.

    Yields:
        Filled when the context ends, with a name and the class of its module for each.
    """
    ignored = {(place.module, place.name) for place in per_batch}
    found: list[str] = []
    before = {key: (name, tensor.detach().clone()) for key, name, tensor in _attributes(model) if key not in ignored}
    yield found
    found.extend(
        f"{name} (of a {type(key[0]).__name__})"
        for key, name, tensor in _attributes(model)
        if key not in ignored and not _same(before.get(key), tensor)
    )


def _attributes(model: torch.nn.Module) -> Iterator[tuple[tuple[torch.nn.Module, str], str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                yield (module, name), f"{prefix}.{name}" if prefix else name, value


def _buffers(model: torch.nn.Module) -> Iterator[tuple[tuple[torch.nn.Module, str], str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            yield (module, name), f"{prefix}.{name}" if prefix else name, buffer


def _same(before: tuple[str, torch.Tensor] | None, after: torch.Tensor) -> bool:
    return before is not None and before[1].shape == after.shape and bool(torch.equal(before[1], after))
