"""One training run under a schedule: builds the stage's pipeline from Megatron's objects and takes over their steps."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.utils import unwrap_model
from megatron.training import print_rank_0

from megatron_asyncpp.arguments import AsyncPPConfig
from megatron_asyncpp.integration import banner
from megatron_asyncpp.optim.error_feedback import ErrorFeedback
from megatron_asyncpp.optim.leaves import inner_optimizers
from megatron_asyncpp.runtime.check import VersionCheck
from megatron_asyncpp.runtime.pipeline import Pipeline
from megatron_asyncpp.runtime.step import TwoHalfStep
from megatron_asyncpp.runtime.weights import WeightRing
from megatron_asyncpp.schedules.batches import batches
from megatron_asyncpp.schedules.exchanges import with_exchanges

# The pipeline of the run that Megatron's train() is in, or None: there is one in a process, as there is one train().
_current: Pipeline | None = None


def current() -> Pipeline | None:
    """The pipeline of the run that Megatron's ``train`` is in, or None outside of it and without a schedule."""
    return _current


@contextmanager
def running(
    config: AsyncPPConfig, args: Namespace, model: list[torch.nn.Module], optimizer: Any, opt_param_scheduler: Any
) -> Iterator[None]:
    """Within the context, Megatron's ``train`` runs this schedule.

    Megatron's train_step stays as it is. It calls ``forward_backward_func``, ``optimizer.step`` and
    ``opt_param_scheduler.step``; the last two are replaced on these objects for as long as the context lasts.

    Args:
        config: the schedule and its options.
        args: Megatron's.
        model: the stage's model chunks; one.
        optimizer: Megatron's, a tree of them.
        opt_param_scheduler: Megatron's learning-rate and weight-decay schedule.
    """
    global _current
    (chunk,) = model
    inner = inner_optimizers(optimizer)
    ring = WeightRing(
        chunk.parameters(),
        steppable=[p for one in inner for group in one.param_groups for p in group["params"]],
        versions=config.schedule.versions,
        newest=args.iteration,
    )
    names = {parameter: name for name, parameter in unwrap_model(chunk).named_parameters()}
    step = TwoHalfStep(ring, optimizer.step, opt_param_scheduler.step)
    feedback = [ErrorFeedback(one, config.error_feedback) for one in inner if config.error_feedback is not None]
    pipeline = Pipeline(
        with_exchanges(_plan(config, args)),
        chunk,
        ring,
        step,
        VersionCheck(ring, names) if config.check_versions else None,
    )
    extra = ring.extra_bytes
    if feedback:
        extra += sum(p.numel() * p.element_size() for one in inner for g in one.param_groups for p in g["params"])
    print_rank_0(banner.text(config, _largest(extra), get_num_microbatches(), inner))

    def optimizer_step() -> tuple[bool, Any, Any]:
        samples = get_num_microbatches() * args.micro_batch_size * args.data_parallel_size * args.gtp_weight_remat_size
        outcome = pipeline.optimizer_step(samples)
        return True, outcome and outcome.grad_norm, outcome and outcome.zeros_in_grad

    optimizer.step = optimizer_step
    opt_param_scheduler.step = lambda increment: None  # it advances when a step is finished
    _current = pipeline
    try:
        yield
    finally:
        _current = None
        del optimizer.step, opt_param_scheduler.step
        for one in feedback:
            one.detach()


def _plan(config: AsyncPPConfig, args: Namespace) -> Iterator[Any]:
    return config.schedule.generate(
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        batches(
            first=args.iteration,
            last=args.train_iters,
            microbatches=get_num_microbatches(),
            delay=config.schedule.delay,
            skipped={iteration - 1 for iteration in args.iterations_to_skip},  # Megatron counts these from one
        ),
    )


def _largest(value: int) -> int:
    """The largest of all ranks' values."""
    largest = torch.tensor([value], dtype=torch.int64, device=torch.cuda.current_device())
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return int(largest.item())
