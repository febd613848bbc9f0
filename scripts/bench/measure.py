"""What a run's log says about time: Megatron's own time per iteration, and the slowdown that follows from it."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass, field
from typing import Any

from scripts.bench.variants import BACKWARD, VARIANTS

# Iterations at the end that aren't steady: the last batch has no successor whose forwards fill the pipeline.
LAST = 1

_ITERATION = re.compile(r" iteration +(\d+)/ *(\d+) \|.*? elapsed time per iteration \(ms\): ([0-9.]+) \|")
_REPORT = re.compile(r"^bench report: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Length:
    """How much of each run is measured, and how often.

    Attributes:
        warm_up: iterations before the first that counts. In the first ones memory is allocated and the pipeline
            fills; under 2bw the forwards of the first batch come on top.
        iterations: that count, in each run.
        rounds: runs of each variant. All variants run once before any runs again.
    """

    warm_up: int
    iterations: int
    rounds: int

    @property
    def of_a_run(self) -> int:
        """Iterations of Megatron's loop in one run, those included that don't count."""
        return self.warm_up + self.iterations + LAST


@dataclass(frozen=True)
class Setting:
    """A pipeline that variants run on.

    Attributes:
        stages: P.
        microbatches: M.
        forward_ms: F; a backward takes BACKWARD times as long.
        latency: of a message, in F.
    """

    stages: int
    microbatches: int
    forward_ms: float
    latency: float = 0.0

    @property
    def ideal_ms(self) -> float:
        """Time per iteration of a pipeline without bubble, M (F + B)."""
        return self.microbatches * self.forward_ms * (1 + BACKWARD)


@dataclass
class Row:
    """One variant on one pipeline, measured.

    Attributes:
        variant: a key of VARIANTS.
        setting: what it ran on.
        rounds_ms: for each run, the times of the iterations that count, as Megatron logged them.
        late: of the stages' forwards and backwards, those that took longer than they should have by their own work.
        steps: all of them.
    """

    variant: str
    setting: Setting
    rounds_ms: list[list[float]] = field(default_factory=list)
    late: int = 0
    steps: int = 0

    @property
    def iterations_ms(self) -> list[float]:
        """The times of all iterations that count."""
        return [elapsed for times in self.rounds_ms for elapsed in times]

    @property
    def slowdown(self) -> float:
        """The median iteration's time over the ideal one."""
        return statistics.median(self.iterations_ms) / self.setting.ideal_ms

    @property
    def theory(self) -> float:
        """What the slowdown should be if nothing but F, B and the latency of messages took time."""
        return VARIANTS[self.variant].theory(self.setting.stages, self.setting.microbatches, self.setting.latency)

    def as_json(self) -> dict[str, Any]:
        """The row for machines."""
        return {
            "variant": self.variant,
            "slowdown": self.slowdown,
            "theory": self.theory,
            "pp": self.setting.stages,
            "microbatches": self.setting.microbatches,
            "forward_ms": self.setting.forward_ms,
            "latency": self.setting.latency,
            "rounds_ms": self.rounds_ms,
            "late": self.late,
            "steps": self.steps,
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


def steady_iterations(log: str, length: Length) -> list[float]:
    """The times of the iterations that count in a whole run's log, in ms.

    Raises:
        ValueError: the log isn't that of a whole run of this length.
    """
    times = logged_iterations(log)
    if len(times) != length.of_a_run:
        raise ValueError(f"the log has {len(times)} of {length.of_a_run} iterations")
    return times[length.warm_up : -LAST]


def report_of(log: str) -> dict[str, Any]:
    """What a rank reported about each kind of its steps: ``timed.report``, or spans of ``computing_stages``.

    Args:
        log: all that the rank printed.

    Raises:
        ValueError: the log has no report, so the rank didn't run to its end.
    """
    reports = _REPORT.findall(log)
    if len(reports) != 1:
        raise ValueError(f"the log has {len(reports)} reports of the bench's own script, not one")
    report = json.loads(reports[0])
    return {name: part for name, part in report.items() if name != "rank"}


def late_steps(log: str) -> tuple[int, int]:
    """How many of a rank's forwards and backwards took longer than they should have, by their own work; and of all.

    Raises:
        ValueError: as ``report_of``.
    """
    parts = report_of(log).values()
    return sum(int(part["late"]) for part in parts), sum(int(part["calls"]) for part in parts)


def table(rows: list[Row]) -> str:
    """The rows for people, in Markdown."""
    lines = [
        "| variant | P | M | F (ms) | latency | slowdown | theory | iterations |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        low, high = (edge(row.iterations_ms) / row.setting.ideal_ms for edge in (min, max))
        lines.append(
            f"| {row.variant} | {row.setting.stages} | {row.setting.microbatches} | {row.setting.forward_ms:g} "
            f"| {row.setting.latency:g} F | {row.slowdown:.3f} | {row.theory:.3f} "
            f"| {len(row.iterations_ms)}, {low:.3f} to {high:.3f} |"
        )
    return "\n".join(lines)
