"""A forkserver that has imported torch, Megatron and CPU mode once (6 s), for the tests' ranks and the benches'."""

from __future__ import annotations

import atexit
import gc
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import warnings
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_IMPORTS = 300.0  # seconds that the forkserver may take to import everything


@cache
def server(preload: str) -> ForkServerContext:
    """Start the forkserver and wait until it has imported everything, so that no run's clock counts that.

    Args:
        preload: the module that it imports, which calls ``import_megatron``. A process has one forkserver: the first.

    Raises:
        RuntimeError: it can't import everything; standard error says why.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    changed = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
    }
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)  # what the server sees: Python 3.12 doesn't hand it our sys.path
    try:
        # A first child, which ends as soon as the forkserver has imported everything.
        first = context.Process(target=importlib.import_module, args=(preload,))
        first.start()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    # Reaped here, and while this process still is: not every container's init does it.
    atexit.register(multiprocessing.forkserver._forkserver._stop)  # type: ignore[attr-defined]
    first.join(_IMPORTS)
    if first.exitcode != 0:
        first.kill()
        raise RuntimeError(f"the forkserver can't import {preload} (exit {first.exitcode}): see stderr")
    return context


def import_megatron(*more: str) -> None:
    """Import Megatron in CPU mode, and more modules, for all processes that are forked from this one."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with warnings.catch_warnings(action="ignore"):  # a dozen about TransformerEngine and Apex
        from megatron_asyncpp.integration import cpu  # (the environment first)

        cpu.install()
        for name in (
            "megatron.training.training",
            "megatron.training.argument_utils",
            "megatron.training.models.gpt",
            "megatron.core.optimizer",
            "megatron.core.pipeline_parallel.schedules",
            *more,
        ):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # children share these pages; a collection in one of them need not touch them
