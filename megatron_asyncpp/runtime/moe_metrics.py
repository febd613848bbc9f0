"""The figures of mixtures of experts that Megatron logs: auxiliary losses and z-loss, by layer.

Megatron sums each over the pipeline when it logs an iteration, which waits for all stages. Here a batch's figures are
summed over all ranks with the other sums of its optimizer step, and are logged once they have arrived.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, override

import torch
from megatron.core.transformer.moe.moe_logging import (
    MetricEntry,
    MoEMetricsTracker,
    get_moe_metrics_tracker,
    set_moe_metrics_tracker,
)

from megatron_asyncpp.runtime.batch_state import Place

_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


class TrackerPlace(Place):
    """Megatron's one tracker of the process, to which routers add as they run."""

    @override
    def get(self) -> MoEMetricsTracker:
        return get_moe_metrics_tracker()

    @override
    def put(self, content: MoEMetricsTracker) -> None:
        set_moe_metrics_tracker(content)

    @override
    def empty(self, content: MoEMetricsTracker) -> MoEMetricsTracker:
        return MoEMetricsTracker()

    @override
    def copy(self, content: MoEMetricsTracker) -> MoEMetricsTracker:
        copied = MoEMetricsTracker()
        copied.metrics.update(
            {name: replace(entry, values=entry.values.clone()) for name, entry in content.metrics.items()}
        )
        return copied

    @override
    def clear(self, content: MoEMetricsTracker) -> None:
        content.clear()


class SummedTracker(MoEMetricsTracker):
    """A tracker of figures that are summed over all ranks already."""

    @override
    def _sync_metrics(self, *_: Any, **__: Any) -> None:
        pass


@dataclass(frozen=True)
class MoEMetrics:
    """Which figures a run logs.

    Attributes:
        names: of them, as Megatron's training_log lists them.
        layers: of the whole model, dense ones included.
    """

    names: tuple[str, ...] = ()
    layers: int = 0

    @classmethod
    def of(cls, args: Namespace) -> MoEMetrics:
        """Those that Megatron logs with these arguments; none for a dense model."""
        if args.num_experts is None:
            return cls()
        # In a list this asks for an element; a single type is a string, in which Megatron finds "aux_loss" in others.
        types = args.moe_router_load_balancing_type
        names = [name for type_, name in _NAMES.items() if type_ in types]
        names += ["z_loss"] if args.moe_z_loss_coeff is not None else []
        return cls(tuple(names), args.num_layers)

    def figures(self, stage: int) -> torch.Tensor:
        """This rank's part of the figures of the batch whose tracker is in place.

        Args:
            stage: the number of ranks of this stage. Megatron sums a figure over one group of them, and takes the
                mean over the others.

        Returns:
            (len(names) * layers,), fp64, to be summed over all ranks of the run.
        """
        device = torch.cuda.current_device()
        parts = [torch.zeros(0, dtype=torch.float64, device=device)]
        metrics = get_moe_metrics_tracker().metrics
        for name in self.names:
            entry = metrics.get(name)
            if entry is None:  # no layer of this stage has experts
                parts.append(torch.zeros(self.layers, dtype=torch.float64, device=device))
                continue
            if entry.values.numel() != self.layers:
                raise RuntimeError(f"{name} has figures of {entry.values.numel()} layers, not of {self.layers}")
            summed_over = 1 if entry.reduce_group is None else entry.reduce_group.size()
            parts.append(entry.values.double() * summed_over / stage)
        return torch.cat(parts)

    def report(self, sums: Sequence[float], microbatches: int, **how: Any) -> dict[str, float]:
        """Write a batch's figures to TensorBoard and Weights & Biases, as Megatron does.

        Args:
            sums: over all ranks of ``figures``.
            microbatches: M of the batch.
            how: further arguments of Megatron's ``MoEMetricsTracker.report``.

        Returns:
            The mean over layers and microbatches of each figure.
        """
        tracker = SummedTracker()
        by_name = torch.tensor(sums, dtype=torch.float32).view(len(self.names), self.layers)
        for name, values in zip(self.names, by_name, strict=True):
            tracker.metrics[name] = MetricEntry(values=values)
        means: dict[str, torch.Tensor] = {}
        tracker.report(loss_scale=1 / microbatches, total_loss_dict=means, **how)
        return {name: float(mean) for name, mean in means.items()}
