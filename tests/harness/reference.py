"""What the two references (oracle and fixture) compute: which weights each batch runs on, and what corrects that."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Reference:
    """The semantics of DESIGN.md as numbers.

    Attributes:
        delay: updates that a batch's weights lag behind; 0 is synchronous, 1 is PipeDream-2BW.
        error_feedback: lam of Error Feedback; None leaves it out altogether.
        feedback_on: whether Error Feedback corrects the "update", or the "gradient" that the optimizer steps with.
        feedback_dtype: in which precision the last update (or gradient) is remembered.
        delay_compensation: lam of DC-ASGD; None leaves it out altogether.
        sync_start: the first N batches run on the newest weights.
        sync_cooldown: the last N batches do.
        skipped: batches whose update is skipped (oracle only): V(k+1) = V(k), and nothing else moves either.
        norm_partition: parameter names of each pipeline stage, for the oracle without a delay: Megatron sums the
            squares of the gradient norm within each stage first, and only the same order of additions gives the same
            bits. None is one stage.
        replicas: for the oracle, which computes all of them: the data-parallel replicas, to which microbatches go in
            turn. Each sums its own gradients, and what is stepped with is their mean.
        tied_apart: for the oracle, with tied embeddings: first and last stage differ, so the gradient of each of the
            weight's two uses is summed over a batch before the two are added.
    """

    delay: int = 0
    error_feedback: float | None = None
    feedback_on: str = "update"
    feedback_dtype: torch.dtype = torch.float32
    delay_compensation: float | None = None
    sync_start: int = 0
    sync_cooldown: int = 0
    skipped: frozenset[int] = frozenset()
    norm_partition: tuple[tuple[str, ...], ...] | None = None
    replicas: int = 1
    tied_apart: bool = False

    @property
    def exact_norm(self) -> bool:
        """Whether the norm's squares are summed in fp64, as by the plugin's step in two halves, or as Megatron does.

        In fp64 neither their order nor how they are sharded shows.
        """
        return self.delay > 0

    def synchronous(self, k: int, batches: int) -> bool:
        """Whether batch k of `batches` belongs to the synchronous start or cooldown (or there is no delay at all)."""
        return self.delay == 0 or k < self.sync_start or k >= batches - self.sync_cooldown

    def version(self, k: int, batches: int) -> int:
        """The j of W(k) = V(j)."""
        return k if self.synchronous(k, batches) else max(self.sync_start, k - self.delay)

    def correction(self, k: int, batches: int) -> float | None:
        """lam for the update of batch k, or None where u_k is tracked but not corrected."""
        return None if self.synchronous(k, batches) else self.error_feedback
