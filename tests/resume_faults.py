"""Hooks of the harness that make a run continue wrongly from a checkpoint."""

from __future__ import annotations


def forget_the_stale_weights() -> None:
    """Continue from a checkpoint as if it had no stale weights."""
    from megatron_asyncpp.integration import checkpoint

    checkpoint.loaded = lambda: None


def take_the_newest_for_stale() -> None:
    """Continue with the newest weights in place of the checkpoint's stale ones."""
    from megatron_asyncpp.integration import checkpoint

    checkpoint.stale_weights = lambda model: {name: p.detach().clone() for name, p in model.named_parameters()}


def save_the_generators_as_they_are() -> None:
    """Save the random number generators' states after the next batch's lead forwards."""
    from megatron_asyncpp.integration import checkpoint

    checkpoint.random_states = lambda: None  # type: ignore[assignment, return-value]


def forget_the_correction() -> None:
    """Continue with Error Feedback started at zero."""
    from megatron_asyncpp.integration import checkpoint

    checkpoint.restored_keys = lambda config: ()
