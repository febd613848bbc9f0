"""The ``--asyncpp-*`` flags, what they mean together, and every check that can be made before any process group."""

from __future__ import annotations

import importlib.util
import math
import re
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path

from megatron_asyncpp import inputs, models, muon_preset
from megatron_asyncpp.errors import AsyncPPError
from megatron_asyncpp.refusals import REFUSALS
from megatron_asyncpp.schedules import SCHEDULES, Schedule
from megatron_asyncpp.stage_layers import chunks_of, even_stages, stages_of

PREFIX = "--asyncpp-"

# What --asyncpp-schedule offers.
RUNNABLE = {name: SCHEDULES[name] for name in ("1f1b", "2bw")}


@dataclass(frozen=True)
class AsyncPPConfig:
    """What the flags ask for.

    Attributes:
        name: of the schedule, a key of ``RUNNABLE``.
        error_feedback: lam, or None for no Error Feedback.
        error_feedback_on: what it corrects, "update" or "gradient".
        error_feedback_dtype: of what it keeps between steps, "fp32" or "bf16".
        delay_compensation: lam of DC-ASGD, or None for none.
        muon_preset: a key of ``muon_preset.PRESETS``, or None.
        check_versions: whether every backward checks that it uses the weights of its forward.
        lead: how far a stage's forwards run ahead of its backwards, "tight" or "wide".
        blocking_step: whether both halves of the optimizer step are at the end of an iteration.
        skip_nonfinite: whether an update is skipped if a gradient isn't finite.
        sync_start: the first so many iterations are synchronous.
        sync_cooldown: the last so many iterations are synchronous.
        eval_weights: what evaluations run on, "newest" or "stale": those that the next batch trains on.
        trace: the folder for a measured timeline, or None for none.
        trace_iterations: the first and the last iteration of it, by Megatron's count, or None for a few early ones.
    """

    name: str
    error_feedback: float | None
    error_feedback_on: str
    error_feedback_dtype: str
    delay_compensation: float | None
    muon_preset: str | None
    check_versions: bool
    lead: str
    blocking_step: bool
    skip_nonfinite: bool
    sync_start: int
    sync_cooldown: int
    eval_weights: str
    trace: Path | None
    trace_iterations: tuple[int, int] | None

    @property
    def schedule(self) -> Schedule:
        """The plan of that name, lead and step."""
        variant = "-wide" * (self.lead == "wide") + "-blocking" * self.blocking_step
        return SCHEDULES[self.name + variant] if variant else RUNNABLE[self.name]

    def correction(self) -> str:
        """The correction for the delay, in words."""
        if self.delay_compensation is not None:
            return f"delay compensation (DC-ASGD) lambda {self.delay_compensation:g}"
        if self.error_feedback is None:
            return "Error Feedback off"
        on, kept = ("", "update") if self.error_feedback_on == "update" else (" on the gradient", "gradient")
        precision = "" if self.error_feedback_dtype == "fp32" else f", last {kept} kept in {self.error_feedback_dtype}"
        return f"Error Feedback{on} lambda {self.error_feedback:g}{precision}"


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
        models.FLAG,
        metavar="NAME",
        default=None,
        help=f"Set the flags of a model's architecture, each unless it is given: one of {', '.join(models.MODELS)}. "
        f"Works without a schedule too; `python -m megatron_asyncpp flags NAME` prints what it sets.",
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
        f"{PREFIX}error-feedback-dtype",
        choices=["fp32", "bf16"],
        default=None,
        help="In which precision u_prev is kept between steps, fp32 if left out. A step always computes with its own u "
        "as it is.",
    )
    group.add_argument(
        f"{PREFIX}error-feedback-on",
        choices=["update", "gradient"],
        default=None,
        help="What Error Feedback corrects, the update if left out. gradient is the paper's ablation: the optimizer "
        "steps with g + LAMBDA * (g - g_prev), g being the clipped gradient.",
    )
    group.add_argument(
        f"{PREFIX}delay-compensation",
        metavar="LAMBDA",
        type=float,
        default=None,
        help="DC-ASGD, in place of Error Feedback: the optimizer steps with g + LAMBDA * g * g * (x - x_prev), g being "
        "the clipped gradient, and x and x_prev the newest weights and those that it was taken at.",
    )
    group.add_argument(
        f"{PREFIX}muon-preset",
        choices=sorted(muon_preset.PRESETS),
        default=None,
        help=f"paper sets {muon_preset.described('paper', [])}, each unless it is given; megatron sets nothing.",
    )
    group.add_argument(
        f"{PREFIX}sync-start-iters",
        metavar="N",
        type=int,
        default=0,
        help="Train the first N iterations synchronously. Error Feedback tracks their updates without correcting them.",
    )
    group.add_argument(
        f"{PREFIX}sync-cooldown-iters",
        metavar="N",
        type=int,
        default=0,
        help="Train the last N iterations synchronously.",
    )
    group.add_argument(
        f"{PREFIX}lead",
        choices=["tight", "wide"],
        default=None,
        help="How many forwards a stage runs ahead of its backwards: P-1-s of stage s, as in 1F1B, if left out, or "
        "wide, twice as many. With those a message may take as long as a microbatch and nobody waits for it, for as "
        "many more microbatches of activations. Needs 2P-1 microbatches.",
    )
    group.add_argument(
        f"{PREFIX}blocking-step",
        action="store_true",
        help="Make the whole optimizer step at the end of an iteration, where all stages wait for each other. The same "
        "numbers, bit for bit, for most of the bubble: a reference for tests and comparisons.",
    )
    group.add_argument(
        f"{PREFIX}skip-nonfinite",
        action="store_true",
        help="Skip an update, on all stages alike, if the gradient norm isn't finite. Needs "
        "--no-check-for-nan-in-loss-and-grad, since Megatron's check ends the run.",
    )
    group.add_argument(
        f"{PREFIX}eval-weights",
        choices=["newest", "stale"],
        default=None,
        help="What evaluations run on, the newest weights if left out. stale are the older ones that the next batch "
        "trains on, where there are any: after a synchronous iteration, and at the end of a run, there are none.",
    )
    group.add_argument(
        f"{PREFIX}trace",
        metavar="DIR",
        default=None,
        help="Write into this folder what all ranks did when, as a Perfetto trace and as a picture of rank 0's "
        "pipeline.",
    )
    group.add_argument(
        f"{PREFIX}trace-iters",
        metavar="A-B",
        default=None,
        help="The iterations to trace, the third to the fifth of the run if left out.",
    )
    group.add_argument(
        f"{PREFIX}check-versions",
        action="store_true",
        help="Debug mode: check that every backward uses the very weights that its forward used. Slow.",
    )
    return parser


def config_from(args: Namespace) -> AsyncPPConfig | None:
    """The plugin's configuration from Megatron's parsed arguments, or None if no schedule was asked for."""
    if getattr(args, "asyncpp_schedule", None) is None:  # the flags may be unknown, see check()
        return None
    return AsyncPPConfig(
        name=args.asyncpp_schedule,
        error_feedback=args.asyncpp_error_feedback,
        error_feedback_on=args.asyncpp_error_feedback_on or "update",
        error_feedback_dtype=args.asyncpp_error_feedback_dtype or "fp32",
        delay_compensation=args.asyncpp_delay_compensation,
        muon_preset=args.asyncpp_muon_preset,
        check_versions=args.asyncpp_check_versions,
        lead=args.asyncpp_lead or "tight",
        blocking_step=args.asyncpp_blocking_step,
        skip_nonfinite=args.asyncpp_skip_nonfinite,
        sync_start=args.asyncpp_sync_start_iters,
        sync_cooldown=args.asyncpp_sync_cooldown_iters,
        eval_weights=args.asyncpp_eval_weights or "newest",
        trace=None if args.asyncpp_trace is None else Path(args.asyncpp_trace),
        trace_iterations=None if args.asyncpp_trace_iters is None else _iterations(args.asyncpp_trace_iters),
    )


def _iterations(text: str) -> tuple[int, int]:
    """The first and the last one of "A-B"."""
    numbers = re.fullmatch(r"([1-9]\d*)-([1-9]\d*)", text)
    first, last = map(int, numbers.groups()) if numbers else (1, 0)
    if first > last:
        raise AsyncPPError(
            f"{PREFIX}trace-iters {text} doesn't say which iterations to trace: give the first and the last, from 1 "
            f"on, such as 3-5"
        )
    return first, last


def config_of_saved(args: Namespace) -> AsyncPPConfig | None:
    """The same from the arguments in a checkpoint, which may be of a version of the plugin that had fewer flags."""
    defaults = add_arguments(ArgumentParser(add_help=False)).parse_args([])
    return config_from(Namespace(**(vars(defaults) | vars(args))))


def check(args: Namespace, argv: list[str]) -> None:
    """Check what the arguments ask for, before Megatron validates them and again after (when some have changed).

    Raises:
        AsyncPPError: the plugin can't honour it.
    """
    if not hasattr(args, "asyncpp_schedule"):
        if any(word.startswith(PREFIX) for word in argv):
            raise AsyncPPError(
                f"{PREFIX}* would be ignored: give flags in place of --yaml-cfg, which replaces them all, and call "
                f"megatron_asyncpp.install() before the arguments are parsed"
            )
        return
    config = config_from(args)
    if config is None:
        # An option that wasn't given is None, or False or a count of 0; a strength of 0.0 was given.
        for name in (
            "error_feedback",
            "error_feedback_dtype",
            "error_feedback_on",
            "delay_compensation",
            "muon_preset",
            "check_versions",
            "lead",
            "blocking_step",
            "skip_nonfinite",
            "sync_start_iters",
            "sync_cooldown_iters",
            "eval_weights",
            "trace",
            "trace_iters",
        ):
            value = getattr(args, f"asyncpp_{name}")
            if value is not None and (value or isinstance(value, float)):
                raise AsyncPPError(f"{PREFIX}{name.replace('_', '-')} needs a schedule: add {PREFIX}schedule 2bw")
        return
    _check_step(args)
    for refusal in REFUSALS:
        if refusal.applies(args):
            raise AsyncPPError(refusal.sentence())
    _check_corrections(args, config)
    _check_muon_preset(args, config)
    _check_synchronous_parts(args, config)
    _check_layers(args)
    _check_microbatches(args, config)
    _check_trace(args, config)
    inputs.check(args)


def _check_corrections(args: Namespace, config: AsyncPPConfig) -> None:
    strengths = {"error-feedback": config.error_feedback, "delay-compensation": config.delay_compensation}
    for flag, lam in strengths.items():
        if lam is None:
            continue
        if not (math.isfinite(lam) and lam >= 0):
            raise AsyncPPError(f"{PREFIX}{flag} {lam} is no strength of a correction: give a number from 0 on")
        if config.schedule.delay == 0:
            raise AsyncPPError(
                f"{PREFIX}{flag} corrects a delay, and {PREFIX}schedule {config.name} has none: "
                f"use {PREFIX}schedule 2bw, or leave it out"
            )
    if None not in strengths.values():
        raise AsyncPPError(
            f"{PREFIX}error-feedback and {PREFIX}delay-compensation both correct the same delay: leave one of them out"
        )
    for name in ("error_feedback_dtype", "error_feedback_on"):
        if getattr(args, f"asyncpp_{name}") is not None and config.error_feedback is None:
            raise AsyncPPError(
                f"{PREFIX}{name.replace('_', '-')} says how Error Feedback works, and there is none: "
                f"add {PREFIX}error-feedback, or leave it out"
            )


def _check_step(args: Namespace) -> None:
    for name in ("blocking_step", "skip_nonfinite"):
        if getattr(args, f"asyncpp_{name}") and RUNNABLE[args.asyncpp_schedule].delay == 0:
            raise AsyncPPError(
                f"{PREFIX}{name.replace('_', '-')} is about the optimizer step in two halves, and {PREFIX}schedule "
                f"{args.asyncpp_schedule} makes Megatron's own: use {PREFIX}schedule 2bw, or leave it out"
            )
    if args.asyncpp_lead is not None and RUNNABLE[args.asyncpp_schedule].delay == 0:
        raise AsyncPPError(
            f"{PREFIX}lead is about forwards of the next batch, and {PREFIX}schedule {args.asyncpp_schedule} runs none "
            f"ahead: use {PREFIX}schedule 2bw, or leave it out"
        )
    if args.asyncpp_eval_weights is not None and RUNNABLE[args.asyncpp_schedule].delay == 0:
        raise AsyncPPError(
            f"{PREFIX}eval-weights chooses between two versions of the weights, and {PREFIX}schedule "
            f"{args.asyncpp_schedule} has one: use {PREFIX}schedule 2bw, or leave it out"
        )
    if args.asyncpp_skip_nonfinite and args.check_for_nan_in_loss_and_grad:
        raise AsyncPPError(
            f"{PREFIX}skip-nonfinite would never skip, since Megatron's own check ends the run at the first gradient "
            f"that isn't finite: add --no-check-for-nan-in-loss-and-grad"
        )


def _check_muon_preset(args: Namespace, config: AsyncPPConfig) -> None:
    if config.muon_preset is not None and args.optimizer not in ("muon", "dist_muon"):
        raise AsyncPPError(
            f"{PREFIX}muon-preset sets Muon's settings, and the optimizer is {args.optimizer}: use --optimizer muon, "
            f"or leave it out"
        )


def _check_synchronous_parts(args: Namespace, config: AsyncPPConfig) -> None:
    for flag, count in (("sync-start-iters", config.sync_start), ("sync-cooldown-iters", config.sync_cooldown)):
        if count < 0:
            raise AsyncPPError(f"{PREFIX}{flag} {count} is no number of iterations: give one from 0 on")
        if count and config.schedule.delay == 0:
            raise AsyncPPError(
                f"{PREFIX}{flag} makes a part of an asynchronous run synchronous, and all of {PREFIX}schedule "
                f"{config.name} is: use {PREFIX}schedule 2bw, or leave it out"
            )
    if args.train_iters is not None and config.sync_start + config.sync_cooldown >= args.train_iters > 0:
        raise AsyncPPError(
            f"{PREFIX}sync-start-iters {config.sync_start} and {PREFIX}sync-cooldown-iters {config.sync_cooldown} "
            f"leave no asynchronous iteration of {args.train_iters}: lower them, or leave out {PREFIX}schedule"
        )


def _check_trace(args: Namespace, config: AsyncPPConfig) -> None:
    if config.trace is None:
        if config.trace_iterations is not None:
            raise AsyncPPError(f"{PREFIX}trace-iters says what to trace, and nothing is: add {PREFIX}trace DIR")
        return
    if config.trace_iterations and args.train_iters is not None and config.trace_iterations[0] > args.train_iters > 0:
        raise AsyncPPError(
            f"{PREFIX}trace-iters {args.asyncpp_trace_iters} begins after the last iteration, {args.train_iters}: give "
            f"earlier ones"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise AsyncPPError(f"{PREFIX}trace draws with matplotlib: pip install matplotlib, or leave it out")
    inputs.check_folder(f"{PREFIX}trace", config.trace)


def _check_layers(args: Namespace) -> None:
    """Megatron stops at a layout that doesn't fit in an assertion of each rank."""
    layout, stages = args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size
    if args.num_layers is None or getattr(args, "hybrid_layer_pattern", None) is not None:
        return  # Megatron takes their number from elsewhere
    if isinstance(layout, str):
        chunks = len(chunks_of(layout))
        # Several chunks on each stage are refused once Megatron has made something of them.
        stages_of(layout, args.num_layers, stages if chunks % stages else chunks)
    elif layout is None and stages > 1:
        counted = (
            args.num_layers + args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
        )
        even_stages(counted, stages, args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers)


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
    microbatches = _first_delayed_microbatches(args, config, replicas)
    least = config.schedule.least_microbatches(stages)
    if microbatches < least:
        enough = least * args.micro_batch_size * replicas
        larger = (
            f"raise --global-batch-size to at least {enough}"
            if args.step_batch_size_schedule is None
            else f"begin --step-batch-size-schedule with at least {enough}, raise {PREFIX}sync-start-iters"
        )
        needs, wide = f"{PREFIX}schedule {config.name} needs at least as many microbatches as pipeline stages", ""
        if config.lead == "wide":
            needs, wide = f"{PREFIX}lead wide needs at least 2P-1 microbatches for P pipeline stages", ", leave it out"
        raise AsyncPPError(
            f"{needs}, but there are {microbatches} microbatches for {stages} stages: {larger}{wide}, or lower "
            f"--micro-batch-size or --pipeline-model-parallel-size"
        )


def _first_delayed_microbatches(args: Namespace, config: AsyncPPConfig, replicas: int) -> int:
    """M of the first iteration that isn't synchronous; Megatron lets it only grow from there."""
    per_microbatch: int = args.micro_batch_size * replicas
    if args.step_batch_size_schedule is None:
        return int(args.global_batch_size or per_microbatch) // per_microbatch
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    calculator = StepBatchsizeNumMicroBatchesCalculator(
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=replicas,
        decrease_batch_size_if_needed=False,
        rank=-1,  # only rank 0 logs
        schedule=args.step_batch_size_schedule,
        seq_length=args.seq_length,
    )
    consumed = 0
    for _ in range(config.sync_start):
        consumed += calculator.get() * per_microbatch
        calculator.update(consumed, consistency_check=False)
    return int(calculator.get())
