"""Messages that take time: what a rank sends, its peer sees only a given time after it was sent.

Neither end is kept busy. The sender writes down when it sent, in memory that both share, and only the receiver's
``wait`` returns no earlier than that plus the latency; what the receiver computes in between hides the latency, as it
would on a network. Only point-to-point messages are late: what a pipeline sends. Collectives are as they were.
"""

from __future__ import annotations

import functools
import mmap
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Messages of a channel that may be on their way at once, far more than any pipeline has.
_SLOTS = 4096
_BYTES = 8


class Stamps:
    """When the messages of one channel were sent, in ns of the machine's monotonic clock.

    A channel is all messages from a rank to another in one process group: they arrive in the order of their sends.
    """

    def __init__(self, path: Path) -> None:
        """Open the channel's file; both of its ends do, and the first one makes it."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, _SLOTS * _BYTES)
            self._sent = memoryview(mmap.mmap(descriptor, _SLOTS * _BYTES)).cast("q")
        finally:
            os.close(descriptor)

    def __setitem__(self, message: int, sent: int) -> None:
        self._sent[message % _SLOTS] = sent

    def __getitem__(self, message: int) -> int:
        return self._sent[message % _SLOTS]


class _Late:
    """A receive that isn't done until its message has been on its way for the latency."""

    def __init__(self, work: Any, sent: Callable[[], int], latency: int) -> None:
        self._work = work
        self._sent = sent
        self._latency = latency

    def wait(self, *args: Any) -> Any:
        """Wait until the message is there, and sleep until it may be seen."""
        result = self._work.wait(*args)
        if (left := self._sent() + self._latency - time.monotonic_ns()) > 0:
            time.sleep(left / 1e9)
        return result

    def is_completed(self) -> bool:
        """Whether the message may be seen."""
        return bool(self._work.is_completed()) and time.monotonic_ns() >= self._sent() + self._latency


def install(seconds: float, folder: Path) -> None:
    """Delay all point-to-point messages of this process from now on.

    Args:
        seconds: from the send until the receiver sees it.
        folder: where the ranks of a run, and nobody else, share their channels' files.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    latency = round(seconds * 1e9)
    channels: dict[tuple[str, int, int], Stamps] = {}
    sends: Counter[tuple[str, int, int]] = Counter()
    receives: Counter[tuple[str, int, int]] = Counter()

    def channel(group: Any, sender: int, receiver: int) -> tuple[str, int, int]:
        name = (group.group_name, sender, receiver)
        if name not in channels:
            channels[name] = Stamps(folder / f"channel.{name[0].replace(os.sep, '_')}.{sender}.{receiver}")
        return name

    def other_end(group: Any, rank: int | None, group_rank: int | None) -> tuple[Any, int]:
        group = group or dist.group.WORLD
        return group, dist.get_group_rank(group, rank) if group_rank is None else group_rank

    isend, irecv = distributed_c10d.isend, distributed_c10d.irecv

    @functools.wraps(isend)
    def stamped(
        tensor: Any, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None
    ) -> Any:
        group, receiver = other_end(group, dst, group_dst)
        name = channel(group, group.rank(), receiver)
        channels[name][sends[name]] = time.monotonic_ns()
        sends[name] += 1
        return isend(tensor, group=group, tag=tag, group_dst=receiver)

    @functools.wraps(irecv)
    def late(tensor: Any, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None) -> Any:
        group, sender = other_end(group, src, group_src)
        name = channel(group, sender, group.rank())
        message = receives[name]
        receives[name] += 1
        work = irecv(tensor, group=group, tag=tag, group_src=sender)
        return _Late(work, lambda: channels[name][message], latency)

    # torch's batches of sends and receives call what they find in their own module, and compare with it.
    for module in (distributed_c10d, dist):
        module.isend, module.irecv = stamped, late
