"""Hooks that put a wait for all stages back into a run, and record what the run then does."""

from __future__ import annotations

from typing import Any

from tests.harness import collectives
from tests.harness.results import RankResult


def record_of(target: str, result: RankResult) -> None:
    """Undo one of the plugin's patch records."""
    from megatron_asyncpp.integration import patching
    from megatron_asyncpp.integration.waits import WAITS

    (patch,) = (patch for patch in WAITS if patch.target == target)
    assert patching.is_applied(patch)
    patching.undo([patch])
    collectives.record(result)


def embedding_sum(result: RankResult) -> None:
    """Let Megatron's finalize_model_grads sum a tied embedding's gradient."""
    from megatron_asyncpp.runtime.step import TwoHalfStep

    TwoHalfStep.sums_tied_embedding = property(lambda self: False)  # type: ignore[assignment]
    collectives.record(result)


def gradient_norm(result: RankResult) -> None:
    """Let Megatron's optimizers compute their gradient norm when a step begins."""
    from megatron_asyncpp.runtime import step

    gradients_of = step.gradients_of

    def with_norm(leaves: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = gradients_of(leaves, *args, **kwargs)
        for leaf in leaves:
            leaf.get_grad_norm()
        return gradients

    step.gradients_of = with_norm
    collectives.record(result)


def wait_in_begin(result: RankResult) -> None:
    """Wait for the sums as soon as they are asked for."""
    from megatron_asyncpp.runtime.agreement import Agreement

    Agreement.poll = lambda self: self.wait()  # type: ignore[assignment, return-value]
    collectives.record(result)
