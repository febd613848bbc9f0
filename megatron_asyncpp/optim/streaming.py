"""An optimizer's step in several parts, so that what a correction holds for the time of a step stays small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from emerging_optimizers.orthogonalized_optimizers import OrthogonalizedOptimizer

# Elements of one part: a copy of it in fp32 takes 64 MiB. Larger ones would gain nothing, and each takes some launches.
PART = 2**24

# Their state is each parameter's own, with its own count of steps. Fused optimizers count the steps of a whole group.
_SEPARABLE = (torch.optim.Adam, torch.optim.SGD, OrthogonalizedOptimizer)


def stream(optimizer: torch.optim.Optimizer, part: int = PART) -> Callable[[], None]:
    """Let ``optimizer.step`` step some parameters after the others, if that changes nothing.

    Step hooks then run once for each part, and see the gradients of that part only.

    Args:
        optimizer: left as it is unless its parameters are known to be independent of each other.
        part: so many elements are stepped at once, or one parameter if that has more.

    Returns:
        Undoes it.
    """
    if not isinstance(optimizer, _SEPARABLE):
        return lambda: None
    step: Callable[..., Any] = optimizer.step

    def step_in_parts() -> None:
        gradients = [(p, p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for p, _ in gradients:
            p.grad = None
        for some in _parts(gradients, part):
            for p, gradient in some:
                p.grad = gradient
            step()
            for p, _ in some:
                p.grad = None
        for p, gradient in gradients:
            p.grad = gradient

    vars(optimizer)["step"] = step_in_parts

    def undo() -> None:
        del optimizer.step

    return undo


def _parts(gradients: list[tuple[Any, Any]], part: int) -> Iterator[list[tuple[Any, Any]]]:
    some: list[tuple[Any, Any]] = []
    for p, gradient in gradients:
        if some and sum(q.numel() for q, _ in some) + p.numel() > part:
            yield some
            some = []
        some.append((p, gradient))
    if some:
        yield some
