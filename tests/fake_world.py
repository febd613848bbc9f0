"""A world of many ranks in this one process: torch's fake backend, whose collectives do nothing, and meta tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def rank_of(rank: int, world_size: int, *, device: str = "cpu", **sizes: int) -> Iterator[None]:
    """Within the context this process is one rank of a Megatron world, with all of its process groups.

    Args:
        rank: this one.
        world_size: of the world.
        device: that Megatron finds its models on: "meta" for weights that have a shape and no memory.
        sizes: of ``parallel_state.initialize_model_parallel``.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **sizes)
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        with mock.patch("torch.cuda.current_device", lambda: torch.device(device)):
            yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
