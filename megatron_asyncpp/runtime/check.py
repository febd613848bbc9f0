"""Debug mode (``--asyncpp-check-versions``): a backward may only use the very weights that its forward used."""

from __future__ import annotations

from typing import Any

import torch

from megatron_asyncpp.runtime.weights import WeightRing


class VersionCheck:
    """Saved-tensor hooks that stamp each saved weight with its version, and compare when the backward reads it.

    Three things can go wrong, and none raises an error by itself: the parameter that autograd saved shows another
    version by then, since a saved leaf follows ``param.data``; the buffer that a saved view lies in was overwritten by
    a later version; or a module keeps a view of its weight from an earlier forward, of another version.
    """

    def __init__(self, ring: WeightRing, names: dict[torch.Tensor, str]) -> None:
        """Check the weights of a ring; ``names`` is for the messages."""
        self._ring = ring
        self._names = names

    def watch(self) -> torch.autograd.graph.saved_tensors_hooks:
        """A context for a forward."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        place = self._ring.find(tensor)
        if place is None:
            return tensor
        parameter, version = place
        if version != self._ring.lent:
            raise RuntimeError(
                f"a forward on V({self._ring.lent}) uses {self._names[parameter]} of V({version}): a module keeps an "
                f"alias of this weight from an earlier forward"
            )
        return tensor, parameter, version

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        tensor, parameter, version = packed
        place = self._ring.find(tensor)
        now = None if place is None else place[1]
        if now != version:
            saved = "the weight" if tensor is parameter else "a view of the weight"
            raise RuntimeError(
                f"a backward uses {saved} {self._names[parameter]} of V({now}), but its forward ran on V({version})"
            )
        return tensor
