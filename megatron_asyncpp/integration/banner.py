"""What rank 0 prints at the start of a run: the plan, what it should cost and gain, and the optimizer in force."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state

from megatron_asyncpp.arguments import AsyncPPConfig
from megatron_asyncpp.schedules import slowdown

# The usual ratio: a backward computes the gradients of its inputs and of its weights.
_BACKWARD_OVER_FORWARD = 2.0


def text(config: AsyncPPConfig, extra_bytes: int, microbatches: int, optimizers: list[torch.optim.Optimizer]) -> str:
    """The start-up lines.

    Args:
        config: the schedule and its options.
        extra_bytes: of the rank that needs most, on top of synchronous training.
        microbatches: M.
        optimizers: the inner torch optimizers of rank 0.
    """
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    flushed = slowdown.one_f_one_b(stages, microbatches)
    if config.schedule.delay:
        own = slowdown.two_bw_blocking(stages, microbatches, _BACKWARD_OVER_FORWARD)
        cause = "one wait for all stages in each optimizer step"
    else:
        own, cause = flushed, "a flush after each batch"
    feedback = "off" if config.error_feedback is None else f"lambda {config.error_feedback:g}"
    lines = [
        f"schedule {config.name}: P = {stages} stages, M = {microbatches} microbatches, "
        f"delay {config.schedule.delay} step(s), {config.schedule.versions} weight version(s), "
        f"Error Feedback {feedback}",
        f"predicted slowdown over a pipeline without bubble, if a backward takes twice a forward: "
        f"1F1B {flushed:.3f}, this run {own:.3f} ({cause})",
        f"extra memory against synchronous training: {extra_bytes / 1e6:.1f} MB on the rank that needs most",
        *(f"optimizer {_describe(optimizer)}" for optimizer in optimizers),
    ]
    if config.check_versions:
        lines.append("every backward checks that it uses the weights of its forward (slow)")
    return "\n".join(f"megatron_asyncpp: {line}" for line in lines)


def _describe(optimizer: torch.optim.Optimizer) -> str:
    """An optimizer's class and every setting of its first parameter group that is a plain value."""
    group: dict[str, Any] = optimizer.param_groups[0]
    plain = (bool, int, float, str, tuple)
    settings = [f"{key}={value}" for key, value in sorted(group.items()) if isinstance(value, plain)]
    parameters = sum(p.numel() for g in optimizer.param_groups for p in g["params"])
    return f"{type(optimizer).__name__} ({parameters} parameters on rank 0): {', '.join(settings)}"
