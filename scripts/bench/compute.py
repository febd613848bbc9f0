"""Measures what 2BW gains where stages really compute: two balanced stages on two cores, one thread each.

    python scripts/bench/compute.py

Megatron's 1F1B, its interleaved 1F1B, 2BW, and 2BW with a wide lead where M allows it take turns, round by round, with
the bound: two processes that know nothing of each other, each of which trains one stage's layers on as many
microbatches, so without any communication.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, this folder is all that's on the path

from megatron_asyncpp.processes import exit_on_signals
from megatron_asyncpp.schedules import slowdown
from scripts.bench import ranks
from scripts.bench.command import Parser, exit_code
from scripts.bench.measure import Length, report_of, steady_iterations
from scripts.bench.ranks import Job
from scripts.bench.run import TRAINING, followed
from scripts.bench.variants import BACKWARD, VARIANTS

STAGES = 2
VARIANT_NAMES = ("1f1b", "interleaved", "2bw", "2bw-wide", "bound")
# A forward has to be long beside what messages and Python take.
_SHORTEST_MS = 100.0
_USUAL_MS = 250.0  # here, with the default sizes
_LAYERS = 2  # of a stage, so that interleaved 1F1B can split it
# To start a run takes so many seconds, measured.
_START_S = 5.0
_PATIENCE = 600.0


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        iteration_ms: the median time per iteration; of the bound, the mean of both processes' medians.
        forward_ms: the median time of a stage's forward, the mean of both stages; nothing else is in it but waits for
            a core.
        backward_ms: the same of a backward.
    """

    iteration_ms: float
    forward_ms: float
    backward_ms: float


@dataclass(frozen=True)
class Ratio:
    """How much longer one variant takes for the same work than another, round by round.

    Attributes:
        of: the name of the slower one, as expected.
        to: that of the faster one.
        predicted: without any cost but F and B.
        rounds: the ratio of their iterations' times in each round.
    """

    of: str
    to: str
    predicted: float
    rounds: list[float]

    @property
    def median(self) -> float:
        """Over the rounds."""
        return statistics.median(self.rounds)


def main(argv: list[str]) -> int:
    """Measure what a command line asks for, and print it.

    Returns:
        0, or 1 if a run failed, or 130 after a Ctrl-C. Bad arguments exit with 2 before any process is started.
    """
    args = arguments(argv)
    length = Length(args.warm_up, args.iterations, args.rounds)
    results: dict[tuple[int, str], list[Result]] = {
        (microbatches, variant): [] for microbatches in args.microbatches for variant in variants_at(microbatches)
    }
    print(
        f"compute.py: {args.rounds} round(s) of {len(results)} runs, {length.of_a_run} "
        f"iterations each: about {math.ceil(_seconds(results, length) / 60)} min if a forward takes {_USUAL_MS:.0f} ms",
        file=sys.stderr,
    )
    if code := exit_code("compute.py", lambda: _measure(args, length, results)):
        return code
    shortest = min(run.forward_ms for runs in results.values() for run in runs)
    if shortest < _SHORTEST_MS:
        print(
            f"compute.py: warning: a forward took {shortest:.0f} ms, too little beside what messages and Python take: "
            f"use a larger --seq-length than {args.seq_length}",
            file=sys.stderr,
        )
    if args.json:
        print(json.dumps(as_json(results)))
    print(table(results), file=sys.stderr if args.json else sys.stdout)
    return 0


def arguments(argv: list[str]) -> argparse.Namespace:
    """What to run. Exits with code 2 and a sentence if it can't be."""
    parser = Parser(
        prog="compute.py",
        description="Measures what 2BW gains on two stages that compute on two cores.",
    )
    parser.add_argument("--microbatches", default="2,4", metavar="LIST", help="per iteration, default %(default)s")
    parser.add_argument("--seq-length", type=int, default=512, metavar="N", help="default %(default)s")
    parser.add_argument("--hidden-size", type=int, default=512, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--iterations", type=int, default=4, metavar="N", help="that count, of each run, default %(default)s"
    )
    parser.add_argument(
        "--warm-up", type=int, default=2, metavar="N", help="iterations before those, default %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="runs of each variant, default %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object; the table goes to standard error")
    args = parser.parse_args(argv)
    for name in ("iterations", "warm_up", "rounds", "seq_length", "hidden_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} is too few: give at least 1")
    if args.hidden_size % 64:
        parser.error(f"--hidden-size {args.hidden_size} is no multiple of 64, the width of an attention head")
    words = args.microbatches.split(",")
    if not all(word.isdecimal() and int(word) >= STAGES and int(word) % STAGES == 0 for word in words):
        parser.error(
            f"--microbatches {args.microbatches}: interleaved 1F1B needs multiples of the {STAGES} stages, as in 2,4"
        )
    args.microbatches = list(dict.fromkeys(map(int, words)))
    if len(os.sched_getaffinity(0)) < STAGES:
        parser.error(f"this process may use one core only, and {STAGES} stages need one each")
    return args


def variants_at(microbatches: int) -> list[str]:
    """Those that can run so many microbatches in an iteration."""
    return [name for name in VARIANT_NAMES if name == "bound" or not VARIANTS[name].obstacle(STAGES, microbatches)]


def job_of(variant: str, args: argparse.Namespace, microbatches: int, length: Length) -> Job:
    """What the ranks of a variant's run do."""
    alone = variant == "bound"
    chunks = 1 if alone else VARIANTS[variant].chunks
    stages = 1 if alone else STAGES
    flags = [
        *("--pipeline-model-parallel-size", str(stages), "--num-layers", str(stages * _LAYERS)),
        *("--hidden-size", str(args.hidden_size), "--num-attention-heads", str(args.hidden_size // 64)),
        *("--seq-length", str(args.seq_length), "--max-position-embeddings", str(args.seq_length)),
        *("--vocab-size", "64", "--untie-embeddings-and-output-weights", "--tokenizer-type", "NullTokenizer"),
        *("--mock-data", "--num-workers", "0"),
        *("--global-batch-size", str(microbatches), "--train-iters", str(length.of_a_run)),
        *TRAINING.split(),
        *(() if alone else VARIANTS[variant].flags),
    ]
    # Stages that last no longer than they compute.
    arguments = {"flags": flags, "warm_up": length.warm_up * microbatches * chunks, "forward": 0.0, "backward": 0.0}
    return Job(
        "scripts.bench.sleeping_stages:main", arguments, ranks=stages, copies=STAGES if alone else 1, pinned=True
    )


def read(variant: str, outputs: list[str], length: Length) -> Result:
    """What a run's ranks printed.

    Raises:
        ValueError: it isn't that of a whole run.
    """
    logs = outputs if variant == "bound" else outputs[-1:]  # else only the last rank logs
    times = [statistics.median(steady_iterations(log, length)) for log in logs]
    reports = [report_of(output) for output in outputs]
    chunks = 1 if variant == "bound" else VARIANTS[variant].chunks
    forward, backward = (
        chunks * statistics.mean(report[kind]["own_ms"] for report in reports) for kind in ("forward", "backward")
    )
    return Result(statistics.mean(times), forward, backward)


def ratios(results: dict[tuple[int, str], list[Result]], microbatches: int) -> list[Ratio]:
    """How 2BW compares with the others at one number of microbatches."""
    runs = {variant: results[microbatches, variant] for variant in variants_at(microbatches)}

    def ratio(of: str, to: str, predicted: float) -> Ratio:
        pairs = zip(runs[of], runs[to], strict=True)
        return Ratio(of, to, predicted, [one.iteration_ms / other.iteration_ms for one, other in pairs])

    return [
        *(ratio("bound", name, 1.0) for name in ("2bw", "2bw-wide") if name in runs),
        ratio("1f1b", "2bw", slowdown.one_f_one_b(STAGES, microbatches)),
        ratio("interleaved", "2bw", slowdown.interleaved(STAGES, microbatches, 2)),
    ]


def table(results: dict[tuple[int, str], list[Result]]) -> str:
    """For people, in Markdown: the times, then the ratios and their spread over the rounds."""
    lines = ["| M | variant | iteration (ms) | of the rounds | F (ms) | B (ms) |", "|--:|---|--:|---|--:|--:|"]
    for (microbatches, variant), runs in results.items():
        times = [run.iteration_ms for run in runs]
        forward, backward = (statistics.median(getattr(run, f"{kind}_ms") for run in runs) for kind in _KINDS)
        lines.append(
            f"| {microbatches} | {variant} | {statistics.median(times):.0f} | {min(times):.0f} to {max(times):.0f} "
            f"| {forward:.0f} | {backward:.0f} |"
        )
    lines += ["", "| M | time of | over that of | median | of the rounds | predicted | reached |"]
    lines += ["|--:|---|---|--:|---|--:|--:|"]
    for microbatches in dict.fromkeys(microbatches for microbatches, _ in results):
        for ratio in ratios(results, microbatches):
            lines.append(
                f"| {microbatches} | {ratio.of} | {ratio.to} | {ratio.median:.3f} "
                f"| {min(ratio.rounds):.3f} to {max(ratio.rounds):.3f} | {ratio.predicted:.3f} "
                f"| {ratio.median / ratio.predicted:.3f} |"
            )
    return "\n".join(lines)


_KINDS = ("forward", "backward")


def as_json(results: dict[tuple[int, str], list[Result]]) -> dict[str, Any]:
    """For machines: each run, and the ratios."""
    return {
        "runs": [
            {"microbatches": microbatches, "variant": variant, "round": number, **vars(run)}
            for (microbatches, variant), runs in results.items()
            for number, run in enumerate(runs)
        ],
        "ratios": [
            {"microbatches": microbatches, **vars(ratio), "median": ratio.median}
            for microbatches in dict.fromkeys(microbatches for microbatches, _ in results)
            for ratio in ratios(results, microbatches)
        ],
    }


def _measure(args: argparse.Namespace, length: Length, results: dict[tuple[int, str], list[Result]]) -> None:
    """All runs, under one progress bar; for each variant one result a round."""
    from tqdm import tqdm

    wait = 0.5 if sys.stderr.isatty() else 10.0
    with tqdm(total=args.rounds * len(results) * length.of_a_run, unit="it", mininterval=wait, miniters=0) as bar:
        bar.set_description("importing Megatron")
        ranks.server()
        done = 0
        for number in range(args.rounds):
            for microbatches, variant in results:
                bar.set_description(f"{variant}, M={microbatches}, round {number + 1}/{args.rounds}", refresh=False)
                job = job_of(variant, args, microbatches, length)
                results[microbatches, variant].append(_run(variant, job, length, _counts(bar, done)))
                done += length.of_a_run
                bar.update(done - bar.n)


def _run(variant: str, job: Job, length: Length, progress: Callable[[int], None]) -> Result:
    return followed(variant, lambda folder: job, _PATIENCE, progress, lambda outputs: read(variant, outputs, length))


def _counts(bar: Any, before: int) -> Callable[[int], None]:
    return lambda iterations: bar.update(before + iterations - bar.n)


def _seconds(results: dict[tuple[int, str], list[Result]], length: Length) -> float:
    """How long all rounds should take, with forwards of the usual length."""
    run = sum(microbatches * _slowdown(variant, microbatches) for microbatches, variant in results)
    return length.rounds * (run * _USUAL_MS / 1000 * (1 + BACKWARD) * length.of_a_run + _START_S * len(results))


def _slowdown(variant: str, microbatches: int) -> float:
    return 1.0 if variant == "bound" else VARIANTS[variant].theory(STAGES, microbatches, 0.0)


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main(sys.argv[1:]))
