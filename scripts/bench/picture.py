"""The bench's rows as a picture: for each pipeline a group of bars, with what theory says across each."""

from __future__ import annotations

from pathlib import Path

from scripts.bench.measure import Row, Setting

_BAR = 0.42  # inches
_HEIGHT = 4.6


def draw(rows: list[Row], path: Path) -> None:
    """Draw the rows into a file, whose ending says in which format.

    Args:
        rows: grouped by their setting, in the order in which the settings first appear.
        path: of the picture, replaced if it is there.
    """
    from matplotlib.figure import Figure

    settings = list(dict.fromkeys(row.setting for row in rows))
    names = list(dict.fromkeys(row.variant for row in rows))
    figure = Figure(figsize=(1.6 + _BAR * (len(rows) + len(settings)), _HEIGHT), layout="constrained")
    axes = figure.subplots()
    at, ticks = 0.0, []
    drawn: set[str] = set()
    for setting in settings:
        group = [row for row in rows if row.setting == setting]
        for index, row in enumerate(group):
            x = at + index
            above = [max(row.iterations_ms) / setting.ideal_ms - row.slowdown]
            below = [row.slowdown - min(row.iterations_ms) / setting.ideal_ms]
            axes.bar(
                x,
                row.slowdown - 1,
                bottom=1,
                width=0.8,
                color=f"C{names.index(row.variant)}",
                label=row.variant if row.variant not in drawn else None,
                yerr=[below, above],
                error_kw={"elinewidth": 0.8, "capsize": 2},
            )
            drawn.add(row.variant)
            first = "theory" not in drawn
            axes.plot([x - 0.45, x + 0.45], [row.theory] * 2, color="black", lw=1.6, label="theory" if first else None)
            drawn.add("theory")
        ticks.append((at + (len(group) - 1) / 2, _label(setting)))
        at += len(group) + 1
    axes.set_xticks([x for x, _ in ticks], [label for _, label in ticks])
    axes.axhline(1, color="black", lw=0.8)
    axes.set_ylim(bottom=min(0.99, *(min(row.iterations_ms) / row.setting.ideal_ms for row in rows)) - 0.01)
    axes.set_ylabel("time per iteration / time without bubble")
    axes.set_title("Pipeline bubble, measured; whiskers from the fastest to the slowest iteration", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def _label(setting: Setting) -> str:
    late = f"\nlatency {setting.latency:g} F" if setting.latency else ""
    return f"P={setting.stages}, M={setting.microbatches}{late}"
