"""Watches Megatron's training loop in a rank and fills in its RankResult."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker
from megatron.core.utils import unwrap_model
from megatron.training import get_args, training

from tests.harness.fixture import BIASES, inner_optimizers
from tests.harness.results import Action, RankResult, Weights, renumber


class Recorder:
    """Wraps the functions of megatron.training.training that the loop calls; changes nothing of what they do."""

    def __init__(self, result: RankResult, initial: Weights | None) -> None:
        self.result, self.initial, self.model = result, initial, []
        self.norms: list[float] = []  # of the plugin's outcomes

    def install(self) -> None:
        """Wrap whatever set-up and train_step are in place now: call this after the mode's own patches."""
        setup, train_step = training.setup_model_and_optimizer, training.train_step

        @functools.wraps(setup)
        def watched_setup(*args: Any, **kwargs: Any) -> Any:
            model, optimizer, _ = built = setup(*args, **kwargs)
            self.start(model, optimizer)
            return built

        @functools.wraps(train_step)
        def watched_step(*args: Any, **kwargs: Any) -> Any:
            returned = train_step(*args, **kwargs)
            loss, norm = returned[0].get("lm loss"), returned[5]
            self.result.losses.append(None if loss is None else float(loss))
            self.result.grad_norms.append(None if norm is None else float(norm))
            return returned

        training.setup_model_and_optimizer, training.train_step = watched_setup, watched_step

        log_scalars = MoEMetricsTracker._log_scalars

        @functools.wraps(log_scalars)
        def watched_scalars(self_: Any, scalars: dict, iteration: int, *args: Any) -> None:
            if scalars:
                self.result.metrics[iteration] = {name: float(value) for name, value in scalars.items()}
            log_scalars(self_, scalars, iteration, *args)

        MoEMetricsTracker._log_scalars = watched_scalars

    def watch_outcomes(self, pipeline: type) -> None:
        """Take each batch's norm from the plugin's outcomes, since train_step may return before it is known."""
        take = pipeline.take_outcomes

        def watched(self_: Any) -> Any:
            outcomes = take(self_)
            # train_step reports it through an fp32 tensor
            self.norms.extend(torch.tensor(outcome.grad_norm).item() for outcome in outcomes)
            self.result.skipped.extend(outcome.batch for outcome in outcomes if outcome.skipped)
            return outcomes

        pipeline.take_outcomes = watched

    def start(self, model: list[torch.nn.Module], optimizer: Any) -> None:
        """The model exists and has not run: put in the given weights, take a copy, listen to the first optimizer."""
        self.model, result = model, self.result
        result.pipeline_rank = mpu.get_pipeline_model_parallel_rank()
        result.tensor_rank = mpu.get_tensor_model_parallel_rank()
        result.splits = {n: (p.partition_dim, p.partition_stride) for n, p in named(model) if is_split(p)}
        result.tied = not get_args().untie_embeddings_and_output_weights
        numbers = [m.layer_number for chunk in model for m in chunk.modules() if hasattr(m, "self_attention")]
        result.layer_offset = min(numbers, default=1) - 1
        experts = next((m.num_local_experts for c in model for m in c.modules() if hasattr(m, "local_experts")), 0)
        result.expert_offset = mpu.get_expert_model_parallel_rank() * experts
        if optimizer is None:
            return
        if self.initial is not None:
            load(model, self.initial, result.layer_offset, result.expert_offset)
            optimizer.reload_model_params()
        result.initial = weights(model)
        for inner in list(inner_optimizers(optimizer))[:1]:
            inner.register_step_pre_hook(lambda inner, *_: result.learning_rates.append(inner.param_groups[0]["lr"]))

    def end(self) -> None:
        """Training is over: copy the weights."""
        self.result.grad_norms = self.norms or self.result.grad_norms
        if self.model and not self.result.final:
            self.result.final = weights(self.model)
        main = ((n, getattr(t, "main_param", None)) for n, t in named(self.model))
        self.result.masters = {n: t.detach().clone() for n, t in main if t is not None}

    def observe(self, action: Any) -> None:
        """Called by the plugin's runtime with each action of its plan as it runs it."""
        fields = {name: getattr(action, name, None) for name in ("batch", "microbatch", "version")}
        self.result.actions.append(Action(type(action).__name__, **fields))


def named(model: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of every chunk: parameters and biases of routers."""
    for i, chunk in enumerate(unwrap_model(model)):
        prefix = f"chunk{i}." if len(model) > 1 else ""
        yield from ((prefix + n, p) for n, p in chunk.named_parameters())
        yield from ((prefix + n, b) for n, b in chunk.named_buffers() if n.endswith(BIASES))


def is_split(weight: torch.Tensor) -> bool:
    """Whether the ranks of a tensor-parallel group hold different parts of it."""
    return bool(getattr(weight, "tensor_model_parallel", False)) and mpu.get_tensor_model_parallel_world_size() > 1


def weights(model: list[torch.nn.Module]) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in named(model)}


@torch.no_grad()
def load(model: list[torch.nn.Module], initial: Weights, layers: int, experts: int) -> None:
    """Copy weights with global numbers of layers and experts into this rank."""
    for name, tensor in named(model):
        source = renumber(name, layers, experts)
        if source == "output_layer.weight" and source not in initial:
            source = "embedding.word_embeddings.weight"  # tied: the last stage has a copy
        tensor.copy_(initial[source])
