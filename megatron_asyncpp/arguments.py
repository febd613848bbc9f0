"""The ``--asyncpp-*`` flags, what they mean together, and every check that can be made before any process group."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass

from megatron_asyncpp.errors import AsyncPPError
from megatron_asyncpp.refusals import REFUSALS
from megatron_asyncpp.schedules import SCHEDULES, Schedule

PREFIX = "--asyncpp-"

# What --asyncpp-schedule offers. The runtime's optimizer step still waits for all stages, so 2bw is its blocking plan.
RUNNABLE = {"1f1b": SCHEDULES["1f1b"], "2bw": SCHEDULES["2bw-blocking"]}


@dataclass(frozen=True)
class AsyncPPConfig:
    """What the flags ask for.

    Attributes:
        name: of the schedule, a key of ``RUNNABLE``.
        error_feedback: lam, or None for no Error Feedback.
        check_versions: whether every backward checks that it uses the weights of its forward.
    """

    name: str
    error_feedback: float | None
    check_versions: bool

    @property
    def schedule(self) -> Schedule:
        """The schedule of that name."""
        return RUNNABLE[self.name]


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the plugin's flags to Megatron's parser, and return it as Megatron's own functions do."""
    group = parser.add_argument_group(title="asynchronous pipeline (megatron_asyncpp)")
    group.add_argument(
        f"{PREFIX}schedule",
        choices=sorted(RUNNABLE),
        default=None,
        help="Pipeline schedule. 2bw is PipeDream-2BW: no flush between iterations, and gradients that are one "
        "optimizer step old. 1f1b is Megatron's, run from a plan. Without this flag nothing of Megatron changes.",
    )
    group.add_argument(
        f"{PREFIX}error-feedback",
        metavar="LAMBDA",
        nargs="?",
        type=float,
        const=1.0,
        default=None,
        help="Correct every update u for the delay: x -= u + LAMBDA * (u - u_prev). LAMBDA is 1.0 if left out.",
    )
    group.add_argument(
        f"{PREFIX}check-versions",
        action="store_true",
        help="Debug mode: check that every backward uses the very weights that its forward used. Slow.",
    )
    return parser


def config_from(args: Namespace) -> AsyncPPConfig | None:
    """The plugin's configuration from Megatron's parsed arguments, or None if no schedule was asked for."""
    if args.asyncpp_schedule is None:
        return None
    return AsyncPPConfig(args.asyncpp_schedule, args.asyncpp_error_feedback, args.asyncpp_check_versions)


def check(args: Namespace, argv: list[str]) -> None:
    """Check what the arguments ask for, before Megatron validates them and again after (when some have changed).

    Raises:
        AsyncPPError: the plugin can't honour it.
    """
    if not hasattr(args, "asyncpp_schedule"):
        if any(word.startswith(PREFIX) for word in argv):
            raise AsyncPPError(f"--yaml-cfg replaces all flags, so {PREFIX}* would be ignored: give flags instead")
        return
    config = config_from(args)
    if config is None:
        for name in ("error_feedback", "check_versions"):
            if getattr(args, f"asyncpp_{name}") not in (None, False):
                raise AsyncPPError(f"{PREFIX}{name.replace('_', '-')} needs a schedule: add {PREFIX}schedule 2bw")
        return
    for refusal in REFUSALS:
        if refusal.applies(args):
            raise AsyncPPError(refusal.sentence())
    _check_error_feedback(config)
    _check_microbatches(args, config)


def _check_error_feedback(config: AsyncPPConfig) -> None:
    lam = config.error_feedback
    if lam is None:
        return
    if not (math.isfinite(lam) and lam >= 0):
        raise AsyncPPError(f"{PREFIX}error-feedback {lam} is no strength of a correction: give a number from 0 on")
    if config.schedule.delay == 0:
        raise AsyncPPError(
            f"{PREFIX}error-feedback corrects a delay, and {PREFIX}schedule {config.name} has none: "
            f"use {PREFIX}schedule 2bw, or leave it out"
        )


def _check_microbatches(args: Namespace, config: AsyncPPConfig) -> None:
    stages = args.pipeline_model_parallel_size
    per_replica = args.tensor_model_parallel_size * stages * args.context_parallel_size
    if args.world_size % per_replica:
        raise AsyncPPError(
            f"a replica of the model takes {per_replica} processes (tensor x pipeline x context parallel), but "
            f"{args.world_size} were started: launch a multiple of {per_replica} with torchrun"
        )
    replicas = args.world_size // per_replica
    if args.micro_batch_size is None or config.schedule.delay == 0:
        return
    microbatches = (args.global_batch_size or args.micro_batch_size * replicas) // (args.micro_batch_size * replicas)
    if microbatches < stages:
        raise AsyncPPError(
            f"{PREFIX}schedule {config.name} needs at least as many microbatches as pipeline stages, but there are "
            f"{microbatches} microbatches for {stages} stages: raise --global-batch-size to at least "
            f"{stages * args.micro_batch_size * replicas}, or lower --micro-batch-size or "
            f"--pipeline-model-parallel-size"
        )
