"""What one rank does: a child of the forkserver that becomes rank r, trains, and writes its RankResult."""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.harness.reference import Reference
from tests.harness.results import RankResult, Weights


@dataclass
class Job:
    """Everything a rank needs to know."""

    flags: list[str]
    world_size: int
    mode: str
    hooks: str | Callable[[], None] | None
    reference: Reference
    initial: Weights | None
    entry: str
    port: int
    timeout: float


def main(folder: str, rank: int) -> None:
    """Run the job pickled in `folder`; leaves out.R, err.R and result.R there. Never returns."""
    os.setsid()  # one process group a rank, so that a kill takes what it started along
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(f"{folder}/{name}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
    job: Job = pickle.loads(Path(folder, "job").read_bytes())
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    faulthandler.dump_traceback_later(job.timeout + 20, exit=True, file=2)  # if the parent was killed
    result, code = RankResult(rank=rank), 0
    try:
        train(job, rank, result)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    temporary = Path(folder, f"partial.{rank}")
    torch.save(result, temporary)
    temporary.rename(Path(folder, f"result.{rank}"))
    for child in multiprocessing.active_children():  # checkpoint writers, which only a teardown would stop
        child.kill()
    os._exit(code)  # no teardown: a peer's error must not turn into a hang here


def train(job: Job, rank: int, result: RankResult) -> None:
    """Set up the mode and run the entry as torchrun would."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the parent hosts the store, as torchrun does: no race for a port
        TORCHELASTIC_RESTART_COUNT="0",
    )
    sys.argv = ["pretrain", *job.flags]
    importlib.import_module("tests.harness.preload")
    from tests.harness import fixture, oracle, record

    recorder = record.Recorder(result, job.initial)
    if job.mode == "plugin":
        importlib.import_module("megatron_asyncpp").install()
        runtime = importlib.import_module("megatron_asyncpp.runtime.pipeline")
        runtime.observers.append(recorder.observe)
        recorder.watch_outcomes(runtime.Pipeline)
    elif job.mode == "fixture":
        fixture.install(job.reference)
    elif job.mode == "oracle":
        oracle.install(job.reference, result, job.initial)
    recorder.install()
    call(job.hooks, result)
    try:
        importlib.import_module(job.entry).main()
    except SystemExit as stop:  # as Megatron ends a run that it was asked to leave early
        if stop.code:
            raise
    recorder.end()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # nobody leaves while a peer still reads from its socket


def call(hooks: str | Callable | None, result: RankResult) -> None:
    """Run the hook; one that takes an argument gets this rank's RankResult and may put things into `extra`."""
    if hooks is None:
        return
    if isinstance(hooks, str):
        module, _, name = hooks.partition(":")
        hooks = getattr(importlib.import_module(module), name)
    hooks(result) if inspect.signature(hooks).parameters else hooks()
