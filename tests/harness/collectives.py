"""Records every collective of a rank, whoever calls it and however: with its group, its size and the calling lines.

The records are torch's own. Its flight recorder notes each collective in C++, where gloo takes it, with the Python
stack: functional collectives, those of objects, coalesced ones, methods of a process group or of its backend, and
functions that a module imported by value all end there, so there is nothing to wrap and nothing to forget.
What it leaves out is added here: ``monitored_barrier``, messages from rank to rank, and when a rank waits for a
collective. Each group numbers what it does, so anything that leaves no record is noticed.
"""

from __future__ import annotations

import functools
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from tests.harness.results import RankResult

CAPACITY = 100_000  # records; the flight recorder would drop the oldest beyond
ITEM_BYTES = {"Bool": 1, "Byte": 1, "Char": 1, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4, "Long": 8, "Double": 8}
SITE_PACKAGES, ROOT = Path(torch.__file__).parents[1], Path(__file__).resolve().parents[2]
# Frames of these say nothing of who called: torch, Python, what stands in for collectives that gloo lacks, and this.
UNTOLD = (
    Path(torch.__file__).parent,
    Path(functools.__file__).parent,
    SITE_PACKAGES / "typing_extensions.py",
    ROOT / "megatron_asyncpp/integration/cpu_torch.py",
    Path(__file__),
)
UNSEEN = -1  # waits are seen of all-reduces only, and only of those started by a method of a group
FRAMES = 3  # of the stack that a record keeps


@dataclass
class Collective:
    """One collective, as one rank called it.

    Attributes:
        op: gloo's name of the operation.
        group: the description that the group was made with.
        ranks: global ranks of the group, sorted; empty if torch.distributed doesn't know the group.
        bytes: of this rank's input.
        call: how many calls of the schedule had returned.
        where: "file:line function" of the innermost calling frames, innermost first.
        waited: how many forwards and backwards had begun when the rank first waited for it without having been told
            that it was completed; None if it never did, UNSEEN if it may have.
    """

    op: str
    group: str
    ranks: tuple[int, ...]
    bytes: int
    call: int
    where: tuple[str, ...]
    waited: int | None = UNSEEN


@dataclass
class Recording:
    """What one rank did.

    Attributes:
        pipeline: the global ranks of its pipeline, first stage first.
        collectives: in the order in which the rank called them; monitored barriers last.
        messages: (call, "send" or "recv", the peer's global rank) -> number of messages; -1 for any peer.
        groups: how many process groups there were when each call of the schedule returned.
    """

    pipeline: tuple[int, ...] = ()
    collectives: list[Collective] = field(default_factory=list)
    messages: Counter[tuple[int, str, int]] = field(default_factory=Counter)
    groups: list[int] = field(default_factory=list)


def record(result: RankResult) -> None:
    """Hook: put a Recording of Megatron's training loop into ``result.extra["recording"]``."""
    recorder = Recorder()
    recorder.install()
    recorder.watch_megatron(result)


class Recorder:
    """Watches torch.distributed, and changes nothing of what it does."""

    def __init__(self) -> None:
        self._recording = Recording()
        self._calls = self._actions = 0
        self._call_ends: list[int] = []  # number of the flight recorder's entries when each call returned
        self._works: dict[int, tuple[Any, tuple[str, int]]] = {}  # id of a Work -> itself, its group and number
        self._waits: dict[tuple[str, int], int | None] = {}  # group and number -> `waited`
        self._known: set[tuple[str, int]] = set()  # group and number of what the flight recorder leaves out
        self._barriers: list[Collective] = []

    def install(self) -> None:
        """Watch from now on; there must be no process group yet."""
        assert not distributed.is_initialized(), "the flight recorder reads its settings when the first group is made"
        os.environ["TORCH_FR_BUFFER_SIZE"] = str(CAPACITY)
        # Methods of torch's C++ classes: a function of torch.distributed may have been imported by value.
        group, work = distributed.ProcessGroup, distributed.Work
        for name in ("send", "recv", "recv_anysource"):
            wrap(group, name, functools.partial(self._message, name))
        wrap(group, "monitored_barrier", self._monitored_barrier)
        wrap(group, "allreduce", self._all_reduce)
        wrap(work, "is_completed", self._ask)
        for name in ("wait", "synchronize", "get_future", "block_current_stream"):
            wrap(work, name, self._wait)

    def watch_megatron(self, result: RankResult) -> None:
        """Count the calls of the schedule and the plan's actions, and keep the recording when training is over."""
        from megatron.training import training

        from megatron_asyncpp.runtime.pipeline import observers

        def count(get: Callable, *args: Any, **kwargs: Any) -> Callable:
            function = get(*args, **kwargs)

            @functools.wraps(function)
            def forward_backward_func(*args: Any, **kwargs: Any) -> Any:
                returned = function(*args, **kwargs)
                if not kwargs.get("forward_only"):
                    self._calls += 1
                    self._call_ends.append(len(flight_recorder(stacks=False)))
                    self._recording.groups.append(len(distributed_c10d._world.pg_names))
                return returned

            return forward_backward_func

        def keep(train: Callable, *args: Any, **kwargs: Any) -> Any:
            from megatron.core import parallel_state

            pipeline = parallel_state.get_pipeline_model_parallel_group()
            self._recording.pipeline = tuple(distributed.get_process_group_ranks(pipeline))
            returned = train(*args, **kwargs)
            result.extra["recording"] = self.recording()
            return returned

        def observe(action: Any) -> None:
            self._actions += type(action).__name__ in ("Forward", "Backward")

        wrap(training, "get_forward_backward_func", count)
        wrap(training, "train", keep)
        observers.append(observe)

    def recording(self) -> Recording:
        """Everything so far.

        Raises:
            AssertionError: there was something that left no record.
        """
        entries = flight_recorder(stacks=True)
        assert len(entries) < CAPACITY, "the flight recorder is full"
        self._known |= {(entry["process_group"][0], entry["op_id"]) for entry in entries}
        groups = {name: group for group, name in distributed_c10d._world.pg_names.items() if group.rank() >= 0}
        for name, group in groups.items():
            given = range(1, group._get_sequence_number_for_group() + 1)
            lost = [number for number in given if (name, number) not in self._known]
            assert not lost, f"{group.group_desc} of ranks {ranks_of(group)}: numbers {lost} left no record"
        for number, entry in enumerate(entries):
            name, description = entry["process_group"]
            tensors = zip(entry["input_sizes"], entry["input_dtypes"], strict=True)
            self._recording.collectives.append(
                Collective(
                    op=entry["profiling_name"].removeprefix("gloo:"),
                    group=description,
                    ranks=ranks_of(groups[name]) if name in groups else (),
                    bytes=sum(prod(size) * ITEM_BYTES[dtype] for size, dtype in tensors),
                    call=sum(number >= end for end in self._call_ends),
                    where=where((frame["filename"], frame["line"], frame["name"]) for frame in entry["frames"]),
                    waited=self._waits.get((name, entry["op_id"]), UNSEEN),
                )
            )
        self._recording.collectives += self._barriers
        return self._recording

    def _message(self, name: str, method: Callable, group: Any, tensors: Any, *args: Any) -> Any:
        peer = -1 if name == "recv_anysource" else distributed.get_global_rank(group, args[0])
        self._recording.messages[self._calls, name[:4], peer] += 1
        return self._numbered(group, functools.partial(method, group, tensors, *args))

    def _monitored_barrier(self, method: Callable, group: Any, *args: Any, **kwargs: Any) -> Any:
        frames, frame = [], sys._getframe()
        while frame is not None:
            frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        self._barriers.append(
            Collective("monitored_barrier", group.group_desc, ranks_of(group), 0, self._calls, where(frames))
        )
        return self._numbered(group, functools.partial(method, group, *args, **kwargs))

    def _numbered(self, group: Any, call: Callable) -> Any:
        """Call what takes numbers of the group, but leaves no record in the flight recorder."""
        before = group._get_sequence_number_for_group()
        returned = call()
        after = group._get_sequence_number_for_group()
        self._known |= {(group.group_name, number) for number in range(before + 1, after + 1)}
        return returned

    def _all_reduce(self, method: Callable, group: Any, *args: Any, **kwargs: Any) -> Any:
        work = method(group, *args, **kwargs)
        # Keeping the object keeps its id from being given to another.
        self._works[id(work)] = (work, key := (group.group_name, work._get_sequence_number()))
        self._waits[key] = None
        return work

    def _ask(self, method: Callable, work: Any) -> bool:
        completed = method(work)
        if completed:
            self._works.pop(id(work), None)  # to wait for it now is not to wait
        return completed

    def _wait(self, method: Callable, work: Any, *args: Any, **kwargs: Any) -> Any:
        if (known := self._works.pop(id(work), None)) is not None:
            self._waits[known[1]] = self._actions
        return method(work, *args, **kwargs)


def flight_recorder(stacks: bool) -> list[dict[str, Any]]:
    """The entries of torch's flight recorder, oldest first."""
    entries = pickle.loads(torch._C._distributed_c10d._dump_fr_trace(True, stacks, False))["entries"]
    return sorted(entries, key=lambda entry: entry["record_id"])


def ranks_of(group: Any) -> tuple[int, ...]:
    return tuple(sorted(distributed.get_process_group_ranks(group)))


def where(frames: Iterable[tuple[str, int, str]]) -> tuple[str, ...]:
    """The innermost of these (file, line, function) that say who called, as text."""
    told = []
    for name, line, function in frames:
        path = Path(name)
        if not any(path.is_relative_to(untold) for untold in UNTOLD):
            root = next((root for root in (SITE_PACKAGES, ROOT) if path.is_relative_to(root)), path.parent)
            told.append(f"{path.relative_to(root)}:{line} {function}")
    return tuple(told[:FRAMES])


def wrap(owner: Any, name: str, around: Callable) -> None:
    """Replace a function or method by ``around(original, *arguments)``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapped)
