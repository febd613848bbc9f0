"""Megatron's log line of an iteration, with figures of a step that was finished after its own iteration had ended.

The line of iteration n has that iteration's loss. If the step of iteration n - 1 was finished during n, its gradient
norm and count of zeros come at the end of the line, and say so. TensorBoard and Weights & Biases get each figure at the
iteration that it belongs to.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

from megatron_asyncpp.runtime.step import Outcome


@dataclass
class LaggingFigures:
    """What the next line has to say of steps whose iteration is over.

    Attributes:
        skipped: how many updates were skipped so far.
    """

    skipped: int = 0
    _last: tuple[int, Outcome] | None = None
    _skipped_since: list[int] = field(default_factory=list)
    _idle: list[tuple[int, float]] = field(default_factory=list)
    _means: dict[bool, list[tuple[int, dict[str, float]]]] = field(default_factory=lambda: {True: [], False: []})

    def add(self, iteration: int, outcome: Outcome, lagging: bool) -> None:
        """Take note of a finished step.

        Args:
            iteration: that it belongs to, as Megatron counts them.
            outcome: what became of it.
            lagging: whether its iteration is over, so that Megatron's own fields can't have its figures.
        """
        if lagging:
            self._last = (iteration, outcome)
        if outcome.skipped:
            self.skipped += 1
            self._skipped_since.append(iteration)

    def add_means(self, iteration: int, means: dict[str, float], lagging: bool) -> None:
        """Take note of further figures of a finished step; a line has their means since the line before.

        Args:
            iteration: that they belong to.
            means: over the iteration's microbatches, by name.
            lagging: whether the iteration is over.
        """
        self._means[lagging].append((iteration, means))

    def add_idle(self, iteration: int, share: float) -> None:
        """Take note of the idle share of an iteration; a line has the mean since the line before."""
        self._idle.append((iteration, share))

    def text(self) -> str:
        """The fields to add to the line that is printed now, each ending as Megatron's do."""
        fields = []
        if self._last is not None:
            iteration, outcome = self._last
            if outcome.grad_norm is not None:
                fields.append(f" grad norm: {outcome.grad_norm:.3f} (iteration {iteration}) |")
            if outcome.zeros_in_grad is not None:
                fields.append(f" num zeros: {outcome.zeros_in_grad:.0f} (iteration {iteration}) |")
        if self._idle:
            mean = sum(share for _, share in self._idle) / len(self._idle)
            fields.append(f" idle share: {mean:.1%} ({_which(self._idle[0][0], self._idle[-1][0])}) |")
            self._idle.clear()
        if self._skipped_since:
            which = ", ".join(map(str, self._skipped_since))
            fields.append(f" update skipped, gradients not finite: iteration {which} ({self.skipped} so far) |")
        for several in (self._means[True], self._means[False]):
            if several:
                (first, names), (last, _) = several[0], several[-1]
                for name in names:
                    mean = sum(means[name] for _, means in several) / len(several)
                    fields.append(f" {name}: {mean:.6E} ({_which(first, last)}) |")
                several.clear()
        self._last, self._skipped_since = None, []
        return "".join(fields)


def _which(first: int, last: int) -> str:
    return f"iteration {first}" if first == last else f"iterations {first} to {last}"


def write(args: Namespace, iteration: int, figures: dict[str, float | None]) -> None:
    """Write figures of an iteration to TensorBoard and Weights & Biases, but those that are None.

    Args:
        args: Megatron's.
        iteration: that they belong to.
        figures: by the names that they are shown under.
    """
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    writer: Any = get_tensorboard_writer()
    if not writer or iteration % args.tensorboard_log_interval:
        return
    wandb: Any = get_wandb_writer()
    for name, figure in figures.items():
        if figure is not None:
            writer.add_scalar(name, figure, iteration)
            if wandb:
                wandb.log({name: figure}, iteration)
