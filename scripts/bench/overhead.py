"""Measures what the plugin itself computes: the time of a rank's main thread beyond that under Megatron's own schedule.

    python scripts/bench/overhead.py

Both take turns on the same tiny model, with few and with many microbatches in an iteration. The difference of the two
is the price of a microbatch, and what remains that of an iteration. Time is that of the thread on its core, so neither
waits for other stages nor other processes are in it.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
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
_OWN = re.compile(r"^bench own: (.*)$", re.MULTILINE)

Times = dict[tuple[str, int], list[list[float]]]  # by variant and M: for each round, the time of each rank in ms


def main(argv: list[str]) -> int:
    """Measure what a command line asks for, and print it.

    Returns:
        0, or 1 if a run failed, or 130 after a Ctrl-C. Bad arguments exit with 2 before any process is started.
    """
    args = arguments(argv)
    times: Times = {}
    if code := exit_code("overhead.py", lambda: _measure(args, times)):
        return code
    rows = [row for variant in args.variants for row in costs(variant, times)]
    print(json.dumps({"rows": rows}) if args.json else table(rows))
    return 0


def arguments(argv: list[str]) -> argparse.Namespace:
    """What to run. Exits with code 2 and a sentence if it can't be."""
    parser = Parser(prog="overhead.py", description="Measures the plugin's own cost.")
    parser.add_argument("--variants", default="2bw,2bw-wide", metavar="LIST", help="default %(default)s")
    parser.add_argument("--iterations", type=int, default=40, metavar="N", help="of each run, default %(default)s")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each variant, default %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object, in place of a table")
    args = parser.parse_args(argv)
    args.variants = list(dict.fromkeys(args.variants.split(",")))
    offered = [name for name, variant in VARIANTS.items() if "--asyncpp-schedule" in variant.flags]
    for variant in args.variants:
        if variant not in offered:
            parser.error(f"--variants: {variant!r} is none of the plugin's, choose from {', '.join(offered)}")
    if args.iterations < 2 * _WARM_UP:
        parser.error(f"--iterations {args.iterations} leaves too few after the warm-up: give at least {2 * _WARM_UP}")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} measures nothing: give at least 1")
    return args


def _measure(args: argparse.Namespace, times: Times) -> None:
    """Run all of it into the table, round by round, under one progress bar."""
    from tqdm import tqdm

    variants = [MEGATRON, *args.variants]
    todo = [(variant, count) for _ in range(args.rounds) for variant in variants for count in (FEW, MANY)]
    for variant, count in tqdm(todo, unit="run"):
        job = job_of(variant, count, args.iterations)

        def read(outputs: list[str]) -> list[float]:
            return [own_time(output, args.iterations) for output in outputs]

        times.setdefault((variant, count), []).append(
            followed(variant, lambda folder, job=job: job, _PATIENCE, lambda done: None, read)
        )


def job_of(variant: str, microbatches: int, iterations: int) -> Job:
    """What the ranks of a variant's run do."""
    flags = [
        *("--pipeline-model-parallel-size", str(STAGES), "--num-layers", str(STAGES)),
        *("--global-batch-size", str(microbatches), "--train-iters", str(iterations)),
        *MODEL.split(),
        *TRAINING.split(),
        *VARIANTS[variant].flags,
    ]
    return Job("scripts.bench.own_time:main", {"flags": flags}, STAGES, pinned=True)


def own_time(output: str, iterations: int) -> float:
    """The median iteration of a rank, in ms, without the first ones and the last, in which the pipeline drains.

    Raises:
        ValueError: the output isn't that of a whole run.
    """
    reports = _OWN.findall(output)
    if len(reports) != 1:
        raise ValueError(f"the log has {len(reports)} reports of the bench's own script, not one")
    times = json.loads(reports[0])["iterations_ms"]
    if len(times) != iterations - 1:
        raise ValueError(f"the log has the times of {len(times)} of {iterations - 1} iterations")
    return statistics.median(times[_WARM_UP:-1])


def costs(variant: str, times: Times) -> list[dict[str, object]]:
    """What a variant costs each stage beyond Megatron's schedule, per microbatch and per iteration.

    An iteration of M microbatches takes a + b M. Both are taken from the medians over the rounds.
    """
    rows = []
    for stage in range(STAGES):
        line = {}
        for name in (variant, MEGATRON):
            few, many = (statistics.median(ranks[stage] for ranks in times[name, count]) for count in (FEW, MANY))
            each = (many - few) / (MANY - FEW)
            line[name] = (each, few - FEW * each)
        (each, rest), (megatron_each, megatron_rest) = line[variant], line[MEGATRON]
        rows.append(
            {
                "variant": variant,
                "stage": stage,
                "microbatch_ms": each - megatron_each,
                "iteration_ms": rest - megatron_rest,
                "megatron_microbatch_ms": megatron_each,
                "megatron_iteration_ms": megatron_rest,
            }
        )
    return rows


def table(rows: list[dict[str, object]]) -> str:
    """The rows for people, in Markdown."""
    lines = [
        "| variant | stage | more per microbatch (ms) | more per iteration (ms) "
        "| Megatron's own per microbatch | per iteration |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row['variant']} | {row['stage']} | {row['microbatch_ms']:+.2f} | {row['iteration_ms']:+.2f} "
        f"| {row['megatron_microbatch_ms']:.2f} | {row['megatron_iteration_ms']:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main(sys.argv[1:]))
