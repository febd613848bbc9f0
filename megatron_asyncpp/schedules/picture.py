"""A timeline as a picture: a row for each stage, a box for each forward and each backward.

Planned and measured timelines are drawn alike, from the same list of spans. matplotlib is imported only to draw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from types import UnionType
from typing import TYPE_CHECKING, Literal

from megatron_asyncpp.schedules.actions import Backward, Begin, Compute, Finish, Forward
from megatron_asyncpp.schedules.simulate import Span

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A batch's colours: its forwards', and its backwards' with that of the text on it. The hues are of Okabe and Ito, in
# an order in which consecutive batches differ most for the colour-blind too. After the last, the first comes again.
_COLORS = (
    ("#A8CDE6", "#0072B2", "white"),
    ("#F9DFA8", "#E69F00", "black"),
    ("#A6DCCB", "#009E73", "black"),
    ("#F0D5E3", "#CC79A7", "black"),
)
_IDLE = "#C9C9C9"  # of the hatching, on white
_STEP = "#444444"
_VERSIONS = ("#DADFE5", "#B7C0CA")  # of even and of odd weight versions
_INK = "#1A1A1A"

# Sizes on paper, in inches. A README shows the whole width at some 80 pixels an inch.
_WIDTH = 11.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.95, 0.62, 0.9, 1.24
_ROWS = 3.6  # all rows together, if that leaves each a height between the next two
_ROW_MIN, _ROW_MAX = 0.56, 0.9
_GAP = 0.06  # between two rows
_TRIANGLE = 0.065  # a step's mark: this high, and as wide
_POINT = 1 / 72  # the unit of font sizes
_CHARACTER = 0.62  # the width of a digit or letter as a share of the font size, in DejaVu Sans, which is a wide font


def draw(
    spans: Sequence[Span],
    out: Path,
    *,
    name: str,
    slowdown: float,
    unit: Literal["forwards", "seconds"] = "forwards",
    microbatches: tuple[int, int] | None = None,
) -> None:
    """Draw a timeline into a file.

    Args:
        spans: what the stages did and when, in any order and from any time on. The halves of an optimizer step may
            take time or none.
        out: the file, .png or .svg.
        name: what it is a timeline of, such as "2bw".
        slowdown: time per batch in the long run, against a pipeline whose slowest stage runs nothing but forwards
            and backwards; of a measured timeline, over the time shown.
        unit: what the times are in. One of "forwards" is the time that the first stage takes for a forward; "seconds"
            are those of a measured timeline.
        microbatches: the fewest and the most of a batch; by default as many as there are forwards of it.
    """
    from matplotlib import rc_context

    # Text stays text in an SVG, and the same timeline gives the same file, which suits a repository.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "timeline", "hatch.linewidth": 0.5}):
        figure = _figure(sorted(spans, key=lambda span: (span.stage, span.start)), name, slowdown, unit, microbatches)
        figure.savefig(out, dpi=160, metadata={"Date": None} if out.suffix == ".svg" else None)


def _figure(spans: Sequence[Span], name: str, slowdown: float, unit: str, counts: tuple[int, int] | None) -> Figure:
    from matplotlib.figure import Figure

    stages = [list(row) for _, row in groupby(spans, key=lambda span: span.stage)]
    start, end = min(span.start for span in spans), max(span.end for span in spans)
    pitch = min(max(_ROWS / len(stages), _ROW_MIN), _ROW_MAX)
    width, height = _WIDTH - _LEFT - _RIGHT, pitch * len(stages)
    whole = _TOP + height + _BOTTOM
    figure = Figure(figsize=(_WIDTH, whole), facecolor="white")
    axes = figure.add_axes((_LEFT / _WIDTH, _BOTTOM / whole, width / _WIDTH, height / whole))
    # Across, the axis is time. Down, it is inches, so that what a row holds is placed by its size on paper.
    axes.set_xlim(0, end - start)
    axes.set_ylim(height, 0)
    per_time = width / (end - start)
    numbers = _Numbers.that_fit(spans, per_time)
    idle = []
    for index, row in enumerate(stages):
        _Row(axes, row[0].stage, index * pitch, pitch, start, per_time, numbers).draw(row, end)
        # Measured times are rounded, and "-0%" isn't what a busy stage is.
        idle.append(max(0.0, 1 - sum(span.end - span.start for span in row) / (end - start)))
        _annotate(axes, f"{idle[-1]:.0%}", end - start, (index + 0.5) * pitch, offset=7, size=9.5)
    _annotate(axes, "idle", end - start, -0.1, offset=7, size=9.5)
    _label_axes(axes, [row[0].stage for row in stages], pitch, unit)
    microbatches = Counter(action.batch for _, action in _boxes(stages[0], Forward))
    if counts is None:
        counts = (min(microbatches.values()), max(microbatches.values()))
    _title(figure, name, len(stages), counts, slowdown, sum(idle) / len(idle), unit)
    stepping = any(span.end > span.start for span in spans if isinstance(span.action, Begin | Finish))
    _legend(figure, sorted({action.batch for _, action in _boxes(spans, Compute)}), numbers, stepping)
    return figure


@dataclass(frozen=True)
class _Numbers:
    """What the boxes are numbered with, and how large; None where the boxes are too small for any number.

    Attributes:
        count_batches: whether with the batch instead of the microbatch, which tells nothing if a batch is just one.
        forward: the font size in forwards' boxes.
        backward: the font size in backwards' boxes.
    """

    count_batches: bool
    forward: float | None
    backward: float | None

    @classmethod
    def that_fit(cls, spans: Sequence[Span], per_time: float) -> _Numbers:
        """Choose for all these boxes, `per_time` inches long per unit of time."""
        count_batches = all(action.microbatch == 0 for _, action in _boxes(spans, Compute))
        sizes = []
        for kind in (Forward, Backward):
            boxes = _boxes(spans, kind)
            longest = max((_number(action, count_batches) for _, action in boxes), key=len, default="")
            typical = median(span.end - span.start for span, _ in boxes) if boxes else 0.0
            sizes.append(next((size for size in (8.5, 7.5, 6.5) if _fits(longest, size, typical * per_time)), None))
        return cls(count_batches, *sizes)


def _number(action: Compute, count_batches: bool) -> str:
    return str(action.batch if count_batches else action.microbatch)


def _boxes(spans: Sequence[Span], kind: type[Compute] | UnionType) -> list[tuple[Span, Compute]]:
    return [(span, span.action) for span in spans if isinstance(span.action, kind)]


def _fits(text: str, size: float, width: float) -> bool:
    return (len(text) * _CHARACTER + 0.25) * size * _POINT <= width


@dataclass(frozen=True)
class _Row:
    """Draws one stage. From the top: triangles of finishes, the forwards' weights, the boxes, then as much below.

    Attributes:
        top: of the row, in inches.
        pitch: its height, in inches.
        start: the time at the left end.
        per_time: inches per unit of time.
    """

    axes: Axes
    stage: int
    top: float
    pitch: float
    start: float
    per_time: float
    numbers: _Numbers

    @property
    def _strip(self) -> float:
        """The height of the strips that say which weights are in use, in inches: room for a line of text."""
        return 0.11 if self.pitch < 0.6 else 0.15

    @property
    def _upper(self) -> float:
        """The upper edge of the boxes."""
        return self.top + _GAP / 2 + _TRIANGLE + self._strip

    @property
    def _lower(self) -> float:
        return self.top + self.pitch - _GAP / 2 - _TRIANGLE - self._strip

    def draw(self, spans: Sequence[Span], end: float) -> None:
        """Draw what the stage did, and idleness up to the time `end` where it did nothing."""
        whole = (self._upper, self._lower)
        self._rectangle((self.start, end), whole, f"row-{self.stage}", ec=_IDLE, hatch="/////")
        for span in spans:
            if isinstance(span.action, Compute):
                self._box(span, span.action)
        self._weights(_boxes(spans, Forward), self._upper - self._strip)
        self._weights(_boxes(spans, Backward), self._lower)
        self._steps(spans, Begin)
        self._steps(spans, Finish)

    def _box(self, span: Span, action: Compute) -> None:
        light, full, ink = _COLORS[action.batch % len(_COLORS)]
        if isinstance(action, Forward):
            kind, size, color, ink = "forward", self.numbers.forward, light, _INK
        else:
            kind, size, color = "backward", self.numbers.backward, full
        name = f"{kind}-{self.stage}-{action.batch}-{action.microbatch}"
        # Boxes of the same colour touch: a white edge parts them, thin enough to leave something of a small box.
        edge = min(0.8, 0.15 * (span.end - span.start) * self.per_time / _POINT)
        self._rectangle((span.start, span.end), (self._upper, self._lower), name, fc=color, lw=edge)
        text = _number(action, self.numbers.count_batches)
        if size is not None and _fits(text, size, (span.end - span.start) * self.per_time):
            middle = (span.start + span.end) / 2 - self.start
            _annotate(self.axes, text, middle, (self._upper + self._lower) / 2, size=size, color=ink, align="center")

    def _weights(self, boxes: Sequence[tuple[Span, Compute]], upper: float) -> None:
        """A strip along these boxes, in pieces: one for each run of them on the same weights."""
        for version, same in groupby(boxes, key=lambda box: box[1].version):
            run = list(same)
            start, end = run[0][0].start, run[-1][0].end
            kind = "forward" if isinstance(run[0][1], Forward) else "backward"
            name = f"weights-{kind}-{self.stage}-{run[0][1].batch}-{run[0][1].microbatch}"
            self._rectangle((start, end), (upper, upper + self._strip), name, fc=_VERSIONS[version % 2], lw=0.8)
            size = 0.72 * self._strip / _POINT
            for text in (f"{kind}s on V({version})", f"V({version})", f"{version}"):
                if _fits(text, size, (end - start) * self.per_time):
                    _annotate(self.axes, text, start - self.start, upper + self._strip / 2, offset=2.5, size=size)
                    break

    def _steps(self, spans: Sequence[Span], kind: type[Begin] | type[Finish]) -> None:
        """A triangle where a step begins, below the row, or has finished, above it; and a box if that takes time."""
        previous = -_TRIANGLE
        for span in spans:
            if not isinstance(span.action, kind):
                continue
            name = f"{kind.__name__.lower()}-{self.stage}-{span.action.batch}"
            if span.end > span.start:
                self._rectangle((span.start, span.end), (self._upper, self._lower), f"{name}-box", fc=_STEP)
            if kind is Begin:
                time, tip, base = span.start, self._lower + self._strip, self._lower + self._strip + _TRIANGLE
            else:
                time, tip, base = span.end, self._upper - self._strip, self._upper - self._strip - _TRIANGLE
            # Two steps that finish together stand side by side.
            middle = max((time - self.start) * self.per_time, previous + _TRIANGLE)
            previous = middle
            corners = [(middle + shift * _TRIANGLE) / self.per_time for shift in (-0.5, 0, 0.5)]
            color = _COLORS[span.action.batch % len(_COLORS)][1]
            self.axes.fill(corners, [base, tip, base], color=color, lw=0, clip_on=False, gid=name)

    def _rectangle(
        self,
        times: tuple[float, float],
        edges: tuple[float, float],
        name: str,
        *,
        fc: str = "white",
        ec: str = "white",
        lw: float = 0.0,
        hatch: str | None = None,
    ) -> None:
        from matplotlib.patches import Rectangle

        (start, end), (upper, lower) = times, edges
        corner = (start - self.start, upper)
        box = Rectangle(corner, end - start, lower - upper, facecolor=fc, edgecolor=ec, linewidth=lw, hatch=hatch)
        box.set_gid(name)
        self.axes.add_artist(box)


def _annotate(
    axes: Axes,
    text: str,
    time: float,
    y: float,
    *,
    size: float,
    offset: float = 0,
    color: str = _INK,
    align: Literal["left", "center"] = "left",
) -> None:
    axes.annotate(
        text,
        (time, y),
        xytext=(offset, 0),
        textcoords="offset points",
        ha=align,
        va="center_baseline",
        fontsize=size,
        color=color,
        annotation_clip=False,
    )


def _label_axes(axes: Axes, stages: Sequence[int], pitch: float, unit: str) -> None:
    names = [f"stage {stage}" for stage in stages]
    if len(stages) > 1:
        names[0] += "\n(first)"
        names[-1] += "\n(last)"
    axes.set_yticks([(row + 0.5) * pitch for row in range(len(stages))], names)
    axes.tick_params(labelsize=9.5, labelcolor=_INK)
    axes.tick_params(axis="y", length=0)
    meaning = "time (1 = the forward of one microbatch on the first stage)" if unit == "forwards" else "time in seconds"
    axes.set_xlabel(meaning, fontsize=9.5, labelpad=2, color=_INK)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)


def _title(
    figure: Figure, name: str, stages: int, microbatches: tuple[int, int], slowdown: float, idle: float, unit: str
) -> None:
    few, many = microbatches
    count = f"{few} microbatch{'es' * (few > 1)}" if few == many else f"{few} to {many} microbatches"
    height = figure.get_figheight()
    first = f"{name}: P = {stages} pipeline stage{'s' * (stages > 1)}, M = {count} per batch"
    measured = unit == "seconds"
    second = (
        f"slowdown {slowdown:.3f} {'over the time shown' if measured else 'in the long run'} "
        f"(1 = the busiest stage only computes)   |   "
        f"{idle:.0%} of the time shown is idle{'' if measured else ', start and end included'}"
    )
    figure.text(0.012, 1 - 0.14 / height, first, va="top", fontsize=13, fontweight="bold", color=_INK)
    figure.text(0.012, 1 - 0.43 / height, second, va="top", fontsize=10.5, color=_INK)


def _legend(figure: Figure, batches: Sequence[int], numbers: _Numbers, stepping: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    number = ""
    if numbers.backward is not None:
        number = " (number: its batch)" if numbers.count_batches else " (its number)"
    what: list[Artist] = [
        Patch(facecolor="#C4C4C4", label=f"forward of a microbatch{number}"),
        Patch(facecolor="#6E6E6E", label="its backward"),
        Patch(facecolor="white", edgecolor=_IDLE, hatch="/////", label="idle"),
    ]
    steps: list[Artist] = [
        Patch(facecolor=_VERSIONS[0], label="on weights V(k), those after k optimizer steps"),
        Line2D([], [], marker="^", color=_STEP, lw=0, markersize=6, label="optimizer step of batch k begins"),
        Line2D([], [], marker="v", color=_STEP, lw=0, markersize=6, label="it is finished: V(k+1) exists"),
    ]
    if stepping:
        steps.append(Patch(facecolor=_STEP, label="within it"))
    which: list[Artist] = []
    for first in batches[: len(_COLORS)]:
        same = [str(batch) for batch in batches if batch % len(_COLORS) == first % len(_COLORS)]
        full = _COLORS[first % len(_COLORS)][1]
        which.append(Patch(facecolor=full, label=f"batch {', '.join(same[:2])}{', ...' * (len(same) > 2)}"))
    for bottom, handles in ((0.52, what), (0.3, steps), (0.08, which)):
        figure.legend(
            handles=handles,
            loc="lower center",
            bbox_to_anchor=(0.5, bottom / figure.get_figheight()),
            ncols=len(handles),
            frameon=False,
            fontsize=9,
            handlelength=1.3,
            handletextpad=0.5,
            columnspacing=1.5,
            borderaxespad=0,
            borderpad=0,
        )
