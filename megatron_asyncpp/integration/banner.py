"""What rank 0 prints at the start of a run: the plan, what it should cost and gain, and the optimizer in force."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_asyncpp import muon_preset
from megatron_asyncpp.arguments import PREFIX, AsyncPPConfig
from megatron_asyncpp.schedules import slowdown

# The usual ratio: a backward computes the gradients of its inputs and of its weights.
_BACKWARD_OVER_FORWARD = 2.0


def text(
    config: AsyncPPConfig,
    extra_bytes: int,
    microbatches: int,
    optimizers: list[torch.optim.Optimizer],
    argv: list[str],
    waits: list[str],
    continued: list[str],
) -> str:
    """The start-up lines.

    Args:
        config: the schedule and its options.
        extra_bytes: of the rank that needs most, on top of synchronous training.
        microbatches: M.
        optimizers: the inner torch optimizers of rank 0.
        argv: the command line, which says what a preset left alone.
        waits: the flags given that bring a part of the bubble back.
        continued: lines about the checkpoint that is continued.
    """
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    flushed = slowdown.one_f_one_b(stages, microbatches)
    interleaved = slowdown.interleaved(stages, microbatches, virtual_stages=2)
    if config.blocking_step:
        own = slowdown.two_bw_blocking(stages, microbatches, _BACKWARD_OVER_FORWARD)
        cause = "one wait for all stages in each optimizer step"
    elif config.schedule.delay:
        own, cause = 1.0, "no flush, and no wait for all stages"
    else:
        own, cause = flushed, "a flush after each batch"
    lines = [
        f"schedule {config.name}{', wide lead' * config.schedule.ahead}: P = {stages} stages, "
        f"M = {microbatches} microbatches, delay {config.schedule.delay} step(s), "
        f"{config.schedule.versions(0, stages)} weight version(s), "
        f"{config.correction()}",
        f"predicted slowdown over a pipeline without bubble, if a backward takes twice a forward: "
        f"1F1B {flushed:.3f}, interleaved 1F1B with 2 chunks per stage {interleaved:.3f}, this run {own:.3f} ({cause})",
        f"extra memory against synchronous training: {extra_bytes / 1e6:.1f} MB on the rank that needs most",
        *(f"optimizer {_describe(optimizer)}" for optimizer in optimizers),
    ]
    lines.extend(continued)
    if config.sync_start or config.sync_cooldown:
        lines.append(f"synchronous: the first {config.sync_start} and the last {config.sync_cooldown} iterations")
    if config.muon_preset is not None:
        lines.append(f"{PREFIX}muon-preset {config.muon_preset} sets {muon_preset.described(config.muon_preset, argv)}")
    if config.error_feedback_on == "gradient":
        lines.append(
            f"warning: {PREFIX}error-feedback-on gradient is the paper's ablation, not Error Feedback: it corrects the "
            f"gradient before the optimizer's step, in place of the update"
        )
    if config.skip_nonfinite:
        lines.append("an update is skipped on all stages if a gradient isn't finite")
    lines.extend(
        f"warning: {flag} lets all stages wait for each other, in every iteration or in each that is logged"
        for flag in waits
    )
    if config.check_versions:
        lines.append("every backward checks that it uses the weights of its forward (slow)")
    return "\n".join(f"megatron_asyncpp: {line}" for line in lines)


def _describe(optimizer: torch.optim.Optimizer) -> str:
    """An optimizer's class, and every setting that is a plain value, of its own and of its first parameter group."""
    settings: dict[str, Any] = {}
    if hasattr(optimizer, "scaled_orthogonalize_fn"):
        # Muon's coefficients, steps and scale are nowhere but in this closure.
        settings |= inspect.getclosurevars(optimizer.scaled_orthogonalize_fn).nonlocals
    settings |= {name: value for name, value in vars(optimizer).items() if not name.startswith("_")}
    settings |= optimizer.param_groups[0]
    plain = (bool, int, float, str, tuple)
    written = [f"{key}={value}" for key, value in sorted(settings.items()) if isinstance(value, plain)]
    parameters = sum(p.numel() for g in optimizer.param_groups for p in g["params"])
    return f"{type(optimizer).__name__} ({parameters} parameters on rank 0): {', '.join(written)}"
