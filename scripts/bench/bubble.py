"""Measures the pipeline bubble on a machine without a GPU: Megatron's real pretraining loop on stages that sleep.

    python scripts/bench/bubble.py --pp 4,8 --microbatches 1x,2x

Each stage is a process whose forwards last F and whose backwards last 2F. The slowdown is Megatron's own time per
iteration, as it logs it, over the M * 3F that a pipeline without bubble would take. Variants take turns, round by
round, so that what else the machine does hits them all alike.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, this folder is all that's on the path

from megatron_asyncpp.processes import exit_on_signals
from scripts.bench import ranks
from scripts.bench.command import Parser, exit_code
from scripts.bench.measure import LAST, Length, Row, Setting, table
from scripts.bench.run import train
from scripts.bench.variants import BACKWARD, VARIANTS

# What a stage computes for a microbatch by itself, in ms of a core, measured; it must fit into what it is to last.
OWN_MS = 12.0
# To start the ranks' server, and then a run of each process, takes so many seconds of a core, measured.
_SERVER_S = 12.0
_START_S = 3.0
# With more late forwards and backwards than this share, the machine was too busy to believe the figures.
_LATE = 0.02


@dataclass(frozen=True)
class Plan:
    """What a command line asks for.

    Attributes:
        runs: the pipelines and variants of one round, in order.
        skipped: what was asked for and can't run, a sentence each.
        length: of each run, and the number of rounds.
        as_json: whether to print JSON.
        picture: where to draw the rows, or None.
    """

    runs: list[tuple[Setting, str]]
    skipped: list[str]
    length: Length
    as_json: bool
    picture: Path | None

    @property
    def seconds(self) -> float:
        """How long all of it will take if nothing else runs on the machine."""
        total = _SERVER_S
        for setting, variant in self.runs:
            slowdown = Row(variant, setting).theory
            iterations = slowdown * setting.ideal_ms / 1000 * self.length.of_a_run
            total += self.length.rounds * (_START_S * max(1.0, setting.stages / _cores()) + iterations)
        return total


def main(argv: list[str]) -> int:
    """Measure what a command line asks for, and print it.

    Returns:
        0, or 1 if a run failed, or 130 after a Ctrl-C; what was measured until then is printed. Bad arguments exit
        with 2 before any process is started.
    """
    plan = arguments(argv)
    for sentence in plan.skipped:
        print(f"bubble.py: {sentence}", file=sys.stderr)
    print(
        f"bubble.py: {plan.length.rounds} round(s) of {len(plan.runs)} run(s), {plan.length.of_a_run} iterations each, "
        f"on {_cores()} core(s): about {max(1, math.ceil(plan.seconds / 60))} min",
        file=sys.stderr,
    )
    rows = {run: Row(run[1], run[0]) for run in plan.runs}
    code = exit_code("bubble.py", lambda: _measure(plan, rows))
    _show(plan, [row for row in rows.values() if row.rounds_ms])
    return code


def arguments(argv: list[str]) -> Plan:
    """What to run. Exits with code 2 and a sentence if it can't be."""
    parser = Parser(
        prog="bubble.py",
        description="Measures the pipeline bubble on a machine without a GPU.",
        epilog=f"A backward lasts {BACKWARD:g} F. The slowdown is the median of the iterations of all rounds, without "
        f"those that warm up and the last {LAST} of each run.",
    )
    parser.add_argument("--pp", required=True, metavar="LIST", help="pipeline stages P, a process each, as in 4,8")
    parser.add_argument(
        "--microbatches", required=True, metavar="LIST", help="per iteration, as in 4,8, or for each P as in 1x,2x"
    )
    parser.add_argument("--forward-ms", type=float, default=100.0, metavar="F", help="default %(default)g")
    parser.add_argument(
        "--latency", default="0", metavar="LIST", help="of each message between stages, in F, as in 0,0.05,0.2"
    )
    parser.add_argument(
        "--variants", default=",".join(VARIANTS), metavar="LIST", help="separated by commas, default %(default)s"
    )
    parser.add_argument(
        "--iterations", type=int, default=4, metavar="N", help="that count, of each run, default %(default)s"
    )
    parser.add_argument(
        "--warm-up", type=int, default=3, metavar="N", help="iterations before those, default %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="runs of each variant, default %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object; the table goes to standard error")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the slowdowns, as .png, .svg or .pdf")
    args = parser.parse_args(argv)
    try:
        return _plan(args)
    except ValueError as error:
        parser.error(str(error))


def _plan(args: argparse.Namespace) -> Plan:
    """What the arguments ask for.

    Raises:
        ValueError: they can't be, with the sentence that says why.
    """
    for flag, least in (("iterations", 1), ("warm_up", 1), ("rounds", 1)):
        if getattr(args, flag) < least:
            raise ValueError(f"--{flag.replace('_', '-')} {getattr(args, flag)} is too few: give at least {least}")
    if args.picture is not None and args.picture.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--picture {args.picture} has to end in .png, .svg or .pdf")
    if args.picture is not None and not args.picture.absolute().parent.is_dir():
        raise ValueError(f"--picture {args.picture}: there is no folder {args.picture.absolute().parent}")
    variants = args.variants.split(",")
    for variant in variants:
        if variant not in VARIANTS:
            raise ValueError(f"--variants: there is no variant {variant!r}, choose from {', '.join(VARIANTS)}")
    if len(set(variants)) < len(variants):
        raise ValueError(f"--variants {args.variants} names one of them twice: name each once")
    if not math.isfinite(args.forward_ms):
        raise ValueError(f"--forward-ms {args.forward_ms} is no time")
    settings = [
        Setting(stages, microbatches, args.forward_ms, latency)
        for latency in _latencies(args.latency)
        for stages in _numbers("--pp", args.pp)
        for microbatches in _microbatches(args.microbatches, stages)
    ]
    for setting in settings:
        shortest = math.ceil(OWN_MS * max(1.0, setting.stages / _cores()) / (1 + BACKWARD))
        if setting.forward_ms < shortest:
            raise ValueError(
                f"--forward-ms {setting.forward_ms:g} is less than {setting.stages} stage(s) need for their own "
                f"computation on {_cores()} core(s): give at least {shortest}"
            )
    runs, skipped = [], {}
    for setting in settings:
        for variant in variants:
            obstacle = VARIANTS[variant].obstacle(setting.stages, setting.microbatches)
            if obstacle is None:
                runs.append((setting, variant))
            else:
                skipped[f"without {variant} at P={setting.stages}, M={setting.microbatches}: {obstacle}"] = None
    if not runs:
        raise ValueError(f"nothing is left to run: {'; '.join(skipped)}")
    return Plan(runs, list(skipped), Length(args.warm_up, args.iterations, args.rounds), args.json, args.picture)


def _numbers(flag: str, words: str) -> list[int]:
    found = []
    for word in words.split(","):
        if not re.fullmatch("[0-9]+", word) or int(word) < 1:
            raise ValueError(f"{flag} {words}: {word!r} is no number of them, give at least 1")
        found.append(int(word))
    return list(dict.fromkeys(found))


def _microbatches(words: str, stages: int) -> list[int]:
    return list(
        dict.fromkeys(
            number * (stages if word.endswith("x") else 1)
            for word in words.split(",")
            for number in _numbers("--microbatches", word.removesuffix("x"))
        )
    )


def _latencies(words: str) -> list[float]:
    found = []
    for word in words.split(","):
        try:
            latency = float(word)
        except ValueError:
            latency = math.nan
        if not 0 <= latency < math.inf:
            raise ValueError(f"--latency {words}: {word!r} is no share of F, give at least 0")
        found.append(latency)
    return list(dict.fromkeys(found))


def _measure(plan: Plan, rows: dict[tuple[Setting, str], Row]) -> None:
    """Fill the rows, one run after another, under one progress bar."""
    from tqdm import tqdm

    # Where the bar isn't on a terminal every refresh is a line of a file.
    wait = 0.5 if sys.stderr.isatty() else 10.0
    total = plan.length.rounds * len(plan.runs) * plan.length.of_a_run
    with tqdm(total=total, unit="it", smoothing=0, mininterval=wait, miniters=0) as bar:
        bar.set_description("importing Megatron")
        ranks.server()
        done = 0
        for number in range(plan.length.rounds):
            for setting, variant in plan.runs:
                of = f", round {number + 1}/{plan.length.rounds}" if plan.length.rounds > 1 else ""
                bar.set_description(f"{variant}, P={setting.stages}, M={setting.microbatches}{of}", refresh=False)
                began = time.monotonic()

                def progress(iterations: int, began: float = began, before: int = done) -> None:
                    says = "" if iterations else f"starting, {time.monotonic() - began:.0f} s"
                    bar.set_postfix_str(says, refresh=False)
                    bar.update(before + iterations - bar.n)

                times, (late, steps) = train(variant, setting, plan.length, progress)
                done += plan.length.of_a_run
                bar.update(done - bar.n)
                row = rows[setting, variant]
                row.rounds_ms.append(times)
                row.late += late
                row.steps += steps


def _show(plan: Plan, rows: list[Row]) -> None:
    """Print the rows that have been measured, draw them, and say which of them not to believe."""
    for row in rows:
        if row.late > _LATE * row.steps:
            print(
                f"bubble.py: warning: in {row.variant} at P={row.setting.stages}, M={row.setting.microbatches} "
                f"{row.late} of {row.steps} forwards and backwards took longer than their time by their own "
                f"computation, so its slowdown is too high: use a larger --forward-ms, or a machine that does nothing "
                f"else",
                file=sys.stderr,
            )
    if not rows:
        return
    shown: list[Any] = [row.as_json() for row in rows]
    print(table(rows), file=sys.stderr if plan.as_json else sys.stdout)
    if plan.as_json:
        print(json.dumps({"rows": shown}))
    if plan.picture is not None:
        from scripts.bench.picture import draw

        draw(rows, plan.picture)


def _cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main(sys.argv[1:]))
