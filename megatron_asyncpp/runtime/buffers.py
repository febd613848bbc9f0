"""Finds what a forward changes besides accumulating gradients: state that would be of two batches at once.

Under a delay forwards of the next batch run before the end of a batch, so what they leave in a module is ahead of the
weights: an evaluation or a checkpoint between two calls would see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def unchanged_buffers(model: torch.nn.Module) -> Iterator[None]:
    """Compare the model's registered buffers before and after the context.

    Raises:
        RuntimeError: one of them changed.
    """
    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    yield
    changed = [name for name, buffer in model.named_buffers() if not _same(before.get(name), buffer)]
    if changed:
        raise RuntimeError(
            f"a forward changes the buffer {changed[0]} of the model, which an asynchronous schedule would leave in "
            f"the state of another batch than the weights: train this model without --asyncpp-schedule 2bw"
        )


def _same(before: torch.Tensor | None, after: torch.Tensor) -> bool:
    return before is not None and before.shape == after.shape and bool(torch.equal(before, after))
