"""Counts the bytes of all tensors that live in a process, exactly and at every moment, on any device.

A dispatch mode sees every tensor that an operation makes, forward and backward, and a weak reference to each storage
tells when the last tensor on it is gone. So what is counted is what a program holds: views and aliases count once, and
what a kernel uses inside of itself, which differs between devices, doesn't count. A caching allocator rounds up.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KEPT, ACTIVATIONS, COLLECTIVES = "kept", "activations", "collectives"  # the kinds of bytes


class LiveBytes(TorchDispatchMode):
    """Within the context, ``live[kind]`` are the bytes of what was made in it and still lives.

    Storages made within ``making(kind)`` are of that kind for as long as they live, all others are KEPT.

    Attributes:
        live: by kind.
        most: (phase, kind) -> the most that lived at any moment of that phase; kind "all" is KEPT and ACTIVATIONS.
        storages: key of each live storage -> (kind, bytes).
    """

    def __init__(self, phase: str) -> None:
        """Count nothing yet.

        Args:
            phase: the name of all that isn't within ``during``.
        """
        super().__init__()
        self.live: Counter[str] = Counter()
        self.most: Counter[tuple[str, str]] = Counter()
        self.storages: dict[int, tuple[str, int]] = {}
        self._kind = KEPT
        self._phase = phase
        self._lock = threading.RLock()  # the last owner of a storage may be a thread that sends it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count what it made."""
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                self._count(tensor.untyped_storage())
        return made

    @contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """Within the context storages of this kind are made."""
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Within the context the most that lives is that of this phase, and not of the one around it."""
        before, self._phase = self._phase, phase
        self._note()
        try:
            yield
        finally:
            self._phase = before
            self._note()

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            kind, known = self.storages.get(key, (self._kind, 0))
            if key not in self.storages:
                weakref.finalize(storage, self._forget, key).atexit = False
            self.storages[key] = (kind, size)
            self.live[kind] += size - known  # a storage may have been resized
            self._note()

    def _forget(self, key: int) -> None:
        with self._lock:
            kind, size = self.storages.pop(key)
            self.live[kind] -= size

    def _note(self) -> None:
        sums = {**self.live, "all": self.live[KEPT] + self.live[ACTIVATIONS]}
        for kind, size in sums.items():
            self.most[self._phase, kind] = max(self.most[self._phase, kind], size)
