"""What a module keeps besides parameters, as its author declares it: ``megatron_asyncpp.declare_state``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_ATTRIBUTE = "_asyncpp_declared_state"


@dataclass(frozen=True)
class DeclaredState:
    """What one module declared.

    Attributes:
        per_batch: names of its tensors that belong to a batch.
        per_version: names of its buffers that belong to a version of the weights.
        update: the name of its method that makes the next version, or None.
    """

    per_batch: tuple[str, ...] = ()
    per_version: tuple[str, ...] = ()
    update: str | None = None


def declare_state(
    module: Any, *, per_batch: Iterable[str] = (), per_version: Iterable[str] = (), update: str | None = None
) -> None:
    """Say what the tensors of a module are that its forward changes, or that are weights without being parameters.

    Under a delay forwards of two batches interleave, and two versions of the weights exist. Call this in the module's
    constructor, once the tensors exist. Without an asynchronous schedule it has no effect.

    Args:
        module: a ``torch.nn.Module``.
        per_batch: names of buffers, or of other tensor attributes, in which the forwards (or, with recomputation, the
            backwards) of a batch gather something. Each batch has its own, which starts with zeros; between two
            iterations, as in an evaluation, the module has one that holds zeros. Who zeroes them at the end of a batch
            may go on doing so.
        per_version: names of buffers that forwards read and don't change. Each version of the weights has its own.
        update: the name of the module's method, without arguments, that writes the ``per_version`` buffers in place
            at the end of a batch. Whoever calls it may go on doing so: in an asynchronous run that call does nothing,
            and the optimizer step makes it, with the batch's own ``per_batch`` tensors in place and the newest values
            in the buffers. A step that is skipped doesn't.

    Raises:
        ValueError: the module has no such tensor, buffer or method, or ``update`` is missing.
    """
    declared = DeclaredState(tuple(per_batch), tuple(per_version), update)
    for name in declared.per_batch:
        if not hasattr(getattr(module, name, None), "zero_"):
            raise ValueError(f"per_batch: {type(module).__name__} has no tensor {name}")
    for name in declared.per_version:
        if module._buffers.get(name) is None:
            raise ValueError(f"per_version: {type(module).__name__} has no buffer {name}")
    if declared.per_version and declared.update is None:
        raise ValueError(f"per_version: nothing is said to change {declared.per_version[0]}: give update as well")
    if declared.update is not None and not callable(getattr(module, declared.update, None)):
        raise ValueError(f"update: {type(module).__name__} has no method {declared.update}")
    setattr(module, _ATTRIBUTE, declared)


def declared_state(module: Any) -> DeclaredState:
    """What a module declared; nothing, if it didn't."""
    found: DeclaredState = getattr(module, _ATTRIBUTE, DeclaredState())
    return found
