"""Measures what 2BW gains where stages really compute: two balanced stages on two cores, one thread each.

    python scripts/bench/compute.py

Megatron's 1F1B, its interleaved 1F1B, 2BW, and 2BW with a wide lead where M allows it take turns of some seconds with
the bound: two processes that know nothing of each other, each of which trains one stage's layers on as many
microbatches, so without any communication. All are alive at the same time, which takes some 6 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, this folder is all that's on the path

from megatron_asyncpp.processes import exit_on_signals
from megatron_asyncpp.schedules import slowdown
from scripts.bench import ranks
from scripts.bench.command import Parser, exit_code
from scripts.bench.measure import LAST, Length, report_of
from scripts.bench.ranks import Job
from scripts.bench.run import TRAINING
from scripts.bench.turns import RunningTime, in_turns
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
# Of the bound, and as much longer for a variant as its iterations take, so that all end at about the same moment. Long
# beside the time that it takes to fill the caches again.
_TURN_S = 2.0


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        iteration_ms: the mean time per iteration, of both stages or processes.
        forward_ms: the median time of a stage's forward, the mean of both stages.
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
        rounds: the ratio of their times per iteration in each round.
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
        "--iterations", type=int, default=8, metavar="N", help="that count, of each run, default %(default)s"
    )
    parser.add_argument(
        "--warm-up", type=int, default=2, metavar="N", help="iterations before those, default %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each variant, default %(default)s")
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
    return Job(
        "scripts.bench.computing_stages:main",
        {"flags": flags},
        ranks=stages,
        copies=STAGES if alone else 1,
        pinned=True,
    )


def read(variant: str, outputs: list[str], ran: RunningTime, microbatches: int, length: Length) -> Result:
    """What a run's ranks printed.

    Args:
        variant: its name.
        outputs: of its ranks, or of both processes of the bound.
        ran: when it ran and when it was stopped.
        microbatches: M.
        length: of the run.

    Raises:
        ValueError: it isn't that of a whole run.
    """
    chunks = 1 if variant == "bound" else VARIANTS[variant].chunks
    figures: dict[str, list[float]] = {"iteration": [], "forward": [], "backward": []}
    for report in map(report_of, outputs):
        ends = [ran.at(end) for _, end in report["iteration"]]
        if len(ends) != length.of_a_run:
            raise ValueError(f"the report has {len(ends)} of {length.of_a_run} iterations")
        first, last = length.warm_up - 1, length.of_a_run - LAST - 1
        figures["iteration"].append((ends[last] - ends[first]) / length.iterations)
        for kind in _KINDS:
            times = [ran.at(end) - ran.at(began) for began, end in report[kind]]
            figures[kind].append(chunks * statistics.median(times[length.warm_up * microbatches * chunks :]))
    return Result(**{f"{kind}_ms": 1000 * statistics.mean(values) for kind, values in figures.items()})


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
        for number, microbatches in product(range(args.rounds), args.microbatches):
            bar.set_description(f"M={microbatches}, round {number + 1}/{args.rounds}", refresh=False)
            variants = variants_at(microbatches)
            found = in_turns(
                f"M={microbatches}",
                {variant: job_of(variant, args, microbatches, length) for variant in variants},
                {variant: _TURN_S * _slowdown(variant, microbatches) for variant in variants},
                length.warm_up,
                _PATIENCE,
                lambda logged, done=done: bar.update(done + logged - bar.n),
                partial(read, microbatches=microbatches, length=length),
            )
            for variant, result in found.items():
                results[microbatches, variant].append(result)
            done += len(variants) * length.of_a_run
            bar.update(done - bar.n)


def _seconds(results: dict[tuple[int, str], list[Result]], length: Length) -> float:
    """How long all rounds should take, with forwards of the usual length."""
    run = sum(microbatches * _slowdown(variant, microbatches) for microbatches, variant in results)
    return length.rounds * (run * _USUAL_MS / 1000 * (1 + BACKWARD) * length.of_a_run + _START_S * len(results))


def _slowdown(variant: str, microbatches: int) -> float:
    return 1.0 if variant == "bound" else VARIANTS[variant].theory(STAGES, microbatches, 0.0)


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main(sys.argv[1:]))
