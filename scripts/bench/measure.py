"""What a run's log says about time: Megatron's own time per iteration, and the slowdown that follows from it."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass
from typing import Any

from scripts.bench.variants import BACKWARD, VARIANTS

# Iterations that aren't steady. In the first ones memory is allocated and the pipeline fills; under 2bw the forwards
# of the first batch come on top. The last batch has no successor whose forwards fill the pipeline, so it drains.
FIRST = 3
LAST = 2
# A median of fewer says little.
STEADY = 3
MINIMUM_ITERATIONS = FIRST + STEADY + LAST

_ITERATION = re.compile(r" iteration +(\d+)/ *(\d+) \|.*? elapsed time per iteration \(ms\): ([0-9.]+) \|")
_REPORT = re.compile(r"^bench report: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Setting:
    """The pipeline that all variants run on.

    Attributes:
        stages: P.
        microbatches: M.
        forward_ms: F; a backward takes BACKWARD times as long.
        iterations: of Megatron's loop, those included that aren't steady.
    """

    stages: int
    microbatches: int
    forward_ms: float
    iterations: int

    @property
    def ideal_ms(self) -> float:
        """Time per iteration of a pipeline without bubble, M (F + B)."""
        return self.microbatches * self.forward_ms * (1 + BACKWARD)


@dataclass(frozen=True)
class Row:
    """One variant, measured.

    Attributes:
        variant: a key of VARIANTS.
        setting: what it ran on.
        iterations_ms: the times of the steady iterations, as Megatron logged them.
    """

    variant: str
    setting: Setting
    iterations_ms: list[float]

    @property
    def slowdown(self) -> float:
        """The median iteration's time over the ideal one."""
        return statistics.median(self.iterations_ms) / self.setting.ideal_ms

    @property
    def theory(self) -> float:
        """What the slowdown should be if messages took no time."""
        return VARIANTS[self.variant].theory(self.setting.stages, self.setting.microbatches)

    def as_json(self) -> dict[str, Any]:
        """The row for machines."""
        return {
            "variant": self.variant,
            "slowdown": self.slowdown,
            "theory": self.theory,
            "pp": self.setting.stages,
            "microbatches": self.setting.microbatches,
            "forward_ms": self.setting.forward_ms,
            "iterations_ms": self.iterations_ms,
        }


def logged_iterations(log: str) -> list[float]:
    """The time of each iteration that a log tells of, in ms and in order.

    Raises:
        ValueError: an iteration is missing, or there twice.
    """
    found = [(int(number), float(elapsed)) for number, _, elapsed in _ITERATION.findall(log)]
    if [number for number, _ in found] != list(range(1, len(found) + 1)):
        raise ValueError(f"the log has the iterations {[number for number, _ in found]}, which aren't consecutive")
    return [elapsed for _, elapsed in found]


def steady_iterations(log: str, iterations: int) -> list[float]:
    """The times of the steady iterations of a whole run's log, in ms.

    Raises:
        ValueError: the log isn't that of a whole run of so many iterations.
    """
    times = logged_iterations(log)
    if len(times) != iterations:
        raise ValueError(f"the log has {len(times)} of {iterations} iterations")
    return times[FIRST:-LAST]


def late_steps(log: str) -> tuple[int, int]:
    """How many of a rank's forwards and backwards took longer than they should have, by their own work.

    Args:
        log: all that the rank printed.

    Returns:
        The number of late ones and of all.

    Raises:
        ValueError: the log has no report, so the rank didn't run to its end.
    """
    reports = _REPORT.findall(log)
    if len(reports) != 1:
        raise ValueError(f"the log has {len(reports)} reports of the bench's own script, not one")
    report = json.loads(reports[0])
    parts = [report["forward"], report["backward"]]
    return sum(part["late"] for part in parts), sum(part["calls"] for part in parts)


def table(rows: list[Row]) -> str:
    """The rows for people, in Markdown."""
    lines = ["| variant | P | M | F (ms) | slowdown | theory | steady iterations |", "|---|--:|--:|--:|--:|--:|---|"]
    for row in rows:
        low, high = (edge(row.iterations_ms) / row.setting.ideal_ms for edge in (min, max))
        lines.append(
            f"| {row.variant} | {row.setting.stages} | {row.setting.microbatches} | {row.setting.forward_ms:g} "
            f"| {row.slowdown:.3f} | {row.theory:.3f} | {len(row.iterations_ms)}, {low:.3f} to {high:.3f} |"
        )
    return "\n".join(lines)
