"""The leaves of Megatron's optimizer tree."""

from __future__ import annotations

from typing import Any

import torch


def leaves(optimizer: Any) -> list[Any]:
    """The Megatron optimizers that step parameters themselves, in order.

    ``get_megatron_optimizer`` returns chains of chains; a leaf holds one inner torch optimizer. A rank without
    trainable parameters has stub leaves, which are left out.
    """
    if hasattr(optimizer, "chained_optimizers"):
        return [leaf for chained in optimizer.chained_optimizers for leaf in leaves(chained)]
    return [] if optimizer.is_stub_optimizer else [optimizer]


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside the leaves: what makes u_k from a gradient."""
    return [leaf.optimizer for leaf in leaves(optimizer)]
