"""Measures the pipeline bubble on a machine without a GPU: Megatron's real pretraining loop on stages that sleep.

    python scripts/bench/bubble.py --pp 4 --microbatches 4

Each stage is a process under torchrun whose forwards last F and whose backwards last 2F. The slowdown is Megatron's own
time per iteration, as it logs it, over the M * 3F that a pipeline without bubble would take.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, this folder is all that's on the path

from megatron_asyncpp.processes import exit_on_signals
from scripts.bench.measure import FIRST, LAST, MINIMUM_ITERATIONS, Row, Setting, table
from scripts.bench.run import RunError, train
from scripts.bench.variants import BACKWARD, VARIANTS

# What a stage computes for a microbatch by itself, in ms of a core, measured; it must fit into what it is to last.
OWN_MS = 12.0
# To start a run takes each process so many seconds of a core, most of it to import torch and Megatron.
_START_S = 13.0
# With more late forwards and backwards than this share, the machine was too busy to believe the figures.
_LATE = 0.02


class _Parser(argparse.ArgumentParser):
    """Refuses in one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"bubble.py: {message}\n")


def main(argv: list[str]) -> int:
    """Measure what a command line asks for, and print it.

    Returns:
        0, or 1 if a run failed, or 130 after a Ctrl-C. Bad arguments exit with 2 before any process is started.
    """
    setting, variants, as_json = arguments(argv)
    seconds = estimate(setting, variants)
    print(
        f"bubble.py: {len(variants)} run(s) of {setting.stages} process(es), {setting.iterations} iterations each, on "
        f"{_cores()} core(s): about {max(1, round(seconds / 60))} min",
        file=sys.stderr,
    )
    try:
        rows = [*_measured(setting, variants)]
    except RunError as error:
        print(f"{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbubble.py: interrupted; the run is stopped.", file=sys.stderr)
        return 130
    print(json.dumps({"rows": [row.as_json() for row in rows]}) if as_json else table(rows))
    return 0


def arguments(argv: list[str]) -> tuple[Setting, list[str], bool]:
    """What to run, which variants, and whether to print JSON. Exits with code 2 and a sentence if it can't be."""
    parser = _Parser(
        prog="bubble.py",
        description="Measures the pipeline bubble on a machine without a GPU.",
        epilog=f"A backward lasts {BACKWARD:g} F. The median is of the iterations but the first {FIRST} and the last "
        f"{LAST}.",
    )
    parser.add_argument("--pp", type=int, required=True, metavar="P", help="pipeline stages, a process each")
    parser.add_argument("--microbatches", type=int, required=True, metavar="M", help="per iteration")
    parser.add_argument("--forward-ms", type=float, default=100.0, metavar="F", help="default %(default)g")
    parser.add_argument(
        "--variants", default=",".join(VARIANTS), metavar="LIST", help="separated by commas, default %(default)s"
    )
    parser.add_argument("--iterations", type=int, default=10, metavar="N", help="of each run, default %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object, in place of a table")
    args = parser.parse_args(argv)
    variants = args.variants.split(",")
    setting = Setting(args.pp, args.microbatches, args.forward_ms, args.iterations)
    if problem := _problem(setting, variants):
        parser.error(problem)
    return setting, variants, args.json


def estimate(setting: Setting, variants: list[str]) -> float:
    """How long the runs will take, in seconds, if nothing else runs on the machine."""
    start = _START_S * max(1.0, setting.stages / _cores())
    theory = sum(VARIANTS[variant].theory(setting.stages, setting.microbatches) for variant in variants)
    return len(variants) * start + theory * setting.iterations * setting.ideal_ms / 1000


def _problem(setting: Setting, variants: list[str]) -> str | None:
    """Why the bench can't run this, or None."""
    for variant in variants:
        if variant not in VARIANTS:
            return f"--variants: there is no variant {variant!r}, choose from {', '.join(VARIANTS)}"
    if len(set(variants)) < len(variants):
        return f"--variants {','.join(variants)} names one of them twice: name each once"
    if setting.stages < 1:
        return f"--pp {setting.stages} is no number of stages: give at least 1"
    if setting.microbatches < 1:
        return f"--microbatches {setting.microbatches} is no number of microbatches: give at least 1"
    delayed = [variant for variant in variants if VARIANTS[variant].delayed]
    if delayed and setting.microbatches < setting.stages:
        return (
            f"{delayed[0]} needs at least as many microbatches as stages: raise --microbatches {setting.microbatches} "
            f"to {setting.stages}, or leave {' and '.join(delayed)} out of --variants"
        )
    if setting.iterations < MINIMUM_ITERATIONS:
        return (
            f"--iterations {setting.iterations} leaves too few steady ones without the first {FIRST} and the last "
            f"{LAST}: give at least {MINIMUM_ITERATIONS}"
        )
    if not math.isfinite(setting.forward_ms):
        return f"--forward-ms {setting.forward_ms} is no time"
    shortest = math.ceil(OWN_MS * max(1.0, setting.stages / _cores()) / (1 + BACKWARD))
    if setting.forward_ms < shortest:
        return (
            f"--forward-ms {setting.forward_ms:g} is less than {setting.stages} stage(s) need for their own computation"
            f" on {_cores()} core(s): give at least {shortest}"
        )
    return None


def _measured(setting: Setting, variants: list[str]) -> Iterator[Row]:
    """The rows, one run after another, under one progress bar."""
    from tqdm import tqdm

    # Where the bar isn't on a terminal every refresh is a line of a file.
    wait = 0.5 if sys.stderr.isatty() else 10.0
    total = len(variants) * setting.iterations
    with tqdm(total=total, unit="it", smoothing=0, mininterval=wait, miniters=0) as bar:
        for number, variant in enumerate(variants):
            bar.set_description(f"{variant} ({number + 1}/{len(variants)})", refresh=False)
            began, before = time.monotonic(), number * setting.iterations

            def progress(done: int, began: float = began, before: int = before) -> None:
                says = "" if done else f"starting, {time.monotonic() - began:.0f} s"
                bar.set_postfix_str(says, refresh=False)
                bar.update(before + done - bar.n)

            times, (late, steps) = train(variant, setting, progress)
            if late > _LATE * steps:
                bar.write(
                    f"bubble.py: warning: in {variant} {late} of {steps} forwards and backwards took longer than their "
                    f"time by their own computation, so its slowdown is too high: use a larger --forward-ms, or a "
                    f"machine that does nothing else",
                    file=sys.stderr,
                )
            yield Row(variant, setting, times)


def _cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main(sys.argv[1:]))
