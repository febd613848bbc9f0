"""Starts the ranks of all runs as children of one forkserver, so that torch and Megatron are imported only once."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing.forkserver
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.harness import forkserver

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


@dataclass(frozen=True)
class Job:
    """What the ranks of a run do.

    Attributes:
        target: "module:function", called in each rank.
        arguments: what it is called with.
        ranks: in one process group.
        copies: process groups that do the same at the same time and know nothing of each other.
        pinned: whether each rank keeps to a core of its own.
    """

    target: str
    arguments: Mapping[str, Any]
    ranks: int
    copies: int = 1
    pinned: bool = False

    @property
    def processes(self) -> int:
        """Of all copies."""
        return self.ranks * self.copies


@contextlib.contextmanager
def started(job: Job, folder: Path) -> Iterator[list[BaseProcess]]:
    """The processes of a job, copy by copy and rank by rank; all gone at the end, whatever happens.

    Process i writes ``i.stdout`` and ``i.stderr`` into the folder.
    """
    from torch.distributed import TCPStore

    context = server()
    # Held here, as torchrun holds it: no rank has to find a free port and hope that it stays free.
    stores = [
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(hours=1))
        for _ in range(job.copies)
    ]
    processes = [
        context.Process(target=_main, args=(job, folder, number, stores[number // job.ranks].port), daemon=True)
        for number in range(job.processes)
    ]
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        # A second Ctrl-C, from somebody impatient, must not cut this short.
        with contextlib.ExitStack() as shield:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                shield.callback(signal.signal, number, signal.signal(number, signal.SIG_IGN))
            for process in processes:
                if process.pid is not None:
                    process.kill()
            for process in processes:
                if process.pid is not None:
                    process.join()


def server() -> ForkServerContext:
    """The forkserver that all ranks come from; the first call waits until it has imported everything.

    Raises:
        RuntimeError: it can't import everything; standard error says why.
    """
    return forkserver.server("scripts.bench.preload")


def _keep_freed_memory() -> None:
    """Let the C library keep what tensors free, as a GPU's allocator does.

    It would give large ones back to the kernel, and have to clear pages for the next: a tenth of a stage's time, and
    not the same for every order of forwards and backwards.
    """
    libc = ctypes.CDLL(None)
    for option, value in ((_M_TRIM_THRESHOLD, 2**31 - 1), (_M_MMAP_MAX, 0)):
        libc.mallopt(option, value)


def _main(job: Job, folder: Path, number: int, port: int) -> None:
    """Be one rank. Never returns."""
    # A Ctrl-C in the terminal is for the bench alone. If that is killed, its forkserver ends, and we with it: but only
    # if nobody else holds the end of the pipe by which it knows, which Python hands to every child.
    os.setsid()
    os.close(multiprocessing.forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / f"{number}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
    _keep_freed_memory()
    if job.pinned:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[number % len(cores)]})
    rank = str(number % job.ranks)
    os.environ.update(
        RANK=rank,
        LOCAL_RANK=rank,
        WORLD_SIZE=str(job.ranks),
        LOCAL_WORLD_SIZE=str(job.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    code = 0
    try:
        _run(job)
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no teardown: an error of one rank must not turn into a hang of another


def _run(job: Job) -> None:
    importlib.import_module("scripts.bench.preload")
    import torch

    torch.set_num_threads(1)
    module, _, name = job.target.partition(":")
    getattr(importlib.import_module(module), name)(**job.arguments)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # nobody leaves while a peer still reads from its socket
