"""Bytes that each stage takes on a GPU, by what they are for."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, fields
from functools import cache

from megatron_asyncpp.arguments import config_from
from megatron_asyncpp.errors import AsyncPPError
from megatron_asyncpp.planning.activations import stage_activations
from megatron_asyncpp.planning.flags import Request, schedule_of
from megatron_asyncpp.planning.layout import Layout
from megatron_asyncpp.planning.parameters import Count, stage_parameters
from megatron_asyncpp.schedules import Schedule
from megatron_asyncpp.schedules.simulate import simulate

WEIGHT, MASTER = 2, 4  # bytes: bf16, and fp32 for all that an optimizer keeps
# Bytes that an optimizer keeps for a parameter besides the master weight: for a matrix, and for the rest.
_STATES = {"adam": (8, 8), "sgd": (4, 4), "lion": (4, 4), "muon": (4, 8)}


@dataclass(frozen=True)
class Row:
    """One rank of a stage: parameters, and bytes.

    Attributes:
        stage: its number.
        layers: in it.
        parameters: on this rank.
        masters: fp32 weights that this rank's optimizer steps.
        weights: bf16.
        second_buffer: the other version of the weights. The last stage has one from the first evaluation or
            checkpoint on.
        gradients: Megatron's buffer of them.
        optimizer: master weights and states.
        error_feedback: the last update.
        gradient_copy: what waits for the gradient norm.
        step: what Error Feedback copies while it steps: all masters, as with a fused Adam. Torch's own optimizers and
            Muon step in parts (``optim/streaming.py``), and take less.
        microbatches: in flight, at the peak.
        activations: of those.
    """

    stage: int
    layers: int
    parameters: int
    masters: int
    weights: int
    second_buffer: int
    gradients: int
    optimizer: int
    error_feedback: int
    gradient_copy: int
    step: int
    microbatches: int
    activations: int

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        return sum(getattr(self, name) for name in BYTES)

    def as_json(self) -> dict[str, int]:
        """All figures by name, and the total."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"total": self.total}


# The columns that add up.
BYTES = (
    *("weights", "second_buffer", "gradients", "optimizer", "error_feedback", "gradient_copy", "step", "activations"),
)


def memory(request: Request) -> list[Row]:
    """What a rank of each stage takes, from the first stage to the last.

    Raises:
        AsyncPPError: it isn't known what the optimizer keeps.
    """
    args, layout = request.args, request.layout
    if args.optimizer not in _STATES:
        raise AsyncPPError(
            f"it isn't known here what --optimizer {args.optimizer} keeps: plan with one of {', '.join(_STATES)}"
        )
    live = _in_flight(args, layout, request.microbatches)
    again = args.recompute_num_layers if args.recompute_granularity == "full" else None
    activations = stage_activations(request.model, layout, args.micro_batch_size, again)
    counts = stage_parameters(request.model, layout)
    return [
        _row(stage, count, args, layout, live[stage], activations[stage].kept * live[stage] + here)
        for stage, count in enumerate(counts)
        for here in [activations[stage].recomputed + activations[stage].loss]
    ]


def _in_flight(args: Namespace, layout: Layout, microbatches: int) -> tuple[int, ...]:
    """Microbatches between forward and backward on each stage, at the peak.

    They don't depend on the number of microbatches once there are as many as the schedule needs, or as stages.
    """
    schedule = schedule_of(args)
    enough = max(layout.pipeline, schedule.least_microbatches(layout.pipeline))
    return _simulated(schedule, layout.pipeline, min(microbatches, enough))


@cache
def _simulated(schedule: Schedule, stages: int, microbatches: int) -> tuple[int, ...]:
    return tuple(simulate(schedule, stages, microbatches).peak_activations)


def _row(stage: int, count: Count, args: Namespace, layout: Layout, live: int, activations: int) -> Row:
    config = config_from(args)
    delayed = config is not None and config.schedule.delay > 0
    feedback = config.error_feedback if config is not None and delayed else None
    kept = MASTER if config is None or config.error_feedback_dtype == "fp32" else WEIGHT
    dense, experts = (layout.replicas, layout.expert_replicas) if args.use_distributed_optimizer else (1, 1)
    matrices, rest = _STATES[args.optimizer]
    masters = -(-count.dense // dense) - (-count.experts // experts)
    states = -(-count.matrices * matrices // dense) - (-count.others * rest // dense)
    states -= -count.experts * matrices // experts
    return Row(
        stage=stage,
        layers=layout.stages[stage],
        parameters=count.total,
        masters=masters,
        weights=WEIGHT * count.total,
        second_buffer=WEIGHT * count.total if delayed else 0,
        gradients=(WEIGHT if args.grad_reduce_in_bf16 else MASTER) * count.total,
        optimizer=MASTER * masters + states,
        error_feedback=kept * masters if feedback is not None else 0,
        gradient_copy=MASTER * masters if delayed and float(args.clip_grad) > 0 else 0,
        step=MASTER * masters if feedback is not None else 0,
        microbatches=live,
        activations=activations,
    )
