"""Hooks of the harness about what batches and versions keep besides parameters: watched, declared, or got wrong."""

from __future__ import annotations

from typing import Any

from tests.faults import poison_batch_three
from tests.harness.results import RankResult


def poison_batch_three_and_watch_biases(result: RankResult) -> None:
    """Poison batch three; keep the routers' newest biases after each step, and what is left of the batch's counts."""
    poison_batch_three()
    import torch

    from megatron_asyncpp.runtime.step import TwoHalfStep

    finish = TwoHalfStep.finish
    result.extra["biases"] = biases = []

    def watched(self: TwoHalfStep, keep: bool) -> Any:
        outcome = finish(self, keep)
        self._ring.lend(self._ring.newest)
        routers = [module for module in self._model.modules() if hasattr(module, "expert_bias")]
        with self._state.of(outcome.batch):
            left = sum(float(router.local_tokens_per_expert.sum()) for router in routers)
        biases.append((torch.stack([router.expert_bias.clone() for router in routers]), left))
        return outcome

    TwoHalfStep.finish = watched  # type: ignore[method-assign]


def without_batch_state() -> None:
    """Let all batches gather in the same place."""
    from megatron_asyncpp.runtime.batch_state import BatchState

    def lend(self: BatchState, batch: Any) -> None:
        pass

    def clear(self: BatchState, batch: Any) -> None:
        for place in self._places:
            place.clear(place.get())

    BatchState.lend, BatchState.clear = lend, clear  # type: ignore[method-assign]


def without_switch_before_a_backward() -> None:
    """Let a backward gather for the batch of the forward before it."""
    from megatron_asyncpp.runtime.pipeline import Pipeline
    from megatron_asyncpp.schedules.actions import Backward

    lend = Pipeline._lend

    def wrong(self: Pipeline, action: Any) -> None:
        if isinstance(action, Backward):
            self._ring.lend(action.version)
        else:
            lend(self, action)

    Pipeline._lend = wrong  # type: ignore[method-assign]


def without_versions_of_biases() -> None:
    """Let all versions of the weights have the same biases of routers."""
    from megatron_asyncpp.runtime.weights import WeightRing

    start = WeightRing.__init__

    def init(self: WeightRing, *args: Any, buffers: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)

    WeightRing.__init__ = init  # type: ignore[method-assign]


def without_copy_of_biases() -> None:
    """Let the next version of a bias be made from what is in its buffer: an older version."""
    from megatron_asyncpp.runtime.weights import WeightRing

    start = WeightRing.__init__

    def init(self: WeightRing, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self._buffers = ()

    WeightRing.__init__ = init  # type: ignore[method-assign]


def add_stateful_module() -> None:
    """Give every transformer layer a module with a sum over its batch and a bias that follows it, not declared.

    Whoever ends a batch calls the module's ``end_of_batch``, in Megatron's own loop as under a schedule.
    """
    import torch
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from megatron.training import training

    class Stateful(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1), persistent=False)
            self.register_buffer("user_bias", torch.zeros(1))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            if self.training and torch.is_grad_enabled():
                self.seen = self.seen + hidden.detach().mean()  # assigned, not changed in place
            return hidden * (1 + self.user_bias) + torch.tanh(100 * self.seen)

        def end_of_batch(self) -> None:
            self.user_bias.add_(torch.tanh(100 * self.seen), alpha=0.5)
            self.seen.zero_()

    start, forward, finalize = TransformerLayer.__init__, TransformerLayer.forward, training.finalize_model_grads

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self.extra = Stateful()

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden, context = forward(self, *args, **kwargs)
        return self.extra(hidden), context

    def end(model: list, *args: Any, **kwargs: Any) -> None:
        finalize(model, *args, **kwargs)
        for module in model[0].modules():
            if isinstance(module, Stateful):
                module.end_of_batch()

    TransformerLayer.__init__, TransformerLayer.forward, training.finalize_model_grads = init, run, end


def declare_stateful_module() -> None:
    """As above, and declared."""
    _declare(per_batch=["seen"], per_version=["user_bias"], update="end_of_batch")


def declare_only_the_sum() -> None:
    """As above, but the bias is forgotten."""
    _declare(per_batch=["seen"])


def _declare(**state: Any) -> None:
    add_stateful_module()
    from megatron.core.transformer.transformer_layer import TransformerLayer

    import megatron_asyncpp

    start = TransformerLayer.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        megatron_asyncpp.declare_state(self.extra, **state)

    TransformerLayer.__init__ = init
