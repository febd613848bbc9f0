"""Reads the logs of a study's runs, and makes its table, its picture and its report of them, and of nothing else."""

from __future__ import annotations

import os
import platform
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from megatron_asyncpp.errors import AsyncPPError

# What each schedule is called. The first is what the others are compared with.
SCHEDULES = {"sync": "synchronous", "2bw": "2BW", "2bw-ef": "2BW + Error Feedback"}
# What a run's log says, by our own start-up line, if it trained with that schedule. Plain Megatron has no such line.
_BANNERS = {
    "sync": None,
    "2bw": r"megatron_asyncpp: schedule 2bw: P = 2 .*delay 1 .*Error Feedback off",
    "2bw-ef": r"megatron_asyncpp: schedule 2bw: P = 2 .*delay 1 .*Error Feedback lambda 1\b",
}
_ITERATION = re.compile(rb"iteration +(\d+)/ *(\d+) \|.*? lm loss: (\S+) \|")
_VALIDATION = re.compile(r"validation loss at iteration (\d+)( on validation set)? \| lm loss value: (\S+) \|")
# Each schedule's line in the picture. Blue, vermilion and green of Okabe and Ito: the colour-blind see them apart too.
_LOOKS = {
    "sync": ("#0072B2", "o", "synchronous (Megatron as it is)"),
    "2bw": ("#D55E00", "s", "2BW (gradients one step old)"),
    "2bw-ef": ("#009E73", "^", "2BW + Error Feedback"),
}


@dataclass(frozen=True)
class Run:
    """One training run of a study, over.

    Attributes:
        optimizer: "AdamW" or "Muon".
        schedule: A key of SCHEDULES.
        command: The command line it was started with.
        log: The file that holds all it printed.
        seconds: Its wall time, start-up included.
    """

    optimizer: str
    schedule: str
    command: Sequence[str]
    log: Path
    seconds: float


@dataclass(frozen=True)
class Curve:
    """What a run's log says.

    Attributes:
        first_loss: The training loss of the first iteration, as printed.
        validation: Validation loss by iteration. The last one is the mean of two evaluations, on different data.
    """

    first_loss: str
    validation: dict[int, float]

    @property
    def final(self) -> float:
        """The validation loss after the last iteration."""
        return self.validation[max(self.validation)]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        gap: Final validation loss minus that of the synchronous run; None for the latter itself.
        recovered: Share of the plain delay's gap that Error Feedback takes away, in percent; None where there is none.
    """

    optimizer: str
    schedule: str
    final: float
    gap: float | None
    recovered: float | None


def latest_iteration(text: bytes) -> tuple[int, str] | None:
    """The last iteration that a piece of a log reports, and its training loss; None if it reports none."""
    found = _ITERATION.findall(text)
    return (int(found[-1][0]), found[-1][2].decode()) if found else None


def read_curve(run: Run, iterations: int) -> Curve:
    """Read a run's log.

    Raises:
        AsyncPPError: The log is missing, ends early, or is of another schedule than the run's.
    """
    try:
        data = run.log.read_bytes()
    except OSError as error:
        raise AsyncPPError(f"The log {run.log} can't be read ({error.strerror}): start the study again.") from error
    text = data.decode(errors="replace")
    progress = {int(iteration): loss.decode() for iteration, _, loss in _ITERATION.findall(data)}
    points: dict[int, list[float]] = {}
    last = None
    for iteration, at_end, loss in _VALIDATION.findall(text):
        points.setdefault(int(iteration), []).append(float(loss))
        last = int(iteration) if at_end else last
    # The last iteration itself is in the log only if it falls on the log interval.
    if 1 not in progress or last != iterations:
        lacks = "the first iteration" if 1 not in progress else f"the validation loss after iteration {iterations}"
        raise AsyncPPError(f"The log {run.log} is incomplete, it lacks {lacks}: start the study again.")
    banner = _BANNERS[run.schedule]
    if not re.search(banner, text) if banner else "megatron_asyncpp: schedule" in text:
        raise AsyncPPError(
            f"The log {run.log} is not of a run with the schedule {SCHEDULES[run.schedule]!r}: look at its "
            f"'megatron_asyncpp: schedule' line, and report this as a fault of the plugin."
        )
    return Curve(progress[1], {iteration: sum(losses) / len(losses) for iteration, losses in points.items()})


def read_curves(runs: Sequence[Run], iterations: int) -> dict[str, dict[str, Curve]]:
    """Read the logs of all runs, by optimizer and schedule, and check that they can be compared.

    Raises:
        AsyncPPError: A log is missing or incomplete, runs of one optimizer didn't start from the same weights and
            data, or two of them came out the same.
    """
    curves: dict[str, dict[str, Curve]] = {}
    for run in runs:
        curves.setdefault(run.optimizer, {})[run.schedule] = read_curve(run, iterations)
    for optimizer, by_schedule in curves.items():
        if missing := [name for schedule, name in SCHEDULES.items() if schedule not in by_schedule]:
            raise AsyncPPError(f"There is no {optimizer} run {missing[0]}: start the study again.")
        firsts = {SCHEDULES[schedule]: curve.first_loss for schedule, curve in by_schedule.items()}
        if len(set(firsts.values())) > 1:
            raise AsyncPPError(
                f"The {optimizer} runs can't be compared: they differ in the loss of the first iteration, before any "
                f"update ({firsts}); give all of them the same seed, data and initial weights."
            )
        if len({curve.final for curve in by_schedule.values()}) < len(by_schedule):
            raise AsyncPPError(
                f"Two {optimizer} runs ended with the same loss to all digits, so one of them ignored its schedule: "
                f"report this as a fault of the plugin."
            )
    return curves


def make_rows(curves: dict[str, dict[str, Curve]]) -> list[Row]:
    """The table: a row for each run, with its gap to the synchronous run of the same optimizer."""
    rows = []
    for optimizer, by_schedule in curves.items():
        gaps = {schedule: curve.final - by_schedule["sync"].final for schedule, curve in by_schedule.items()}
        for schedule in SCHEDULES:
            recovered = None
            if schedule == "2bw-ef" and gaps["2bw"] > 0:
                recovered = 100 * (gaps["2bw"] - gaps["2bw-ef"]) / gaps["2bw"]
            gap = None if schedule == "sync" else gaps[schedule]
            rows.append(Row(optimizer, schedule, by_schedule[schedule].final, gap, recovered))
    return rows


def format_table(rows: Sequence[Row]) -> str:
    """The table as Markdown, aligned so that it reads well in a terminal too."""
    cells = [("optimizer", "schedule", "final validation loss", "gap to synchronous", "recovered")]
    for row in rows:
        gap = "" if row.gap is None else f"{row.gap:+.3f}"
        recovered = "" if row.recovered is None else f"{row.recovered:.0f} %"
        cells.append((row.optimizer, SCHEDULES[row.schedule], f"{row.final:.3f}", gap, recovered))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rules = ["-" * width if column < 2 else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    lines = []
    for line in (cells[0], rules, *cells[1:]):
        padded = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join(lines)


def draw(curves: dict[str, dict[str, Curve]], out: Path) -> None:
    """Draw validation loss against iterations into the file `out`, a panel for each optimizer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    figure.suptitle("What a gradient delay of one step costs, and what Error Feedback gives back")
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    finals = [curve.final for by_schedule in curves.values() for curve in by_schedule.values()]
    # The first points lie far above, and would press all that matters into a strip.
    bottom, top = min(finals) - 0.15, max(finals) + 0.9
    for panel, (optimizer, by_schedule) in zip(panels, curves.items(), strict=True):
        ends: list[float] = []
        for schedule in sorted(SCHEDULES, key=lambda schedule: by_schedule[schedule].final):
            curve, (color, marker, label) = by_schedule[schedule], _LOOKS[schedule]
            x, y = zip(*sorted(curve.validation.items()), strict=True)
            panel.plot(x, y, color=color, marker=marker, markersize=5, label=label)
            # From the lowest up, each label at least a line's height above the one before.
            ends.append(max(curve.final, ends[-1] + 0.05 * (top - bottom)) if ends else curve.final)
            panel.annotate(
                f"{curve.final:.3f}",
                (x[-1] * 1.03, ends[-1]),
                color=color,
                fontweight="bold",
                verticalalignment="center",
            )
        panel.set_title(optimizer)
        panel.set_xlabel("iterations")
        panel.set_xlim(0, x[-1] * 1.17)
        panel.set_ylim(bottom, top)
        panel.grid(alpha=0.3)
        handles = {handle.get_label(): handle for handle in panel.get_lines()}
        panel.legend(handles=[handles[label] for _, _, label in _LOOKS.values()])
    panels[0].set_ylabel("validation loss (nats per byte, lower is better)")
    figure.savefig(out, dpi=130)


def write_report(runs: Sequence[Run], iterations: int, settings: Sequence[tuple[str, str]], out: Path) -> str:
    """Make `out/curves.png` and `out/report.md` from the runs' logs.

    Args:
        runs: All runs of the study.
        iterations: How many each trained for.
        settings: What the runs have in common and in what they differ, as (name, value).
        out: The folder to write to.

    Returns:
        The table.

    Raises:
        AsyncPPError: The logs don't hold what the report needs, see `read_curves`. Nothing is written then.
    """
    curves = read_curves(runs, iterations)
    table = format_table(make_rows(curves))
    draw(curves, out / "curves.png")
    firsts = ", ".join(f"{optimizer} {by['sync'].first_loss}" for optimizer, by in curves.items())
    facts = [
        ("CPUs", f"{os.process_cpu_count() if hasattr(os, 'process_cpu_count') else len(os.sched_getaffinity(0))}"),
        ("machine", f"{platform.machine()}, {platform.system()} {platform.release()}"),
        ("Python", platform.python_version()),
        *((package, version(package)) for package in ("torch", "megatron-core", "emerging-optimizers")),
    ]
    lines = [
        "# Synchronous and asynchronous pipeline, compared",
        "Written by `python -m megatron_asyncpp study` from the logs of the runs that it had just made.",
        table,
        "![Validation loss against iterations](curves.png)",
        "*Synchronous* is Megatron's own pipeline, which is flushed after each batch. *2BW* isn't flushed; its "
        "gradients are one optimizer step old. *Error Feedback* adds the last change of the update to each update. "
        "*Recovered* is the share of 2BW's gap that is gone with it. One seed: repeat with `--seed` to see the noise.",
        f"Within each optimizer all runs printed the same loss in iteration 1 ({firsts}): same weights, same data.",
        "## Settings",
        "\n".join(f"- {name}: {value}" for name, value in settings),
        "## Wall time of each run",
        "Start-up and evaluation included. On so few cores and so small a model it says nothing about speed.",
        "\n".join(f"- {run.optimizer}, {SCHEDULES[run.schedule]}: {run.seconds:.0f} s" for run in runs),
        "## Machine",
        "\n".join(f"- {name}: {value}" for name, value in facts),
        "## Command lines",
        *(f"{run.log.relative_to(out)}:\n\n```\n{shlex.join(run.command)}\n```" for run in runs),
    ]
    (out / "report.md").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    return table
