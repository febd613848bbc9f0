"""Mixtures of experts in Megatron's loop: what its finalize_model_grads does to routers is left to the step.

There it would find the counts of two batches, change a bias that the next batch still reads, and zero what the next
batch has counted so far. In an asynchronous run the same functions run in the second half of the step, for one batch.
"""

from __future__ import annotations

import functools
import importlib
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from megatron_asyncpp.integration.patching import VERSIONS, Patch

_MODULE = "megatron.core.distributed.finalize_model_grads"


def router_updates(model: Any) -> list[Callable[[], None]]:
    """What makes the next version of a model chunk's router biases from what a batch counted: Megatron's functions."""
    from megatron.core.pipeline_parallel.schedules import _build_default_pg_collection
    from megatron.core.utils import get_model_config

    module = importlib.import_module(_MODULE)  # the package has a function of the same name
    config, groups = get_model_config(model), _build_default_pg_collection()
    updates: list[Callable[[], None]] = []
    if config.moe_router_enable_expert_bias:
        updates.append(lambda: module._update_router_expert_bias([model], config, tp_dp_cp_group=groups.tp_dp_cp))
    if config.moe_router_load_balancing_type == "quantile_balancing":
        replicas = getattr(groups, "dp_cp_gtp_remat", None) or groups.dp_cp
        updates.append(lambda: module._update_router_qb_beta([model], config, dp_cp_group=replicas))
    return updates


def report(metrics: Any, sums: Sequence[float], iteration: int, microbatches: int) -> dict[str, float]:
    """Write the figures of an iteration to TensorBoard and Weights & Biases. Returns the means, by name.

    Args:
        metrics: a ``MoEMetrics``.
        sums: over all ranks, as its ``figures`` were summed.
        iteration: that they belong to.
        microbatches: in that iteration.
    """
    from megatron.training import get_args
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    args = get_args()
    return dict(
        metrics.report(
            sums,
            microbatches,
            iteration=iteration,
            writer=get_tensorboard_writer(),
            wandb_writer=get_wandb_writer(),
            per_layer_logging=args.moe_per_layer_logging,
            num_layers=_moe_layers(args),
            moe_layer_freq=args.moe_layer_freq,
        )
    )


def _moe_layers(args: Namespace) -> int:
    """How many layers Megatron's training_log takes for the mean; of a hybrid model, those with experts."""
    from megatron.training.utils import is_hybrid_model

    if not is_hybrid_model(args):
        return int(args.num_layers)
    from megatron.core.ssm.mamba_hybrid_layer_allocation import Symbols, get_hybrid_layer_counts

    return int(get_hybrid_layer_counts(args.hybrid_layer_pattern)[Symbols.MOE])


def _left_to_the_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def in_the_step(*positional: Any, **named: Any) -> Any:
        from megatron_asyncpp.integration.run import in_halves

        run = in_halves()
        return original(*positional, **named) if run is None or run.state.updating else None

    return in_the_step


LEFT_TO_THE_STEP = tuple(
    Patch(f"{_MODULE}:{name}", _left_to_the_step, why, VERSIONS)
    for name, why in {
        "_update_router_expert_bias": "makes the next version of a bias when the next version of the weights is made",
        "_update_router_qb_beta": "makes the next version of a bias when the next version of the weights is made",
        "reset_model_temporary_tensors": "a batch's counts are zeroed after its step, and not those of the next batch",
    }.items()
)
