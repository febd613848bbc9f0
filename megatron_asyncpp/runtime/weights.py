"""The weight versions of one stage, each in a buffer of its own.

A version is written once, and no storage that a pending backward has seen is ever overwritten. With two slots, the
step that makes V(k+1) writes where V(k-1) was, which is free by then; where V(k) isn't needed any more it writes there,
and a second slot is made only once one is needed. Nothing is copied to switch between versions: tensors are pointed at
another slot.

Two kinds of pointers are switched at different times. What the model's modules read (``param.data``) is switched per
microbatch. Whatever else Megatron keeps that points into the weights (see ``pointers``) always follows the newest
version, so its all-gather, copies and checkpoints need not know that there are others.

Why not one live buffer and a saved copy of the older version: an operation that saves a *view* of a weight for its
backward (``F.linear``, ``nn.Linear``, a rearranged weight) keeps the storage it saw. If that storage is overwritten
by a step, the backward computes a wrong gradient, without any error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """The versions of a stage's trainable weights that are still needed; the newest is always one of them.

    Attributes:
        parameters: the tensors that have versions: trainable parameters, and buffers that are weights.
        newest: the index of the newest version.
        lent: the index of the version that ``param.data`` shows now.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        steppable: Iterable[torch.Tensor],
        versions: int,
        newest: int,
        pointers: Sequence[Pointer] = (),
        buffers: Sequence[torch.Tensor] = (),
    ) -> None:
        """Take the parameters as they are for V(newest).

        Args:
            parameters: the stage's parameters; those that need no gradient are shared by all versions.
            steppable: the tensors that the inner optimizers step in place. Where one lies in a version's storage
                (fp32 training), its newest value is copied into the new version before the step.
            versions: the most slots there may be. One means that a step overwrites the only version.
            newest: the index of the version that the parameters hold now.
            pointers: what else points into the parameters' storage, and follows the newest version.
            buffers: further tensors that modules read, and that a step may write in place: weights that no optimizer
                steps, as a router's expert bias. Each gets its newest value in a new version before the step.
        """
        self.parameters = (*(p for p in parameters if p.requires_grad), *buffers)
        self._buffers = tuple(buffers)
        self._pointers = tuple(pointers)
        self._most = versions
        self._slots: list[_Slot] = []
        self._held: list[int] = []  # the version in each slot
        # address of a storage -> its slot, and (start, end, parameter) of the addresses in it
        self._places: dict[int, tuple[int, list[tuple[int, int, torch.Tensor]]]] = {}
        self.newest = newest
        self.lent = newest
        first = _Slot([p.data for p in self.parameters], [pointer.get() for pointer in self._pointers])
        storages = {tensor.untyped_storage().data_ptr() for tensor in first.parameters}
        self._stepped = tuple(t for t in steppable if t.untyped_storage().data_ptr() in storages)
        self._add(first, newest)

    @property
    def versions(self) -> int:
        """The most slots there may be."""
        return self._most

    @property
    def steps_in_place(self) -> bool:
        """Whether the inner optimizers step tensors that lie in a version's storage, as in fp32 training."""
        return bool(self._stepped)

    @property
    def extra_bytes(self) -> int:
        """Bytes that all slots but one take once they exist."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self._slots[0].parameters}
        return (self._most - 1) * sum(storages.values())

    def lend(self, version: int) -> None:
        """Let the model's modules read V(version).

        Raises:
            RuntimeError: the ring doesn't hold that version (any more): the plan is wrong.
        """
        if version == self.lent:
            return
        if not self.holds(version):
            raise RuntimeError(f"weights V({version}) were asked for, but the ring holds {sorted(self._held)}")
        for parameter, data in zip(self.parameters, self._slot(version).parameters, strict=True):
            parameter.data = data
        self.lent = version

    def holds(self, version: int) -> bool:
        """Whether V(version) is in the ring."""
        return version in self._held

    def find(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int] | None:
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
    def advance(self, keep: bool = True) -> Iterator[None]:
        """Within the context ``param.data`` and all pointers show V(newest + 1), to be written; then it is the newest.

        The version counters of the parameters don't change: autograd would take a step for an overwritten weight,
        but the buffer being written is one that no pending backward has seen.

        Args:
            keep: whether V(newest) may still be needed. If not, it is overwritten in place; if so, the new version
                takes a new slot, or that of the oldest version if there may be no more.
        """
        self.lend(self.newest)
        version = self.newest + 1
        in_place = (*self._stepped, *self._buffers)
        before = [tensor.data for tensor in in_place]
        with torch.no_grad(), _unsafe_preserve_version_counter(self.parameters):
            if self._open(version, keep):
                for tensor, newest in zip(in_place, before, strict=True):
                    tensor.data.copy_(newest)
            yield
        self.newest = version

    def hold_older(self, weights: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Take V(newest - 1) as well, which a run that is continued still needs.

        Args:
            weights: its value of each of ``parameters``, on any device; copied.
        """
        slot = self._twin(self._slot(self.newest))
        for parameter, data in zip(self.parameters, slot.parameters, strict=True):
            data.copy_(weights[parameter])
        self._add(slot, self.newest - 1)

    def repeat(self, keep: bool = True) -> None:
        """Make V(newest + 1) the same as V(newest): what is left of a skipped update."""
        newest = self._slot(self.newest).parameters
        with self.advance(keep):
            for tensor, same in zip(self._slot(self.lent).parameters, newest, strict=True):
                if tensor is not same:
                    tensor.copy_(same)

    def _open(self, version: int, keep: bool) -> bool:
        """Show V(version) everywhere. Returns whether it has a slot other than the newest version's."""
        before = index = self._held.index(self.newest)
        if keep and len(self._slots) < self._most:
            index = len(self._slots)
            self._add(self._twin(self._slots[before]), version)
        elif keep:
            index = self._held.index(min(self._held))
        self._held[index] = version
        self.lent = -1  # a slot was given another version: nothing that was lent is what it was
        self.lend(version)
        for pointer, data in zip(self._pointers, self._slots[index].pointers, strict=True):
            pointer.set(data)
        return index != before

    def _slot(self, version: int) -> _Slot:
        return self._slots[self._held.index(version)]

    def _add(self, slot: _Slot, version: int) -> None:
        index = len(self._slots)
        self._slots.append(slot)
        self._held.append(version)
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
