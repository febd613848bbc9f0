"""What each rank of a peer runs: ``torch.distributed.pipelining`` on stages that sleep as Megatron's do in this bench.

An iteration is what a training loop around such a schedule does: the schedule's step, the norm of all gradients over
all ranks, clipping by it, and the optimizer's step. Its time is printed as Megatron prints its own.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import pipelining

from scripts.bench import latency
from scripts.bench.timed import TimedStep, report

_WIDTH = 16
_CLIP = 1.0


def main(
    schedule: str,
    chunks: int,
    microbatches: int,
    iterations: int,
    forward: float,
    backward: float,
    warm_up: int,
    message: float,
    folder: Path,
) -> None:
    """Train on a peer's schedule, and print a line for each iteration and a report for the bench.

    Args:
        schedule: the name of its class.
        chunks: stages on each rank; with more than one, stage i is on rank i modulo P.
        microbatches: M.
        iterations: to run.
        forward: seconds that each forward lasts at least, of one stage.
        backward: the same of each backward; where it has two parts, each lasts half of it.
        warm_up: calls of each that the report leaves out.
        message: seconds until a message can be seen.
        folder: the run's own.
    """
    dist.init_process_group("gloo")
    if message:
        latency.install(message, folder)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    stages = [_stage(rank + chunk * ranks, chunks * ranks) for chunk in range(chunks)]
    steps = _timed(stages, forward, backward)
    kind = getattr(pipelining, schedule)
    loss = torch.nn.functional.mse_loss
    pipeline: Any = kind(stages if chunks > 1 else stages[0], microbatches, loss_fn=loss)
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    batch = torch.randn(microbatches, _WIDTH)
    dist.barrier()
    began = time.perf_counter()
    for iteration in range(1, iterations + 1):
        inputs = [batch] if any(stage.is_first for stage in stages) else []
        pipeline.step(*inputs, target=batch if any(stage.is_last for stage in stages) else None)
        _clip(parameters)
        optimizer.step()
        optimizer.zero_grad()
        ended = time.perf_counter()
        elapsed, began = 1000 * (ended - began), ended
        if rank == ranks - 1:
            print(
                f" iteration {iteration:8d}/{iterations:8d} | elapsed time per iteration (ms): {elapsed:.1f} |",
                flush=True,
            )
    report(steps, warm_up)


def _stage(index: int, stages: int) -> pipelining.PipelineStage:
    """One stage of two small layers; what goes in and out is given, so that nothing is exchanged to find it."""
    module = torch.nn.Sequential(torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.Tanh(), torch.nn.Linear(_WIDTH, _WIDTH))
    received = torch.zeros(1, _WIDTH, requires_grad=index > 0)
    sent = torch.zeros(1, _WIDTH, requires_grad=True)
    return pipelining.PipelineStage(module, index, stages, torch.device("cpu"), input_args=received, output_args=sent)


def _timed(stages: list[Any], forward: float, backward: float) -> dict[str, TimedStep]:
    """Make the computations of stages last their time; those of all stages of this rank are counted together."""
    steps: dict[str, TimedStep] = {}
    for stage in stages:
        whole, part = stage.backward_one_chunk, TimedStep(stage.backward_one_chunk, backward / 2)
        full = TimedStep(whole, backward)

        def either(
            *args: Any, full: TimedStep = full, part: TimedStep = part, full_backward: bool = True, **named: Any
        ) -> Any:
            step = full if full_backward else part
            return step(*args, full_backward=full_backward, **named)

        own = {
            "forward": TimedStep(stage.forward_one_chunk, forward),
            "backward": full,
            "inputs": part,
            "weights": TimedStep(stage.backward_weight_one_chunk, backward / 2),
        }
        stage.forward_one_chunk, stage.backward_one_chunk = own["forward"], either
        stage.backward_weight_one_chunk = own["weights"]
        steps |= {f"{name} of stage {stage.stage_index}": step for name, step in own.items()}
    return steps


def _clip(parameters: list[torch.nn.Parameter]) -> None:
    """Clip all gradients by the norm of the whole model, which every rank needs all the others for."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    squares = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    dist.all_reduce(squares)
    scale = min(1.0, _CLIP / (float(squares.sqrt()) + 1e-6))
    for gradient in gradients:
        gradient.mul_(scale)
