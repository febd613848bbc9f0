"""Error Feedback on the whole update of any torch optimizer, or as an ablation on its gradient (arXiv:2606.30634).

    x -= u + lam * (u - u_prev)      on the update
    g <- g + lam * (g - g_prev)      on the gradient

u is all that the optimizer's step does to x, learning rate and decoupled weight decay included. The correction
extrapolates the weights by one update, which is where a gradient that is one step old should have been taken. On the
gradient it isn't that extrapolation, unless the optimizer is plain SGD of a constant learning rate without decay.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from megatron_asyncpp.optim.correction import Correction


class ErrorFeedback(Correction):
    """Error Feedback on the update: the method.

    u_prev is kept in ``optimizer.state[p]["previous_update"]``, and is zero before the first step. During a step a copy
    of each stepped parameter is held as well, of a few at a time if the optimizer allows. The correction is computed
    from the exact u; only the u_prev that is kept is rounded to ``dtype``. With ``lam = 0`` the weights are bitwise
    those of the optimizer alone.

    While ``correcting`` is False u is tracked, so that the first corrected step after it knows the update before.
    """

    STATE_KEY: ClassVar[str] = "previous_update"

    def __init__(self, optimizer: torch.optim.Optimizer, lam: float, dtype: torch.dtype | None = None) -> None:
        """Attach to an optimizer.

        Args:
            optimizer: steps the tensors of its ``param_groups`` that have a ``.grad``, in place.
            lam: the strength of the correction; 1 is the paper's.
            dtype: of the u_prev that is kept; None is that of each parameter.
        """
        super().__init__(optimizer, dtype)
        self._lam = lam
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _before_step(self, stepped: list[torch.Tensor]) -> None:
        self._before = [(p, p.detach().clone()) for p in stepped]

    def _after_step(self) -> None:
        for p, before in self._before:
            update = before.sub_(p)
            if self.correcting:
                p.sub_(self._change(p, update))
            self._keep(p, update)
        self._before = []

    def _change(self, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """Lam * (u - u_prev), in the memory of u_prev if it can hold that, since u takes its place."""
        previous = self._kept(p)
        if previous is None:
            return self._lam * update
        out = previous if previous.dtype == update.dtype else None
        return torch.sub(update, previous, out=out).mul_(self._lam)


class GradientErrorFeedback(Correction):
    """Error Feedback on the gradient: the paper's ablation.

    g is the gradient that the optimizer would step with, after clipping; the corrected one isn't clipped again. g_prev
    is the one before, uncorrected; it is kept in ``optimizer.state[p]["previous_gradient"]``, and is zero before the
    first step. ``.grad`` is the corrected gradient during the step, and the caller's again after it.

    While ``correcting`` is False g is tracked, so that the first corrected step after it knows the gradient before.
    """

    STATE_KEY: ClassVar[str] = "previous_gradient"

    def __init__(self, optimizer: torch.optim.Optimizer, lam: float, dtype: torch.dtype | None = None) -> None:
        """Attach to an optimizer.

        Args:
            optimizer: steps the tensors of its ``param_groups`` that have a ``.grad``.
            lam: the strength of the correction.
            dtype: of the g_prev that is kept; None is that of each parameter.
        """
        super().__init__(optimizer, dtype)
        self._lam = lam
        self._exact: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _before_step(self, stepped: list[torch.Tensor]) -> None:
        for p in stepped:
            assert p.grad is not None
            gradient = p.grad
            self._exact.append((p, gradient))
            if self.correcting:
                previous = self._kept(p)
                change = gradient.clone() if previous is None else gradient - previous
                p.grad = change.mul_(self._lam).add_(gradient)

    def _after_step(self) -> None:
        for p, gradient in self._exact:
            p.grad = gradient
            # A copy: the caller may accumulate the next gradient in the same buffer.
            self._keep(p, gradient.clone())
        self._exact = []
