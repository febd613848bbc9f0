"""The `timeline` command: draws how stages spend their time, or writes it as a trace; as planned, or as measured."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from megatron_asyncpp import trace_files
from megatron_asyncpp.errors import AsyncPPError
from megatron_asyncpp.schedules import SCHEDULES, perfetto, picture
from megatron_asyncpp.schedules.simulate import simulate
from megatron_asyncpp.simulate_command import _time, _times

_SUFFIXES = {"picture": (".png", ".svg"), "perfetto": (".json",)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the `timeline` command."""
    parser.add_argument(
        "--from",
        dest="folder",
        type=Path,
        metavar="DIR",
        help="what a run with --asyncpp-trace DIR has measured, in place of a plan",
    )
    parser.add_argument("--schedule", choices=SCHEDULES)
    parser.add_argument("--pp", type=int, metavar="P", help="pipeline stages")
    parser.add_argument("--microbatches", type=int, metavar="M", help="microbatches per batch")
    parser.add_argument("--batches", type=int, default=3, metavar="N", help="batches to show (default %(default)s)")
    parser.add_argument(
        "--forward", default="1", metavar="T[,T...]", help="time of a microbatch's forward on every stage, or on each"
    )
    parser.add_argument("--backward", default="2", metavar="T[,T...]", help="the same of its backward")
    parser.add_argument("--latency", default="0", metavar="T", help="time of a message between two stages")
    parser.add_argument(
        "--format",
        choices=_SUFFIXES,
        default="picture",
        help="a picture, or a trace to open at https://ui.perfetto.dev (default %(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help=".png or .svg for a picture, .json for a trace"
    )


def main(args: argparse.Namespace) -> int:
    """Run the `timeline` command."""
    _check(args)
    try:
        if args.folder is not None:
            _write_measured(args)
        else:
            _write_planned(args)
    except OSError as error:
        raise AsyncPPError(
            f"{args.out} can't be written ({error.strerror}): give --out a file in a folder that exists and that you "
            f"may write to."
        ) from error
    hint = ": open it at https://ui.perfetto.dev" if args.format == "perfetto" else ""
    print(f"wrote {args.out}{hint}")
    return 0


def _write_measured(args: argparse.Namespace) -> None:
    measured = trace_files.read(args.folder)
    (trace_files.write_trace if args.format == "perfetto" else trace_files.draw)(measured, args.out)


def _write_planned(args: argparse.Namespace) -> None:
    name, stages, count = args.schedule, args.pp, args.microbatches
    forward, backward = _times("--forward", args.forward, stages), _times("--backward", args.backward, stages)
    # Times are given in any unit, and shown in forwards.
    unit = forward[0]
    simulation = simulate(
        SCHEDULES[name],
        stages,
        count,
        forward=[float(time / unit) for time in forward],
        backward=[float(time / unit) for time in backward],
        latency=float(_time("--latency", args.latency) / unit),
        batches=args.batches,
    )
    if args.format == "perfetto":
        perfetto.write(simulation.spans, args.out, name=f"{name}, P = {stages}, M = {count}")
    else:
        picture.draw(simulation.spans, args.out, name=name, slowdown=simulation.slowdown)


def _check(args: argparse.Namespace) -> None:
    plan = {"--schedule": args.schedule, "--pp": args.pp, "--microbatches": args.microbatches}
    if args.folder is None:
        if missing := [flag for flag, value in plan.items() if value is None]:
            raise AsyncPPError(
                f"{', '.join(missing)} must be given to show a plan; to show what a run has measured, give --from DIR."
            )
        _check_plan(args)
    elif given := [flag for flag, value in plan.items() if value is not None]:
        raise AsyncPPError(
            f"--from shows what a run has measured, and {', '.join(given)} a plan: leave one of them out."
        )
    suffixes = _SUFFIXES[args.format]
    if args.out.suffix not in suffixes:
        fitting = next((kind for kind, own in _SUFFIXES.items() if args.out.suffix in own), None)
        other = f", or add --format {fitting}" if fitting else ""
        raise AsyncPPError(
            f"--out {args.out} doesn't say what kind of {args.format} to write: end its name in "
            f"{' or '.join(suffixes)}{other}."
        )
    if args.format == "picture" and importlib.util.find_spec("matplotlib") is None:
        raise AsyncPPError("A picture is drawn with matplotlib: pip install matplotlib.")


def _check_plan(args: argparse.Namespace) -> None:
    for flag, number in (("--pp", args.pp), ("--microbatches", args.microbatches), ("--batches", args.batches)):
        if number < 1:
            raise AsyncPPError(f"{flag} {number} leaves nothing to show: give at least 1.")
    if _time("--latency", args.latency) < 0:
        raise AsyncPPError(f"--latency {args.latency} is no time that a message takes: give a number from 0 on.")
    schedule = SCHEDULES[args.schedule]
    if args.microbatches < (least := schedule.least_microbatches(args.pp)):
        raise AsyncPPError(
            f"The schedule {args.schedule} needs at least {least} microbatches for --pp {args.pp}, but --microbatches "
            f"is {args.microbatches}: raise it or lower --pp."
        )
