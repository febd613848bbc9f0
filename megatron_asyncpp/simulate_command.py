"""The `simulate` command: how much time, memory and staleness a schedule costs, without running anything."""

from __future__ import annotations

import argparse
import importlib.util
import json
from fractions import Fraction
from pathlib import Path

from megatron_asyncpp import simulate_sweep
from megatron_asyncpp.errors import AsyncPPError
from megatron_asyncpp.predictions import NAMES, Prediction, predict, three_decimals
from megatron_asyncpp.schedules import SCHEDULES
from megatron_asyncpp.schedules.slowdown import FORMULAS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the `simulate` command."""
    parser.add_argument("--schedule", choices=NAMES)
    parser.add_argument("--pp", type=int, metavar="P", help="pipeline stages")
    parser.add_argument("--microbatches", type=int, metavar="M", help="microbatches per batch")
    parser.add_argument(
        "--forward", default="1", metavar="T[,T...]", help="time of a microbatch's forward on every stage, or on each"
    )
    parser.add_argument("--backward", default="2", metavar="T[,T...]", help="the same of its backward")
    parser.add_argument("--latency", default="0", metavar="T", help="time of a message between two stages")
    parser.add_argument(
        "--step", default="0", metavar="T", help="time of an optimizer step, in each stage once a batch"
    )
    parser.add_argument(
        "--virtual-stages",
        type=int,
        default=2,
        metavar="V",
        help="model chunks on each stage, for interleaved 1F1B (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--sweep", action="store_true", help="compare all schedules for P = 4, 8, 16 and M = P, 2P, 4P instead"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="with --sweep: draw it into this .png or .svg file")


def main(args: argparse.Namespace) -> int:
    """Run the `simulate` command."""
    latency, step = _time("--latency", args.latency), _time("--step", args.step)
    if latency < 0:
        raise AsyncPPError(f"--latency {args.latency} is no time that a message takes: give a number from 0 on.")
    if step < 0:
        raise AsyncPPError(f"--step {args.step} is no time that an optimizer step takes: give a number from 0 on.")
    if args.virtual_stages < 1:
        raise AsyncPPError(f"--virtual-stages {args.virtual_stages} leaves a stage no model: give at least 1.")
    return _sweep(args, latency, step) if args.sweep else _one(args, latency, step)


def _one(args: argparse.Namespace, latency: Fraction, step: Fraction) -> int:
    name, stages, count = args.schedule, args.pp, args.microbatches
    if name is None or stages is None or count is None:
        raise AsyncPPError("simulate needs --schedule, --pp and --microbatches; or give --sweep to compare them all.")
    if args.out is not None:
        raise AsyncPPError("--out draws what --sweep compares: add --sweep, or draw one schedule with `timeline`.")
    for flag, number in (("--pp", stages), ("--microbatches", count)):
        if number < 1:
            raise AsyncPPError(f"{flag} {number} leaves nothing to run: give at least 1.")
    forward = _times("--forward", args.forward, stages)
    backward = _times("--backward", args.backward, stages)
    if name in FORMULAS:
        _check_formula(name, stages, count, forward, backward, latency, step)
    else:
        schedule = SCHEDULES[name]
        if count < (least := schedule.least_microbatches(stages)):
            raise AsyncPPError(
                f"The schedule {name} needs at least {least} microbatches for --pp {stages}, but --microbatches is "
                f"{count}: raise it or lower --pp."
            )
    prediction = predict(name, stages, count, forward, backward, latency, step, args.virtual_stages)
    if args.json:
        print(json.dumps(prediction.as_json()))
    else:
        print(_text(prediction))
    return 0


def _sweep(args: argparse.Namespace, latency: Fraction, step: Fraction) -> int:
    if not (args.schedule is args.pp is args.microbatches is None):
        raise AsyncPPError("--sweep compares all schedules at fixed sizes: leave out --schedule, --pp, --microbatches.")
    (forward,), (backward,) = (_times(f, t, 1) for f, t in (("--forward", args.forward), ("--backward", args.backward)))
    for name in FORMULAS:
        _check_formula(name, 4, 4, [forward], [backward])  # with latency or steps they are left out
    if args.out is not None:
        if args.out.suffix not in (".png", ".svg"):
            raise AsyncPPError(f"--out {args.out} is no picture: give a name that ends in .png or .svg.")
        if importlib.util.find_spec("matplotlib") is None:
            raise AsyncPPError("Pictures are drawn with matplotlib: pip install matplotlib.")
    predictions = simulate_sweep.sweep(forward, backward, latency, step, args.virtual_stages)
    setting = (
        f"forward {forward}, backward {backward}, latency {latency}, optimizer step {step}; interleaved with "
        f"{args.virtual_stages} model chunks on each stage"
    )
    if args.out is not None:
        try:
            simulate_sweep.draw(predictions, setting, args.out)
        except OSError as error:
            raise AsyncPPError(
                f"{args.out} can't be written ({error.strerror}): give --out a file in a folder that exists and that "
                f"you may write to."
            ) from error
    if args.json:
        print(json.dumps([prediction.as_json() for prediction in predictions]))
    else:
        print(simulate_sweep.table(predictions))
        print(
            f"\nSlowdown against a pipeline without bubble, then figures from the first to the last stage: {setting}."
        )
    return 0


def _check_formula(
    name: str,
    stages: int,
    count: int,
    forward: list[Fraction],
    backward: list[Fraction],
    latency: Fraction = Fraction(0),
    step: Fraction = Fraction(0),
) -> None:
    if latency or step or len(set(forward)) > 1 or len(set(backward)) > 1:
        raise AsyncPPError(
            f"For {name} there is only a formula, for equal stages, no latency and steps without a time: give one time "
            f"for all stages and leave out --latency and --step, or take one of {', '.join(SCHEDULES)}."
        )
    holds = FORMULAS[name].holds(stages, count)
    if name == "interleaved" and not holds:
        raise AsyncPPError(
            f"The formula for interleaved holds if --microbatches is a multiple of --pp, and {count} is none of "
            f"{stages}: change one of them."
        )
    if name == "dualpipe" and not holds:
        raise AsyncPPError(f"DualPipe needs an even number of stages, and --pp is {stages}: give an even one.")
    if name in ("zb1p", "dualpipe") and backward[0] < forward[0]:
        raise AsyncPPError(
            f"The formula for {name} takes the weights' part of a backward to be as long as a forward, so --backward "
            f"must be at least --forward, and {backward[0]} is less than {forward[0]}: raise it."
        )


def _times(flag: str, text: str, stages: int) -> list[Fraction]:
    times = [_time(flag, part) for part in text.split(",")]
    if len(times) not in (1, stages):
        raise AsyncPPError(
            f"{flag} has {len(times)} times for {stages} stages: give one for all stages, or {stages} with commas "
            f"between them."
        )
    if min(times) <= 0:
        raise AsyncPPError(f"{flag} {text} is no time that work takes: give numbers above 0.")
    return times if len(times) == stages else times * stages


def _time(flag: str, text: str) -> Fraction:
    try:
        return Fraction(text.strip())
    except (ValueError, ZeroDivisionError):
        raise AsyncPPError(f"{flag} {text} is no number: give a time such as 1 or 0.25.") from None


def _text(prediction: Prediction) -> str:
    values = prediction.as_json()
    lines = [
        f"{prediction.schedule}, P = {prediction.stages} stages, M = {prediction.microbatches} microbatches: "
        f"slowdown {three_decimals(prediction.slowdown)} ({prediction.source})",
        f"a batch takes {values['time_per_batch']:g}, and {prediction.ideal:g} in a pipeline without bubble",
    ]
    if prediction.simulation is not None:
        row = "{:>5}  {:>6}  {:>16}  {:>15}  {:>9}  {:>5}"
        lines += ["", row.format("stage", "idle", "live activations", "weight versions", "staleness", "drift")]
        lines += [
            row.format(
                one["stage"],
                f"{one['idle']:.1%}",
                one["peak_activations"],
                one["weight_versions"],
                one["staleness"],
                one["drift"],
            )
            for one in values["per_stage"]
        ]
        lines.append(
            "\nactivations in microbatches; staleness in updates between the weights a gradient was computed on and "
            "those it is applied to;\ndrift in updates between a microbatch's forward and its backward"
        )
    return "\n".join(lines)
