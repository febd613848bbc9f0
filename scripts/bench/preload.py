"""Imported once by the bench's forkserver: torch, Megatron and CPU mode, which every rank then finds in memory."""

from __future__ import annotations

import gc
import importlib
import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

from megatron_asyncpp.integration import cpu  # (the environment first)

with warnings.catch_warnings(action="ignore"):  # a dozen about TransformerEngine and Apex
    cpu.install()
    for name in (
        "megatron.training.training",
        "megatron.training.argument_utils",
        "megatron.training.models.gpt",
        "megatron.core.optimizer",
        "megatron.core.pipeline_parallel.schedules",
        "megatron_asyncpp.pretrain_gpt",
        "torch.distributed.pipelining",
        "scripts.bench.sleeping_stages",
        "scripts.bench.peers",
    ):
        importlib.import_module(name)

gc.collect()
gc.freeze()  # children share these pages; a collection in one of them need not touch them
