"""Error Feedback on the whole update of any torch optimizer (arXiv:2606.30634).

    x -= u + lam * (u - u_prev)

u is all that the optimizer's step does to x, learning rate and decoupled weight decay included. The correction
extrapolates the weights by one update, which is where a gradient that is one step old should have been taken.
"""

from __future__ import annotations

from typing import Any

import torch

STATE_KEY = "previous_update"


class ErrorFeedback:
    """Corrects every step of one optimizer, through its step hooks.

    u_prev is kept in ``optimizer.state[p]["previous_update"]``, of the shape and dtype of p, so it is saved and
    loaded with the rest of the optimizer's state. During a step a copy of each stepped parameter is held as well.
    With ``lam = 0`` the weights are bitwise those of the optimizer alone.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, lam: float) -> None:
        """Attach to an optimizer.

        Args:
            optimizer: steps the tensors of its ``param_groups`` that have a ``.grad``, in place.
            lam: the strength of the correction; 1 is the paper's.
        """
        self._optimizer = optimizer
        self._lam = lam
        self._depth = 0  # an optimizer's step may call another hooked step on itself; only the outermost is u
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def detach(self) -> None:
        """Leave the optimizer as it was; its state keeps the last update."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._depth == 0:
            stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self._before = [(p, p.detach().clone()) for p in stepped]
        self._depth += 1

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        for p, before in self._before:
            update = before.sub_(p)
            # The key is made only now: an optimizer takes an empty state for its own signal to initialise it.
            state = optimizer.state[p]
            change = update - state[STATE_KEY] if STATE_KEY in state else update
            p.sub_(self._lam * change)
            state[STATE_KEY] = update
        self._before = []
