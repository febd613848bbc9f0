"""Measures what the plugin itself computes, beside the same model under Megatron's own schedule.

    python scripts/bench/overhead.py

Both take turns on the same tiny model, with few and with many microbatches in an iteration. Two things are measured.
One is the Python of the plugin's own functions, by Python's profiler, which makes them slower rather than faster: the
difference of the two numbers of microbatches is the price of a microbatch, and what remains that of an iteration. The
other is the time of a rank's main thread on its core, so neither waits for other stages nor other processes are in it.
All iterations do the same work, and whatever slows a core down only adds to that, so the fastest tenth is what counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, this folder is all that's on the path

from megatron_asyncpp.processes import exit_on_signals
from scripts.bench.command import Parser, exit_code
from scripts.bench.ranks import Job
from scripts.bench.run import MODEL, TRAINING, followed
from scripts.bench.variants import VARIANTS

STAGES = 2
FEW, MANY = 4, 20  # microbatches
MEGATRON = "1f1b"
_WARM_UP = 5
_PATIENCE = 300.0
_OWN = "bench own: "
_LISTED = 10  # functions


@dataclass(frozen=True)
class Report:
    """What one rank's main thread did, per iteration.

    Attributes:
        iterations_ms: the time of each that counts and wasn't profiled.
        functions: ms and calls of each of the plugin's functions, of its own.
    """

    iterations_ms: list[float]
    functions: dict[str, tuple[float, float]]

    @property
    def python_ms(self) -> float:
        """Of all functions of the plugin."""
        return sum(own for own, _ in self.functions.values())


Reports = dict[tuple[str, int], list[list[Report]]]  # by variant and M: of each round the ranks' reports


def main(argv: list[str]) -> int:
    """Measure what a command line asks for, and print it.

    Returns:
        0, or 1 if a run failed, or 130 after a Ctrl-C. Bad arguments exit with 2 before any process is started.
    """
    args = arguments(argv)
    reports: Reports = {}
    if code := exit_code("overhead.py", lambda: _measure(args, reports)):
        return code
    rows = [row for variant in args.variants for row in costs(variant, reports)]
    profiles = {variant: profile(reports[variant, MANY]) for variant in args.variants}
    if args.json:
        print(json.dumps({"rows": rows, "profiles": profiles}))
    else:
        print("\n\n".join([table(rows), *(listing(variant, profiles[variant]) for variant in args.variants)]))
    return 0


def arguments(argv: list[str]) -> argparse.Namespace:
    """What to run. Exits with code 2 and a sentence if it can't be."""
    parser = Parser(prog="overhead.py", description="Measures the plugin's own cost.")
    parser.add_argument("--variants", default="2bw,2bw-wide", metavar="LIST", help="default %(default)s")
    parser.add_argument("--iterations", type=int, default=60, metavar="N", help="of each run, default %(default)s")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each variant, default %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object, in place of a table")
    args = parser.parse_args(argv)
    args.variants = list(dict.fromkeys(args.variants.split(",")))
    offered = [name for name, variant in VARIANTS.items() if "--asyncpp-schedule" in variant.flags]
    for variant in args.variants:
        if variant not in offered:
            parser.error(f"--variants: {variant!r} is none of the plugin's, choose from {', '.join(offered)}")
    if args.iterations < 4 * _WARM_UP:
        parser.error(f"--iterations {args.iterations} leaves too few after the warm-up: give at least {4 * _WARM_UP}")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} measures nothing: give at least 1")
    return args


def _measure(args: argparse.Namespace, reports: Reports) -> None:
    """Run all of it into the table, round by round, under one progress bar."""
    from tqdm import tqdm

    variants = [MEGATRON, *args.variants]
    todo = [(variant, count) for _ in range(args.rounds) for variant in variants for count in (FEW, MANY)]
    for variant, count in tqdm(todo, unit="run"):
        job = job_of(variant, count, args.iterations)
        ranks = followed(
            variant,
            lambda folder, job=job: job,
            _PATIENCE,
            lambda done: None,
            lambda outputs: [report_of(output) for output in outputs],
        )
        reports.setdefault((variant, count), []).append(ranks)


def job_of(variant: str, microbatches: int, iterations: int) -> Job:
    """What the ranks of a variant's run do."""
    flags = [
        *("--pipeline-model-parallel-size", str(STAGES), "--num-layers", str(STAGES)),
        *("--global-batch-size", str(microbatches), "--train-iters", str(iterations)),
        *MODEL.split(),
        *TRAINING.split(),
        *VARIANTS[variant].flags,
    ]
    arguments = {"flags": flags, "iterations": iterations, "warm_up": _WARM_UP}
    return Job("scripts.bench.own_time:main", arguments, STAGES, pinned=True)


def report_of(output: str) -> Report:
    """What a rank printed.

    Raises:
        ValueError: the output isn't that of a whole run.
    """
    found = [line.removeprefix(_OWN) for line in output.splitlines() if line.startswith(_OWN)]
    if len(found) != 1:
        raise ValueError(f"the log has {len(found)} reports of the bench's own script, not one")
    report = json.loads(found[0])
    return Report(report["iterations_ms"], {name: (own, calls) for name, (own, calls) in report["functions"].items()})


def costs(variant: str, reports: Reports) -> list[dict[str, object]]:
    """What a variant costs each stage beyond Megatron's schedule.

    Python of its own in an iteration of M microbatches is a + b M, both taken from the medians over the rounds.
    """
    rows: list[dict[str, object]] = []
    for stage in range(STAGES):

        def beyond(count: int, figure: Callable[[list[Report]], float], stage: int = stage) -> tuple[float, float]:
            own, megatron = (figure([ranks[stage] for ranks in reports[name, count]]) for name in (variant, MEGATRON))
            return own - megatron, megatron

        few, many = (beyond(count, _python)[0] for count in (FEW, MANY))
        each = (many - few) / (MANY - FEW)
        row: dict[str, object] = {"variant": variant, "stage": stage}
        row |= {"microbatch_ms": each, "iteration_ms": few - FEW * each}
        for count in (FEW, MANY):
            more, megatron = beyond(count, _thread)
            row |= {f"thread_ms_{count}": more, f"megatron_thread_ms_{count}": megatron}
        rows.append(row)
    return rows


def _python(rounds: list[Report]) -> float:
    return statistics.median(report.python_ms for report in rounds)


def _thread(rounds: list[Report]) -> float:
    times = [elapsed for report in rounds for elapsed in report.iterations_ms]
    return statistics.quantiles(times, n=10, method="inclusive")[0]


def profile(rounds: Iterable[list[Report]]) -> list[tuple[str, float, float]]:
    """The functions with the most Python of their own on any stage: name, ms and calls per iteration, over rounds."""
    found: dict[str, tuple[float, float]] = {}
    for ranks in zip(*rounds, strict=True):
        for name in set.union(*(set(report.functions) for report in ranks)):
            own, calls = (
                statistics.median(report.functions.get(name, (0.0, 0.0))[part] for report in ranks) for part in (0, 1)
            )
            found[name] = max(found.get(name, (0.0, 0.0)), (own, calls))
    most = sorted(found.items(), key=lambda item: item[1], reverse=True)[:_LISTED]
    return [(name, own, calls) for name, (own, calls) in most]


def table(rows: list[dict[str, object]]) -> str:
    """The rows for people, in Markdown."""
    lines = [
        "| variant | stage | own Python per microbatch (ms) | per iteration (ms) "
        f"| thread, more at M={FEW} (ms) | at M={MANY} | Megatron's at M={FEW} | at M={MANY} |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        more = [
            f"{row[key]:+.2f}" for key in ("microbatch_ms", "iteration_ms", f"thread_ms_{FEW}", f"thread_ms_{MANY}")
        ]
        megatron = [f"{row[f'megatron_thread_ms_{count}']:.2f}" for count in (FEW, MANY)]
        lines.append(f"| {' | '.join([str(row['variant']), str(row['stage']), *more, *megatron])} |")
    return "\n".join(lines)


def listing(variant: str, functions: list[tuple[str, float, float]]) -> str:
    """The functions with the most Python of their own, for people."""
    lines = [f"{variant}, M={MANY}: ms of its own, and calls, per iteration (profiled, on the stage where it is most)"]
    return "\n".join(lines + [f"  {own:6.3f}  {calls:6.1f}  {name}" for name, own, calls in functions])


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main(sys.argv[1:]))
