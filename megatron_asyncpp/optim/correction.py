"""What every correction of an optimizer for the delay has in common: step hooks, and one kept tensor a parameter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from megatron_asyncpp.optim.streaming import stream


class Correction(ABC):
    """Corrects every step of one optimizer, through its step hooks.

    What a correction must know of the step before is kept in ``optimizer.state[p][STATE_KEY]``, of the shape of p, so
    it is saved and loaded with the rest of the optimizer's state. The hooks sit on the optimizer that steps the tensors
    themselves, so a gradient that they see is clipped already, and in bf16 training the tensors are the fp32 masters.

    Attributes:
        correcting: while False, steps are tracked and not corrected: for a part of a run that has no delay.
    """

    STATE_KEY: ClassVar[str]

    def __init__(self, optimizer: torch.optim.Optimizer, dtype: torch.dtype | None = None) -> None:
        """Attach to an optimizer.

        Args:
            optimizer: steps the tensors of its ``param_groups`` that have a ``.grad``, in place.
            dtype: of what is kept from step to step; None is that of each parameter.
        """
        self.correcting = True
        self._optimizer = optimizer
        self._dtype = dtype
        self._depth = 0  # an optimizer's step may call another hooked step on itself; only the outermost counts
        if hasattr(optimizer, "name_to_dtype_map"):
            # Transformer Engine's FusedAdam looks every state key up here when its state is saved or loaded.
            optimizer.name_to_dtype_map[self.STATE_KEY] = dtype or torch.float32
        self._restore_dtype(optimizer)  # the optimizer may have been loaded already
        self._unstream = stream(optimizer)
        self._hooks = [
            optimizer.register_step_pre_hook(self._on_step),
            optimizer.register_step_post_hook(self._on_step_end),
            optimizer.register_load_state_dict_post_hook(self._restore_dtype),
        ]

    @property
    def kept_bytes(self) -> int:
        """The memory that it takes on this rank from step to step."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        return sum(p.numel() * (self._dtype or p.dtype).itemsize for p in parameters)

    def detach(self) -> None:
        """Leave the optimizer as it was; its state keeps what was kept last."""
        self._unstream()
        for hook in self._hooks:
            hook.remove()

    @abstractmethod
    def _before_step(self, stepped: list[torch.Tensor]) -> None:
        """Before the optimizer's step, or a part of it.

        Args:
            stepped: the parameters that have a gradient.
        """

    @abstractmethod
    def _after_step(self) -> None:
        """After the optimizer's step, or the same part of it.

        A state key may be made only here: an optimizer takes an empty state for its own signal to initialise it.
        """

    def _kept(self, p: torch.Tensor) -> torch.Tensor | None:
        """What the step before left for this parameter; None if there was none."""
        kept: torch.Tensor | None = self._optimizer.state.get(p, {}).get(self.STATE_KEY)
        return kept

    def _keep(self, p: torch.Tensor, value: torch.Tensor) -> None:
        """Leave this for the next step. The value is taken over, not copied, unless its dtype has to change."""
        self._optimizer.state[p][self.STATE_KEY] = value.to(self._dtype or p.dtype)

    @torch.no_grad()
    def _on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._depth == 0:
            self._before_step([p for group in optimizer.param_groups for p in group["params"] if p.grad is not None])
        self._depth += 1

    @torch.no_grad()
    def _on_step_end(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._after_step()

    def _restore_dtype(self, optimizer: torch.optim.Optimizer) -> None:
        """Torch's ``load_state_dict`` makes every floating state a tensor of the parameter's dtype."""
        for p, state in optimizer.state.items():
            if self.STATE_KEY in state:
                self._keep(p, state[self.STATE_KEY])
