"""What belongs to a batch besides its gradients: whatever forwards and backwards gather until the batch ends.

Under a delay a stage runs forwards of batch k+1 before batch k ends, and an evaluation in between. So each batch has a
set of its own, which is put where the model looks for it before every forward and backward (a recomputed forward runs
in the backward), and another set, which holds nothing, is there between two calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, override

import torch


class Place(Protocol):
    """Where the model looks for some state of a batch."""

    def get(self) -> Any:
        """What is there now."""

    def put(self, content: Any) -> None:
        """Put something else there."""

    def empty(self, content: Any) -> Any:
        """Something like the content that holds nothing."""

    def copy(self, content: Any) -> Any:
        """A copy of the content."""

    def clear(self, content: Any) -> None:
        """Let the content hold nothing."""


@dataclass(frozen=True)
class TensorPlace(Place):
    """A module's buffer or other tensor attribute. The tensor object itself is exchanged, so who assigns it may."""

    module: torch.nn.Module
    name: str

    @override
    def get(self) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self.module, self.name)
        return tensor

    @override
    def put(self, content: torch.Tensor) -> None:
        setattr(self.module, self.name, content)

    @override
    def empty(self, content: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(content)  # of the same precision, in which Megatron rounds as well

    @override
    def copy(self, content: torch.Tensor) -> torch.Tensor:
        return content.clone()

    @override
    def clear(self, content: torch.Tensor) -> None:
        content.zero_()


class BatchState:
    """The sets of a stage's batches that are under way.

    Attributes:
        updating: whether ``update`` is running.
    """

    def __init__(self, places: Sequence[Place] = (), updates: Sequence[Callable[[], None]] = ()) -> None:
        """Take what is in the places for the set that is there between two calls.

        Args:
            places: of the state.
            updates: what makes the next version of weights that are no parameters, from what a batch gathered.
        """
        self._places = tuple(places)
        self._updates = tuple(updates)
        self._resting = [place.get() for place in self._places]
        self._sets: dict[int, list[Any]] = {}
        self._free: list[list[Any]] = []
        self._lent: int | None = None
        self.updating = False

    def lend(self, batch: int | None) -> None:
        """Put a batch's set in place, or, for None, the one that holds nothing."""
        if batch == self._lent or not self._places:
            return
        self._set(self._lent)[:] = [place.get() for place in self._places]  # some are assigned, not changed in place
        if self._lent is None:  # an evaluation may have left something
            self._clear(self._resting)
        for place, content in zip(self._places, self._set(batch), strict=True):
            place.put(content)
        self._lent = batch

    @contextmanager
    def of(self, batch: int) -> Iterator[None]:
        """Within the context a batch's set is in place."""
        before = self._lent
        self.lend(batch)
        yield
        self.lend(before)

    @contextmanager
    def copy_of(self, batch: int) -> Iterator[None]:
        """Within the context a copy of a batch's set is in place: to see what somebody makes of it."""
        with self.of(batch):
            own = [place.get() for place in self._places]
            for place, content in zip(self._places, own, strict=True):
                place.put(place.copy(content))
            yield
            for place, content in zip(self._places, own, strict=True):
                place.put(content)

    def update(self, batch: int) -> None:
        """Make the next version of weights that are no parameters, within ``WeightRing.advance``."""
        self.updating = True
        with self.of(batch):
            for update in self._updates:
                update()
        self.updating = False

    def clear(self, batch: int) -> None:
        """The batch has ended: let its set hold nothing, for a later one."""
        if batch == self._lent:
            self.lend(None)
        if batch in self._sets:
            ended = self._sets.pop(batch)
            self._clear(ended)
            self._free.append(ended)

    def _clear(self, contents: list[Any]) -> None:
        for place, content in zip(self._places, contents, strict=True):
            place.clear(content)

    def _set(self, batch: int | None) -> list[Any]:
        if batch is None:
            return self._resting
        if batch not in self._sets:
            self._sets[batch] = self._free.pop() if self._free else self._another()
        return self._sets[batch]

    def _another(self) -> list[Any]:
        return [place.empty(content) for place, content in zip(self._places, self._resting, strict=True)]
