"""The weight versions of one stage, each in a buffer of its own.

A version is written once, and no storage that a pending backward has seen is ever overwritten. V(k) lives in slot
``k mod versions``; with two slots, the step that makes V(k+1) writes where V(k-1) was, which is free by then. Nothing
is copied to switch between versions: ``param.data`` is pointed at another slot.

Why not one live buffer and a saved copy of the older version: an operation that saves a *view* of a weight for its
backward (``F.linear``, ``nn.Linear``, a rearranged weight) keeps the storage it saw. If that storage is overwritten
by a step, the backward computes a wrong gradient, without any error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


class WeightRing:
    """Versions V(newest - versions + 1) to V(newest) of a stage's trainable parameters.

    Attributes:
        newest: the index of the newest version.
        lent: the index of the version that ``param.data`` shows now.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], steppable: Iterable[torch.Tensor], versions: int, newest: int
    ) -> None:
        """Take the parameters as they are for V(newest).

        Args:
            parameters: the stage's parameters; those that need no gradient are shared by all versions.
            steppable: the tensors that the inner optimizers step in place. Where one is itself a parameter
                (fp32 training), its newest value is copied into a version's buffer before the step.
            versions: the number of slots. One means that a step overwrites the only version.
            newest: the index of the version that the parameters hold now.
        """
        self.parameters = tuple(p for p in parameters if p.requires_grad)
        ids = {id(tensor) for tensor in steppable}
        self._in_place = tuple(i for i, p in enumerate(self.parameters) if id(p) in ids)
        self._slots: list[list[torch.Tensor] | None] = [None] * versions
        self._held: dict[int, int] = {}  # slot -> the version in it
        self._places: dict[int, tuple[torch.nn.Parameter, int]] = {}  # address of a storage -> whose it is, its slot
        self.newest = newest
        self.lent = newest
        self._fill(newest % versions, [p.data for p in self.parameters])
        self._held[newest % versions] = newest

    @property
    def extra_bytes(self) -> int:
        """Bytes that all slots but one take once they exist."""
        return (len(self._slots) - 1) * sum(p.numel() * p.element_size() for p in self.parameters)

    def lend(self, version: int) -> None:
        """Let the model's modules read V(version).

        Raises:
            RuntimeError: the ring doesn't hold that version (any more): the plan is wrong.
        """
        if version == self.lent:
            return
        if not self.holds(version):
            raise RuntimeError(f"weights V({version}) were asked for, but the ring holds {sorted(self._held.values())}")
        self._point_at(version)

    def holds(self, version: int) -> bool:
        """Whether V(version) is in the ring."""
        return self._held.get(version % len(self._slots)) == version

    def find(self, tensor: torch.Tensor) -> tuple[torch.nn.Parameter, int] | None:
        """The parameter and version whose buffer a tensor lies in now, or None if it lies in none."""
        place = self._places.get(tensor.untyped_storage().data_ptr())
        return None if place is None else (place[0], self._held[place[1]])

    @contextmanager
    def advance(self) -> Iterator[None]:
        """Within the context an optimizer writes V(newest + 1) through ``param.data``; afterwards it is the newest.

        The version counters of the parameters don't change: autograd would take a step for an overwritten weight,
        but the buffer being written is one that no pending backward has seen.
        """
        self.lend(self.newest)
        version = self.newest + 1
        before = [p.data for p in self.parameters]
        with torch.no_grad(), _unsafe_preserve_version_counter(self.parameters):
            self._open(version)
            if len(self._slots) > 1:
                for i in self._in_place:
                    self.parameters[i].data.copy_(before[i])
            yield
        self.newest = version

    def _open(self, version: int) -> None:
        slot = version % len(self._slots)
        if self._slots[slot] is None:
            self._fill(slot, [torch.empty_like(p.data) for p in self.parameters])
        self._held[slot] = version
        self._point_at(version)

    def _fill(self, slot: int, tensors: list[torch.Tensor]) -> None:
        self._slots[slot] = tensors
        for parameter, data in zip(self.parameters, tensors, strict=True):
            self._places[data.untyped_storage().data_ptr()] = (parameter, slot)

    def _point_at(self, version: int) -> None:
        slot = self._slots[version % len(self._slots)]
        assert slot is not None
        for parameter, data in zip(self.parameters, slot, strict=True):
            parameter.data = data
        self.lent = version
