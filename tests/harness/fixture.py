"""The fixture: Megatron's own flushed loop, with the older weights put in by hand around forward and backward.

It knows nothing of pipelines, so it works on any topology, precision and optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.optimizer import layer_wise_optimizer
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.utils import get_model_config
from megatron.training import get_args, training

from tests.harness.reference import Reference

BIASES = (".expert_bias", ".qb_beta", ".user_bias")  # the last is a test's own


def install(reference: Reference) -> None:
    """Replace training.train_step by one whose batch k runs on W(k), with corrections by hand around each step."""
    if reference.exact_norm:
        for module in (megatron_optimizer, layer_wise_optimizer):
            module.get_grad_norm_fp32 = exact_norm
    train_step = training.train_step
    history: list[list[torch.Tensor]] = []  # history[k] is V(k)

    @functools.wraps(train_step)
    def delayed(
        step: Callable, data: Any, model: list, optimizer: Any, scheduler: Any, config: Any, run: Callable, **kw
    ):
        if not history and (reference.error_feedback, reference.delay_compensation) != (None, None):
            for inner in inner_optimizers(optimizer):
                correct(inner, reference)
        weights = [p for m in model for p in m.parameters()] + [b for m in model for b in biases(m)]
        history.append([w.detach().clone() for w in weights])
        older = reference.version(len(history) - 1, get_args().train_iters)

        def on_older_weights(**arguments: Any) -> Any:
            holder = get_model_config(model[0])
            finalize = holder.finalize_model_grads_func

            def put_back_first(*args: Any, **kwargs: Any) -> Any:
                put(weights, history[-1])  # Megatron's expert-bias update is in finalize: it must see the newest
                return finalize(*args, **kwargs)

            put(weights, history[older])
            holder.finalize_model_grads_func = put_back_first
            try:
                return run(**arguments)
            finally:
                holder.finalize_model_grads_func = finalize

        return train_step(step, data, model, optimizer, scheduler, config, on_older_weights, **kw)

    training.train_step = delayed


def exact_norm(grads: list[torch.Tensor], norm_type: float = 2, grad_stats_parallel_group: Any = None) -> float:
    """Megatron's get_grad_norm_fp32 with the squares summed in fp64."""
    total = sum((g.double().pow(2).sum() for g in grads), start=torch.zeros([], dtype=torch.float64)).view(1)
    torch.distributed.all_reduce(total, group=grad_stats_parallel_group)
    return total.item() ** 0.5


def put(weights: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy values into the storages the model reads."""
    for weight, value in zip(weights, values, strict=True):
        weight.data.copy_(value)


def biases(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Biases of routers: weights that are no parameters."""
    return (buffer for name, buffer in model.named_buffers() if name.endswith(BIASES))


def inner_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """The raw torch optimizers at the leaves of Megatron's nested ones."""
    if hasattr(optimizer, "chained_optimizers"):
        for chained in optimizer.chained_optimizers:
            yield from inner_optimizers(chained)
    elif optimizer.optimizer is not None:
        yield optimizer.optimizer


def correct(inner: torch.optim.Optimizer, reference: Reference) -> None:
    """Wrap inner.step as the reference says.

    Error Feedback: V(k+1) = V(k) - u_k - lam * (u_k - u_{k-1}), u_k being what the step alone did; or the step is given
    g_k + lam * (g_k - g_{k-1}). DC-ASGD: the step is given g + lam * g * g * (V(k) - W(k)).
    """
    step, last, versions, count = inner.step, {}, {}, iter(range(1 << 30))
    on_update = reference.error_feedback is not None and reference.feedback_on == "update"
    on_gradient = reference.error_feedback is not None and reference.feedback_on == "gradient"

    @torch.no_grad()
    def corrected(*args: Any, **kwargs: Any) -> Any:
        k, batches = next(count), get_args().train_iters
        stepped = [p for group in inner.param_groups for p in group["params"] if p.grad is not None]
        before = [p.detach().clone() for p in stepped]
        lam = reference.correction(k, batches)
        for p, old in zip(stepped, before, strict=True):
            g = p.grad.clone()
            if reference.delay_compensation is not None:
                versions.setdefault(p, []).append(old)  # versions[p][k] is V(k)
                read = versions[p][reference.version(k, batches)]
                p.grad.copy_(g + reference.delay_compensation * g * g * (old - read))
            if on_gradient:
                if lam is not None:
                    p.grad.copy_(g + lam * (g - last.get(p, torch.zeros_like(g))))
                last[p] = g.to(reference.feedback_dtype)
        result = step(*args, **kwargs)
        for p, old in zip(stepped, before, strict=True):
            u = old - p
            if on_update:
                if lam is not None:
                    p.sub_(lam * (u - last.get(p, torch.zeros_like(u))))
                last[p] = u.to(reference.feedback_dtype)
        return result

    inner.step = corrected
