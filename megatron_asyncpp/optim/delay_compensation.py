"""DC-ASGD: a gradient of older weights, brought to the newest by a first-order term (arXiv:1609.08326).

    g <- g + lam * g * g * (x_t - x_read)

x_t are the weights that the step starts from, x_read those that the gradient was taken at, and g * g stands for the
diagonal of the Hessian. lam is constant (DC-ASGD-c of the paper).
"""

from __future__ import annotations

from typing import ClassVar

import torch

from megatron_asyncpp.optim.correction import Correction


class DelayCompensation(Correction):
    """DC-ASGD for a delay of one step, in which x_t - x_read is all that the last step did to x.

    That difference is kept in ``optimizer.state[p]["last_change"]``, in the dtype of p. g is the gradient that the
    optimizer would step with, after clipping; the compensated one isn't clipped again. ``.grad`` is the compensated
    gradient during the step, and the caller's again after it. With ``lam = 0`` the weights are bitwise those of the
    optimizer alone.

    A step with ``correcting`` False leaves a difference of zero: the next gradient is taken at the weights that it
    makes, be it of a synchronous part or the first of a delayed one. So is a run's first.
    """

    STATE_KEY: ClassVar[str] = "last_change"

    def __init__(self, optimizer: torch.optim.Optimizer, lam: float) -> None:
        """Attach to an optimizer.

        Args:
            optimizer: steps the tensors of its ``param_groups`` that have a ``.grad``, in place.
            lam: the strength of the compensation.
        """
        super().__init__(optimizer)
        self._lam = lam
        self._before: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def _before_step(self, stepped: list[torch.Tensor]) -> None:
        for p in stepped:
            assert p.grad is not None
            gradient, change = p.grad, self._kept(p)
            self._before.append((p, p.detach().clone(), gradient))
            if self.correcting and change is not None:
                p.grad = (self._lam * gradient).mul_(gradient).mul_(change).add_(gradient)  # without more temporaries

    def _after_step(self) -> None:
        for p, before, gradient in self._before:
            p.grad = gradient
            self._keep(p, before.neg_().add_(p) if self.correcting else before.zero_())
        self._before = []
