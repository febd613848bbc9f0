"""The optimizer step of a stage in two halves, so that nobody need assume that it is over when a call returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_asyncpp.optim.correction import Correction
from megatron_asyncpp.runtime.weights import WeightRing


@dataclass(frozen=True)
class Outcome:
    """What Megatron's step returned for one batch: its gradient norm (None if not computed) and count of zeros."""

    batch: int
    grad_norm: float | None
    zeros_in_grad: float | None


class TwoHalfStep:
    """begin(k), when batch k's gradients are final on this stage, and finish(k), which makes V(k+1).

    In every schedule that exists so far finish(k) directly follows begin(k), so the gradients stay where they are
    in between, and the step is Megatron's own, with its clipping and its norm.

    Attributes:
        outcome: of the last finished step.
    """

    def __init__(
        self,
        ring: WeightRing,
        optimizer_step: Callable[[], tuple[bool, Any, Any]],
        scheduler_step: Callable[[int], None],
        corrections: Sequence[Correction] = (),
    ) -> None:
        """Wire the step up.

        Args:
            ring: where the new version is written.
            optimizer_step: Megatron's own ``optimizer.step``.
            scheduler_step: Megatron's own ``opt_param_scheduler.step``, which takes a number of samples. It runs in
                finish, so learning rate and weight decay are those of batch k when u_k is made.
            corrections: of the inner optimizers; they correct the steps of delayed batches, and track those of others.
        """
        self._ring = ring
        self._optimizer_step = optimizer_step
        self._scheduler_step = scheduler_step
        self._corrections = corrections
        self._pending: tuple[int, int] | None = None  # (batch, samples)
        self.outcome: Outcome | None = None

    def begin(self, batch: int, samples: int) -> None:
        """Take note of a batch of so many samples (over all data-parallel ranks) whose gradients are final."""
        if self._pending is not None:
            raise RuntimeError(f"begin({batch}) before finish({self._pending[0]}): the plan is wrong")
        self._pending = (batch, samples)

    def finish(self, batch: int, delayed: bool) -> None:
        """Make V(batch + 1) and advance the learning-rate schedule.

        Args:
            batch: k.
            delayed: whether Error Feedback or another correction, if there is any, corrects this step.
        """
        if self._pending is None or self._pending[0] != batch:
            raise RuntimeError(f"finish({batch}) without begin({batch}): the plan is wrong")
        samples = self._pending[1]
        self._pending = None
        for correction in self._corrections:
            correction.correcting = delayed
        with self._ring.advance():
            successful, grad_norm, zeros_in_grad = self._optimizer_step()
        if not successful:
            # Of what skips an update, loss scaling is refused at start-up, and a norm threshold has no flag.
            raise RuntimeError(f"the optimizer skipped the update of batch {batch}, which is not supported")
        self._scheduler_step(samples)
        self.outcome = Outcome(batch, grad_norm, zeros_in_grad)
