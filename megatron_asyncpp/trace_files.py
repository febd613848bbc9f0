"""The folder of a trace: each rank's part as JSON, and what is made of them, one Perfetto trace and one picture."""

from __future__ import annotations

import json
import os
from pathlib import Path

from megatron_asyncpp.errors import AsyncPPError
from megatron_asyncpp.schedules import perfetto, picture
from megatron_asyncpp.schedules.measured import Part, Timeline, timeline

_PARTS = "rank-*.json"


def write_part(folder: Path, part: Part) -> None:
    """Write a rank's part, whole or not at all: somebody may read the folder already."""
    partial = folder / f"rank-{part.rank}.partial"
    partial.write_text(json.dumps(part.as_json()), encoding="utf-8")
    os.replace(partial, folder / f"rank-{part.rank}.json")


def forget_parts(folder: Path) -> None:
    """Delete the parts of an earlier run."""
    for file in folder.glob(_PARTS):
        file.unlink()


def read(folder: Path) -> Timeline:
    """What all ranks did.

    Raises:
        AsyncPPError: a part is missing, or is none, or has nothing of the iterations asked for.
    """
    try:
        parts = [Part.of_json(json.loads(file.read_text(encoding="utf-8"))) for file in sorted(folder.glob(_PARTS))]
        ranks = {part.rank for part in parts}
        if not parts:
            raise AsyncPPError(
                f"{folder} has no {_PARTS}: give the folder of a run with --asyncpp-trace that has come past the "
                f"iterations to trace"
            )
        if missing := sorted(set(range(parts[0].ranks)) - ranks):
            raise AsyncPPError(
                f"{folder} has no part of rank {', '.join(map(str, missing))}: wait until all ranks have come past the "
                f"iterations to trace, and if their machines don't share the folder, copy all {_PARTS} into one"
            )
        return timeline(sorted(parts, key=lambda part: part.rank))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise AsyncPPError(f"{folder} doesn't hold a trace that can be read: {error}") from error


def draw(measured: Timeline, out: Path) -> None:
    """Draw rank 0's pipeline, as .png or .svg."""
    spans = [span for row in measured.pipelines[0] for span in row.spans]
    picture.draw(
        spans,
        out,
        name=measured.name,
        slowdown=measured.slowdown,
        unit="seconds",
        microbatches=measured.microbatches,
    )


def write_trace(measured: Timeline, out: Path) -> None:
    """Write all ranks as a Perfetto trace."""
    perfetto.write_measured(measured.pipelines, out, name=measured.name)
