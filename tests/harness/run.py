"""`run`: start the ranks of one configuration from the forkserver, wait, and give back losses and weights per rank."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

import torch
from torch.distributed import TCPStore

from tests.harness import forkserver
from tests.harness.flags import RUN, flag, write_corpus
from tests.harness.rank import Job, main
from tests.harness.reference import Reference
from tests.harness.results import RankResult, Run, Weights

Mode = Literal["plugin", "megatron", "fixture", "oracle"]
ENTRIES = {"plugin": "megatron_asyncpp.pretrain_gpt"}  # the others run the harness's own entry
GRACE = 5.0  # seconds that the other ranks get once one has failed
TAIL = {"stdout": 20, "stderr": 80}  # lines of each rank's output in an error


class RankError(RuntimeError):
    """A rank failed or hung; the message has the end of every rank's output. `run` is what is there of the run.

    Not an AssertionError: a crash must not pass for the difference that a negative test expects.
    """

    def __init__(self, message: str, run: Run) -> None:
        super().__init__(message)
        self.run = run


def run(
    flags: Sequence[str],
    world_size: int = 1,
    mode: Mode = "plugin",
    *,
    reference: Reference | None = None,
    initial: Weights | None = None,
    hooks: str | Callable | None = None,
    entry: str | None = None,
    timeout: float = 120.0,
    check: bool = True,
) -> Run:
    """Train once, in `world_size` processes on this machine.

    Args:
        flags: Megatron's (and the plugin's) flags; `{run}` in one of them becomes the run's own folder.
        world_size: number of ranks.
        mode: "plugin" is Megatron with the plugin installed, "megatron" is plain; "fixture" and "oracle" are the
            references.
        reference: what the fixture and the oracle compute.
        initial: weights to start from, with global layer numbers, as Run.merged("initial") gives them.
        hooks: "module:function", or a module-level function or a partial of one: called in each rank after
            installation and before training. If it takes an argument, that is the rank's RankResult.
        entry: module whose main() trains as sys.argv says; by default the plugin's own entry in mode "plugin", else
            tests.harness.entry.
        timeout: seconds until all ranks are killed and RankError is raised.
        check: raise RankError if a rank's exit code isn't 0; otherwise the codes are in the result.
    """
    folder = Path(tempfile.mkdtemp(prefix="asyncpp_run_"))
    flags = [text.replace(RUN, str(folder)) for text in flags]
    if str(folder / "corpus") in flags:
        write_corpus(folder / "corpus", int(flag(flags, "--seq-length", "0")))
    server()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout + 10))
    job = Job(
        flags=flags,
        world_size=world_size,
        mode=mode,
        hooks=hooks,
        reference=reference or Reference(),
        initial=initial,
        entry=entry or ENTRIES.get(mode, "tests.harness.entry"),
        port=store.port,
        timeout=timeout,
    )
    (folder / "job").write_bytes(pickle.dumps(job))
    start, processes, hung = time.monotonic(), start_ranks(folder, world_size), False
    try:
        hung = not wait(processes, start + timeout)
    finally:
        stop(processes)
        done = Run([collect(folder, rank, process) for rank, process in enumerate(processes)], time.monotonic() - start)
        shutil.rmtree(folder, ignore_errors=True)
    if hung or (check and any(rank.exit_code for rank in done.ranks)):
        raise RankError(report(done, f"no end after {timeout:g} s" if hung else "a rank failed", flags), done)
    return done


def start_ranks(folder: Path, world_size: int) -> list[BaseProcess]:
    """Fork the ranks from the server."""
    context = server()
    processes = [context.Process(target=main, args=(str(folder), rank)) for rank in range(world_size)]
    for process in processes:
        process.start()
    return processes


def server() -> ForkServerContext:
    """The forkserver that all ranks come from."""
    return forkserver.server("tests.harness.preload")


def wait(processes: list[BaseProcess], deadline: float) -> bool:
    """Wait for all ranks; once one has failed the rest get GRACE seconds. False at the deadline."""
    while running := [process for process in processes if process.exitcode is None]:
        failed = any(process.exitcode for process in processes)
        limit = min(deadline, time.monotonic() + GRACE) if failed else deadline
        ready = multiprocessing.connection.wait([process.sentinel for process in running], limit - time.monotonic())
        for process in running:
            process.join(0)
        if not ready:
            return failed
    return True


def stop(processes: list[BaseProcess]) -> None:
    """Let the ranks that still run write their stacks, then kill their process groups and reap them."""
    running = [process for process in processes if process.exitcode is None]
    for number in (signal.SIGUSR1, signal.SIGKILL):
        for process in running:
            for kill in (os.killpg, os.kill):  # a rank that has only just been forked has no group yet
                with contextlib.suppress(ProcessLookupError):
                    kill(process.pid, number)
                    break
        if running and number == signal.SIGUSR1:
            time.sleep(0.5)
    for process in processes:
        process.join()


def collect(folder: Path, rank: int, process: BaseProcess) -> RankResult:
    """Read what a rank wrote; one that was killed has only its output."""
    path = folder / f"result.{rank}"
    result = torch.load(path, weights_only=False) if path.exists() else RankResult(rank=rank)
    texts = [folder / f"{name}.{rank}" for name in ("out", "err")]
    result.stdout, result.stderr = (text.read_text(errors="replace") if text.exists() else "" for text in texts)
    result.exit_code = process.exitcode
    return result


def report(done: Run, what: str, flags: list[str]) -> str:
    """A message that says what happened on every rank, the first failure last, where pytest shows it."""
    parts = [f"{what}; exit codes {[rank.exit_code for rank in done.ranks]}; flags {' '.join(flags)}"]
    killed = -signal.SIGKILL
    for rank in sorted(done.ranks, key=lambda rank: rank.exit_code not in (0, killed)):
        state = "killed while running" if rank.exit_code == killed else f"exit code {rank.exit_code}"
        for name in ("stdout", "stderr"):
            lines = getattr(rank, name).splitlines()
            shown = lines[-TAIL[name] :]
            parts.append(f"--- rank {rank.rank}, {state}, {name} (last {len(shown)} of {len(lines)} lines)")
            parts.extend(shown)
    return "\n".join(parts)
