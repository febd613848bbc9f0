"""The weight versions of one stage, each in a buffer of its own.

A version is written once, and no storage that a pending backward has seen is ever overwritten. V(k) lives in slot
``k mod versions``; with two slots, the step that makes V(k+1) writes where V(k-1) was, which is free by then. Nothing
is copied to switch between versions: tensors are pointed at another slot.

Two kinds of pointers are switched at different times. What the model's modules read (``param.data``) is switched per
microbatch. Whatever else Megatron keeps that points into the weights (see ``pointers``) always follows the newest
version, so its all-gather, copies and checkpoints need not know that there are others.

Why not one live buffer and a saved copy of the older version: an operation that saves a *view* of a weight for its
backward (``F.linear``, ``nn.Linear``, a rearranged weight) keeps the storage it saw. If that storage is overwritten
by a step, the backward computes a wrong gradient, without any error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from megatron_asyncpp.runtime.pointers import Pointer


@dataclass(frozen=True)
class _Slot:
    """One version's storage: what ``param.data`` and each pointer become to show it."""

    parameters: list[torch.Tensor]
    pointers: list[torch.Tensor | None]


class WeightRing:
    """Versions V(newest - versions + 1) to V(newest) of a stage's trainable parameters.

    Attributes:
        newest: the index of the newest version.
        lent: the index of the version that ``param.data`` shows now.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        steppable: Iterable[torch.Tensor],
        versions: int,
        newest: int,
        pointers: Sequence[Pointer] = (),
    ) -> None:
        """Take the parameters as they are for V(newest).

        Args:
            parameters: the stage's parameters; those that need no gradient are shared by all versions.
            steppable: the tensors that the inner optimizers step in place. Where one lies in a version's storage
                (fp32 training), its newest value is copied into the new version before the step.
            versions: the number of slots. One means that a step overwrites the only version.
            newest: the index of the version that the parameters hold now.
            pointers: what else points into the parameters' storage, and follows the newest version.
        """
        self.parameters = tuple(p for p in parameters if p.requires_grad)
        self._pointers = tuple(pointers)
        self._slots: list[_Slot | None] = [None] * versions
        self._held: dict[int, int] = {}  # slot -> the version in it
        # address of a storage -> its slot, and (start, end, parameter) of the addresses in it
        self._places: dict[int, tuple[int, list[tuple[int, int, torch.nn.Parameter]]]] = {}
        self.newest = newest
        self.lent = newest
        first = _Slot([p.data for p in self.parameters], [pointer.get() for pointer in self._pointers])
        storages = {tensor.untyped_storage().data_ptr() for tensor in first.parameters}
        self._in_place = tuple(t for t in steppable if t.untyped_storage().data_ptr() in storages)
        self._fill(newest % versions, first)
        self._held[newest % versions] = newest

    @property
    def versions(self) -> int:
        """The number of slots."""
        return len(self._slots)

    @property
    def extra_bytes(self) -> int:
        """Bytes that all slots but one take once they exist."""
        slot = next(slot for slot in self._slots if slot is not None)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in slot.parameters}
        return (len(self._slots) - 1) * sum(storages.values())

    def lend(self, version: int) -> None:
        """Let the model's modules read V(version).

        Raises:
            RuntimeError: the ring doesn't hold that version (any more): the plan is wrong.
        """
        if version == self.lent:
            return
        if not self.holds(version):
            raise RuntimeError(f"weights V({version}) were asked for, but the ring holds {sorted(self._held.values())}")
        for parameter, data in zip(self.parameters, self._slot(version).parameters, strict=True):
            parameter.data = data
        self.lent = version

    def holds(self, version: int) -> bool:
        """Whether V(version) is in the ring."""
        return self._held.get(version % len(self._slots)) == version

    def find(self, tensor: torch.Tensor) -> tuple[torch.nn.Parameter, int] | None:
        """The parameter and version whose buffer a tensor begins in now, or None if it begins in none."""
        place = self._places.get(tensor.untyped_storage().data_ptr())
        if place is None:
            return None
        slot, parameters = place
        address = tensor.data_ptr()
        for start, end, parameter in parameters:
            if start <= address < end:
                return parameter, self._held[slot]
        return None

    @contextmanager
    def advance(self) -> Iterator[None]:
        """Within the context ``param.data`` and all pointers show V(newest + 1), to be written; then it is the newest.

        The version counters of the parameters don't change: autograd would take a step for an overwritten weight,
        but the buffer being written is one that no pending backward has seen.
        """
        self.lend(self.newest)
        version = self.newest + 1
        before = [tensor.data for tensor in self._in_place]
        with torch.no_grad(), _unsafe_preserve_version_counter(self.parameters):
            self._open(version)
            if len(self._slots) > 1:
                for tensor, newest in zip(self._in_place, before, strict=True):
                    tensor.data.copy_(newest)
            yield
        self.newest = version

    def _open(self, version: int) -> None:
        index = version % len(self._slots)
        if self._slots[index] is None:
            self._fill(index, self._twin(self._slot(self.newest)))
        self._held[index] = version
        self.lend(version)
        for pointer, data in zip(self._pointers, self._slot(version).pointers, strict=True):
            pointer.set(data)

    def _slot(self, version: int) -> _Slot:
        slot = self._slots[version % len(self._slots)]
        assert slot is not None
        return slot

    def _fill(self, index: int, slot: _Slot) -> None:
        self._slots[index] = slot
        for parameter, data in zip(self.parameters, slot.parameters, strict=True):
            storage = data.untyped_storage().data_ptr()
            _, parameters = self._places.setdefault(storage, (index, []))
            parameters.append((data.data_ptr(), data.data_ptr() + data.numel() * data.element_size(), parameter))

    @staticmethod
    def _twin(slot: _Slot) -> _Slot:
        """The same tensors in storages of their own, which hold zeros: the padding of a buffer is gathered too."""
        storages: dict[int, torch.UntypedStorage] = {}

        def twin(tensor: torch.Tensor) -> torch.Tensor:
            old = tensor.untyped_storage()
            if old.data_ptr() not in storages:
                zeros = torch.zeros(old.nbytes(), dtype=torch.uint8, device=tensor.device)
                storages[old.data_ptr()] = zeros.untyped_storage()
            new = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            return new.set_(storages[old.data_ptr()], tensor.storage_offset(), tensor.size(), tensor.stride())

        return _Slot([twin(t) for t in slot.parameters], [None if t is None else twin(t) for t in slot.pointers])
