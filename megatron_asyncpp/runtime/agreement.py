"""What all ranks must agree on, without any of them waiting for it when it is asked for."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

import torch
from megatron.core import parallel_state


class Handle(Protocol):
    """Something that is under way, as torch.distributed's Work."""

    def is_completed(self) -> bool:
        """Whether it is over, without waiting."""

    def wait(self) -> object:
        """Wait until it is over, or, for work on a GPU, let the current stream wait."""


class Agreement[T]:
    """A computation on all ranks that goes on whenever somebody asks how far it is.

    It is written as a generator that yields a handle wherever it can't go on before that is completed.
    """

    def __init__(self, steps: Generator[Handle, None, T]) -> None:
        """Run it up to its first handle that isn't completed."""
        self._steps = steps
        self._handle: Handle | None = None
        self._answer: T | None = None
        self._resume()
        self.poll()

    @property
    def reached(self) -> bool:
        """Whether the answer is there, so that there is nothing to ask or to wait for."""
        return self._handle is None

    def poll(self) -> None:
        """Go on as far as that is possible without waiting."""
        while self._handle is not None and self._handle.is_completed():
            self._resume()

    def wait(self) -> T:
        """Wait for the answer."""
        while self._handle is not None:
            self._resume()
        assert self._answer is not None
        return self._answer

    def _resume(self) -> None:
        if self._handle is not None:
            self._handle.wait()
        try:
            self._handle = next(self._steps)
        except StopIteration as stop:
            self._handle, self._answer = None, stop.value


class _Event:
    """A CUDA event as a handle."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


def pipeline_group(timeout: object = None) -> torch.distributed.ProcessGroup:
    """A gloo group of the ranks of this rank's pipeline, for scalars only. All ranks of the run must call it.

    It has its own threads and sockets, so what it carries waits for no message between stages, and no kernel of NCCL
    spins on a GPU until the last stage has come. Its size is P: no full mesh of the cluster is made.

    Args:
        timeout: a ``datetime.timedelta``, or None for torch's own.
    """
    ranks = torch.distributed.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    return parallel_state.create_group(
        ranks,
        timeout=timeout,
        backend="gloo",
        use_local_synchronization=True,
        group_desc="ASYNCPP_PIPELINE_SCALARS",
    )


def total(
    figures: torch.Tensor, stage: torch.distributed.ProcessGroup, pipeline: torch.distributed.ProcessGroup
) -> Generator[Handle, None, list[float]]:
    """Sum figures over all ranks of the run: within the stage first, then over the stages of each pipeline.

    The ranks of a stage have just reduced their gradients together, so the first sum is not worth a handle. It must not
    have one either: a rank that waits for a message before it is asked again, of a stage that waits for the second sum,
    would never come to start that.

    Args:
        figures: (n,), fp64, on this rank's device; overwritten.
        stage: all ranks of this stage.
        pipeline: as ``pipeline_group`` makes it.

    Returns:
        The n sums, the same bits on every rank.
    """
    if stage.size() > 1:
        torch.distributed.all_reduce(figures, group=stage)  # a GPU's stream waits for it, not its host
    if figures.is_cuda:  # copied in the order of the stream, before any kernel that waits for a message
        host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
        host.copy_(figures, non_blocking=True)
        yield _Event()
        figures = host
    if pipeline.size() > 1:
        yield torch.distributed.all_reduce(figures, group=pipeline, async_op=True)
    return [float(figure) for figure in figures]
