"""All schedules side by side for several pipeline depths and batch sizes, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import groupby
from pathlib import Path

from megatron_asyncpp.predictions import NAMES, Prediction, predict, three_decimals
from megatron_asyncpp.schedules import SCHEDULES

STAGES = (4, 8, 16)
MICROBATCHES_PER_STAGE = (1, 2, 4)
_COLORS = ("#1B4F72", "#2E86C1", "#AED6F1")


def sweep(
    forward: Fraction, backward: Fraction, latency: Fraction, step: Fraction, virtual_stages: int
) -> list[Prediction]:
    """Every schedule at every size that it can run, by P, then schedule, then M; with latency or steps only plans."""
    return [
        predict(name, p, factor * p, [forward] * p, [backward] * p, latency, step, virtual_stages)
        for p in STAGES
        for name in NAMES
        if name in SCHEDULES or not (latency or step)
        for factor in MICROBATCHES_PER_STAGE
        if name not in SCHEDULES or factor * p >= SCHEDULES[name].least_microbatches(p)
    ]


def table(predictions: Sequence[Prediction]) -> str:
    """In Markdown: a row for each P and schedule."""
    sizes = [f"M = {factor if factor > 1 else ''}P" for factor in MICROBATCHES_PER_STAGE]
    lines = [["P", "schedule", *sizes, "live activations", "weight versions", "staleness"]]
    for _, group in groupby(predictions, key=lambda one: (one.stages, one.schedule)):
        row = list(group)
        by_size = {one.microbatches // one.stages: three_decimals(one.slowdown) for one in row}
        slowdowns = [by_size.get(factor, "-") for factor in MICROBATCHES_PER_STAGE]
        lines.append([str(row[0].stages), _label(row[0]), *slowdowns, *_figures(row)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    lines.insert(1, ["-" * (width - 1) + ":" if i != 1 else "-" * width for i, width in enumerate(widths)])
    return "\n".join(f"| {' | '.join(_aligned(line, widths))} |" for line in lines)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
    padded[1] = cells[1].ljust(widths[1])
    return padded


def _label(prediction: Prediction) -> str:
    return prediction.schedule if prediction.simulation else f"{prediction.schedule} (formula)"


def _figures(row: Sequence[Prediction]) -> list[str]:
    """Activations, versions and staleness, from the first stage to the last; they don't depend on M if M >= P."""
    simulations = [one.simulation for one in row if one.simulation is not None]
    columns = (
        {_range(simulation.peak_activations) for simulation in simulations},
        {_range(simulation.versions_alive) for simulation in simulations},
        {_range([max(batches) for batches in simulation.staleness]) for simulation in simulations},
    )
    return [" or ".join(sorted(texts)) or "-" for texts in columns]


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else f"{values[0]} to {values[-1]}"


def draw(predictions: Sequence[Prediction], setting: str, out: Path) -> None:
    """Draw the slowdowns into a file: a panel for each P, a bar for each schedule and M.

    Args:
        predictions: what ``sweep`` made.
        setting: what they have in common, for the line below the title.
        out: .png or .svg.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6.6), layout="constrained")
    figure.suptitle(f"How much longer a batch takes because pipeline stages wait (no bar: they never do)\n{setting}")
    panels = figure.subplots(1, len(STAGES), sharex=True, sharey=True)
    longest = max(one.slowdown for one in predictions)
    height = 0.8 / len(MICROBATCHES_PER_STAGE)
    for panel, stages in zip(panels, STAGES, strict=True):
        own = [one for one in predictions if one.stages == stages]
        names = list(dict.fromkeys(_label(one) for one in own))
        for i, (factor, color) in enumerate(zip(MICROBATCHES_PER_STAGE, _COLORS, strict=True)):
            bars = [one for one in own if one.microbatches == factor * stages]
            places = [names.index(_label(one)) + (i - 1) * height for one in bars]
            name = f"M = {factor if factor > 1 else ''}P microbatches per batch"
            panel.barh(places, [one.slowdown - 1 for one in bars], height, left=1, color=color, label=name)
            for place, one in zip(places, bars, strict=True):
                text = three_decimals(one.slowdown)
                panel.text(one.slowdown + (longest - 1) / 60, place, text, va="center", fontsize=8)
        panel.set_title(f"P = {stages} stages")
        panel.set_xlabel("time per batch / time without any waiting")
        panel.set_xlim(1, 1 + (longest - 1) * 1.2)
        panel.set_yticks(range(len(names)), names)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    panels[-1].legend(loc="lower right")
    figure.savefig(out, dpi=130)
