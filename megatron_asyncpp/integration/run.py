"""One training run under a schedule: builds the stage's pipeline from Megatron's objects and takes over their steps."""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from typing import Any, NamedTuple

import torch
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.utils import unwrap_model
from megatron.training import print_rank_0

from megatron_asyncpp.arguments import AsyncPPConfig
from megatron_asyncpp.integration import banner, checkpoint, exits, moe
from megatron_asyncpp.integration.log import LaggingFigures
from megatron_asyncpp.integration.trace import Trace
from megatron_asyncpp.optim.correction import Correction
from megatron_asyncpp.optim.delay_compensation import DelayCompensation
from megatron_asyncpp.optim.error_feedback import ErrorFeedback, GradientErrorFeedback
from megatron_asyncpp.optim.leaves import inner_optimizers, leaves
from megatron_asyncpp.runtime.agreement import pipeline_group
from megatron_asyncpp.runtime.batch_state import BatchState
from megatron_asyncpp.runtime.check import VersionCheck
from megatron_asyncpp.runtime.clock import Clock
from megatron_asyncpp.runtime.gradients import tied_embedding
from megatron_asyncpp.runtime.module_state import module_state, updates_left_to_the_step
from megatron_asyncpp.runtime.moe_metrics import MoEMetrics, TrackerPlace
from megatron_asyncpp.runtime.pipeline import Pipeline
from megatron_asyncpp.runtime.pointers import pointers
from megatron_asyncpp.runtime.step import TwoHalfStep, WholeStep
from megatron_asyncpp.runtime.weights import WeightRing
from megatron_asyncpp.schedules.actions import Batch
from megatron_asyncpp.schedules.batches import batches
from megatron_asyncpp.schedules.exchanges import with_exchanges

_ERROR_FEEDBACK: dict[str, type[ErrorFeedback] | type[GradientErrorFeedback]] = {
    "update": ErrorFeedback,
    "gradient": GradientErrorFeedback,
}


class Iteration(NamedTuple):
    """Megatron's number of it (from 1 on), and its number of microbatches."""

    number: int
    microbatches: int


@dataclass
class Run:
    """What the patched functions of Megatron's training loop need of the run that they are in.

    Attributes:
        pipeline: of this stage.
        halves: whether the optimizer step has two halves. All ranks then know its figures without asking each other,
            and nothing in Megatron's loop needs to wait for all stages.
        scheduler_step: Megatron's own ``opt_param_scheduler.step``.
        clock: of this rank.
        state: what batches gather besides gradients; empty unless the step has two halves.
        metrics: the figures of mixtures of experts that are logged.
        iterations: of each batch whose step was begun and not logged, the iteration.
        exits: what the ranks have agreed to leave for.
        lagging: figures that are still to be logged.
        versions: of the weights that each batch runs on, as far as the plan has been read, by batch.
        weights: what has versions, by its name in the model: parameters, and routers' biases.
        trace: of what this rank does, or None.
    """

    pipeline: Pipeline
    halves: bool
    scheduler_step: Callable[[int], None]
    clock: Clock
    state: BatchState = field(default_factory=BatchState)
    metrics: MoEMetrics = field(default_factory=MoEMetrics)
    iterations: dict[int, Iteration] = field(default_factory=dict)
    exits: exits.Exits = field(default_factory=exits.Exits)
    lagging: LaggingFigures = field(default_factory=LaggingFigures)
    versions: dict[int, int] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    trace: Trace | None = None

    def needs_stale(self) -> bool:
        """Whether, between two calls and with no step pending, the next batch runs on older weights than the newest.

        The same on all stages: every plan reads the batches one ahead.
        """
        following = self.pipeline.newest
        return self.versions.get(following, following) < following


# The run that Megatron's train() is in, or None: there is one in a process, as there is one train().
_current: Run | None = None


def current() -> Run | None:
    """The run that Megatron's ``train`` is in, or None outside of it and without a schedule."""
    return _current


def in_halves() -> Run | None:
    """The run that Megatron's ``train`` is in if its optimizer step has two halves, else None."""
    return _current if _current is not None and _current.halves else None


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
    checkpoint.check_buckets(args, optimizer)
    inner = inner_optimizers(optimizer)
    halves = config.schedule.delay > 0
    kept = module_state(unwrap_model(chunk))
    ring = WeightRing(
        chunk.parameters(),
        steppable=[p for one in inner for group in one.param_groups for p in group["params"]],
        versions=config.schedule.versions(
            parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_world_size()
        ),
        newest=args.iteration,
        pointers=pointers(chunk, leaves(optimizer)),
        buffers=tuple(kept.per_version.values()) if halves else (),
    )
    module = unwrap_model(chunk)
    named = {name: weight for name, weight in (*module.named_parameters(), *kept.per_version.items())}
    upcoming = _batches(config, args)
    first = next(upcoming, None)
    continues_on_stale = first is not None and first.version < args.iteration
    if continues_on_stale:
        stale = checkpoint.stale_weights(module)
        ring.hold_older({weight: stale[name] for name, weight in named.items() if name in stale})
    versions: dict[int, int] = {}
    plan = _noted(upcoming if first is None else chain([first], upcoming), versions)
    names = {weight: name for name, weight in named.items()}
    corrections = [correction for one in inner for correction in _corrections(config, one)]
    metrics = MoEMetrics.of(args)
    # Without a delay Megatron switches, sums and updates all of that itself.
    updates = (*moe.router_updates(chunk), *kept.updates)
    tracker = (TrackerPlace(),) if metrics.layers else ()
    state = BatchState((*kept.per_batch, *tracker), updates) if halves else BatchState()
    clock = Clock()
    groups = (
        parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        pipeline_group(timedelta(minutes=args.distributed_timeout_minutes)),
    )
    step = (
        _two_half_step(
            config, args, ring, chunk, optimizer, opt_param_scheduler, corrections, clock, groups, state, metrics
        )
        if halves
        else WholeStep(ring, chunk, optimizer.step, opt_param_scheduler.step, clock, *groups)
    )
    pipeline = Pipeline(
        with_exchanges(
            config.schedule.generate(
                parallel_state.get_pipeline_model_parallel_rank(),
                parallel_state.get_pipeline_model_parallel_world_size(),
                plan,
            ),
            config.schedule.ahead,
        ),
        chunk,
        ring,
        step,
        clock,
        VersionCheck(ring, names) if config.check_versions else None,
        state,
        kept.per_batch,
        checkpoint.random_states if args.save else lambda: None,
        config.schedule.ahead,
    )
    extra = ring.extra_bytes + sum(correction.kept_bytes for correction in corrections)
    extra += step.held_bytes if isinstance(step, TwoHalfStep) else 0
    print_rank_0(
        banner.text(
            config,
            _largest(extra),
            get_num_microbatches(),
            inner,
            sys.argv[1:],
            _waiting_flags(args),
            checkpoint.described(config, args.iteration, continues_on_stale),
        )
    )

    run = Run(pipeline, halves, opt_param_scheduler.step, clock, state, metrics, versions=versions, weights=named)
    if config.trace is not None:
        run.trace = Trace(config, args, clock, groups[1])

    def optimizer_step() -> tuple[bool, Any, Any]:
        microbatches = get_num_microbatches()
        run.iterations[pipeline.next_step] = Iteration(args.curr_iteration + 1, microbatches)
        outcome = pipeline.optimizer_step(microbatches * _samples_per_microbatch(args))
        return True, outcome and outcome.grad_norm, outcome and outcome.zeros_in_grad

    optimizer.step = optimizer_step
    opt_param_scheduler.step = lambda increment: None  # it advances when a step is finished
    _current = run
    try:
        with updates_left_to_the_step(chunk) if halves else nullcontext():
            yield
        pipeline.finish_early()  # of a run that ends before its plan
        if run.trace is not None:
            run.trace.end()
    except SystemExit as ending:
        if run.trace is not None and not ending.code:  # as Megatron ends a run early, on all ranks
            run.trace.end()
        raise
    finally:
        _current = None
        del optimizer.step, opt_param_scheduler.step
        for correction in corrections:
            correction.detach()


# All keys under which a correction may keep tensors in an optimizer's state.
STATE_KEYS = frozenset(
    {*(correction.STATE_KEY for correction in _ERROR_FEEDBACK.values()), DelayCompensation.STATE_KEY}
)


def state_keys(config: AsyncPPConfig) -> tuple[str, ...]:
    """The keys under which the configured corrections keep tensors in an optimizer's state."""
    keys = (_ERROR_FEEDBACK[config.error_feedback_on].STATE_KEY,) if config.error_feedback is not None else ()
    return keys if config.delay_compensation is None else (*keys, DelayCompensation.STATE_KEY)


def _waiting_flags(args: Namespace) -> list[str]:
    """The diagnostics asked for that ask all ranks, each of which brings a part of the bubble back."""
    asked = {
        "--log-params-norm": args.log_params_norm,
        "--timing-log-level": args.timing_log_level > 0,
        "--log-straggler": args.log_straggler,
        "--async-save (while a checkpoint is being written)": args.async_save,
        "--check-weight-hash-across-dp-replicas-interval": args.check_weight_hash_across_dp_replicas_interval,
    }
    return [flag for flag, given in asked.items() if given]


def _two_half_step(
    config: AsyncPPConfig,
    args: Namespace,
    ring: WeightRing,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    corrections: list[Correction],
    clock: Clock,
    groups: tuple[Any, Any],
    state: BatchState,
    metrics: MoEMetrics,
) -> TwoHalfStep:
    stage, pipeline = groups
    embedding = parallel_state.get_embedding_group(check_initialized=False)
    return TwoHalfStep(
        ring,
        model,
        optimizer,
        opt_param_scheduler.step,
        corrections,
        clock,
        stage=stage,
        pipeline=pipeline,
        tied=tied_embedding(model, leaves(optimizer), embedding),
        skip_nonfinite=config.skip_nonfinite,
        requests=lambda: exits.requested(args),
        state=state,
        metrics=lambda: metrics.figures(stage.size()),
    )


def _corrections(config: AsyncPPConfig, optimizer: torch.optim.Optimizer) -> Iterator[Correction]:
    if config.error_feedback is not None:
        # Megatron's optimizers step fp32 tensors: fp32 parameters, or the fp32 masters of others.
        dtype = {"fp32": None, "bf16": torch.bfloat16}[config.error_feedback_dtype]
        yield _ERROR_FEEDBACK[config.error_feedback_on](optimizer, config.error_feedback, dtype)
    if config.delay_compensation is not None:
        yield DelayCompensation(optimizer, config.delay_compensation)


def _batches(config: AsyncPPConfig, args: Namespace) -> Iterator[Batch]:
    loaded = checkpoint.loaded()
    return batches(
        first=args.iteration,
        last=args.train_iters,
        microbatches=_microbatches(args),
        delay=config.schedule.delay,
        older=bool(args.iteration and loaded is not None and loaded.added is not None and loaded.added["stale"]),
        sync_start=config.sync_start,
        sync_cooldown=config.sync_cooldown,
        skipped={iteration - 1 for iteration in args.iterations_to_skip},  # Megatron counts these from one
    )


def _noted(plan: Iterator[Batch], versions: dict[int, int]) -> Iterator[Batch]:
    """The same batches, of which the version of the last two is noted."""
    for batch in plan:
        versions[batch.index] = batch.version
        versions.pop(batch.index - 2, None)
        yield batch


def _microbatches(args: Namespace) -> Iterator[int]:
    """M of each iteration from this one on, as Megatron's loop will set it from the samples consumed."""
    calculator = copy.deepcopy(num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR)
    consumed = args.consumed_train_samples
    while True:
        calculator.update(consumed, consistency_check=False)
        yield calculator.get()
        consumed += calculator.get() * _samples_per_microbatch(args)


def _samples_per_microbatch(args: Namespace) -> int:
    """Over all data-parallel ranks."""
    return int(args.micro_batch_size * args.data_parallel_size * args.gtp_weight_remat_size)


def _largest(value: int) -> int:
    """The largest of all ranks' values."""
    largest = torch.tensor([value], dtype=torch.int64, device=torch.cuda.current_device())
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return int(largest.item())
