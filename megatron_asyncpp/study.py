"""Trains a small model synchronously, with 2BW and with 2BW + Error Feedback, by AdamW and by Muon, and compares.

Everything here only starts processes and follows their logs; the training is `run --cpu pretrain_gpt`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_asyncpp import corpus
from megatron_asyncpp.errors import AsyncPPError
from megatron_asyncpp.processes import exit_on_signals, free_port, started
from megatron_asyncpp.study_report import SCHEDULES, Run, latest_iteration, write_report

STAGES = 2
# Validations along the way.
_POINTS = 10
_MINIMUM_ITERATIONS = 2 * _POINTS
_MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 176 --seq-length 64 "
    "--max-position-embeddings 64 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--untie-embeddings-and-output-weights --disable-bias-linear --attention-dropout 0 --hidden-dropout 0"
)
_TRAINING = (
    "--micro-batch-size 8 --global-batch-size 16 --lr-decay-style cosine --lr-warmup-fraction 0.1 "
    "--weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95"
)
# 512 sequences each time. Larger microbatches than in training: the loss is the same, and takes less time.
_EVALUATION = "--eval-iters 2 --eval-global-batch-size 256 --eval-micro-batch-size 64"
# The rerun machine waits for all ranks in every step; the data is too small for loader processes to pay.
_HOUSEKEEPING = "--log-interval 10 --rerun-mode disabled --num-workers 0"
# The learning rate of each optimizer is one that is good for its synchronous run. Muon's matrices are multiplied in
# fp32: with Megatron's default, "medium", they are cast to bf16, which takes a CPU ten times as long.
_OPTIMIZERS = {
    "AdamW": "--optimizer adam --lr 3e-3 --min-lr 3e-4",
    "Muon": "--optimizer muon --lr 1e-2 --min-lr 1e-3 --muon-momentum 0.95 --muon-nesterov "
    "--muon-coefficient-type simple --muon-num-ns-steps 5 --muon-scale-mode spectral --muon-extra-scale-factor 0.2 "
    "--muon-tp-mode duplicated --muon-fp32-matmul-prec high",
}
_SCHEDULE_FLAGS = {
    "sync": "",
    "2bw": "--asyncpp-schedule 2bw",
    "2bw-ef": "--asyncpp-schedule 2bw --asyncpp-error-feedback",
}


@dataclass(frozen=True)
class _Plan:
    """A run that is still to be made."""

    optimizer: str
    schedule: str
    flags: list[str]

    @property
    def name(self) -> str:
        return f"{self.optimizer.lower()}-{self.schedule}"

    @property
    def log(self) -> str:
        return f"{self.name}.log"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the `study` command."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("quickstart"),
        metavar="DIR",
        help="folder for the corpus, the runs' logs, curves.png and report.md (default %(default)s)",
    )
    parser.add_argument("--iters", type=int, default=500, metavar="N", help="iterations of a run (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1234, help="of the weights and of the data (default %(default)s)")


def main(args: argparse.Namespace) -> int:
    """Run the `study` command: corpus, six runs, report."""
    if args.iters < _MINIMUM_ITERATIONS:
        raise AsyncPPError(f"--iters {args.iters} is too few to compare anything: give at least {_MINIMUM_ITERATIONS}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise AsyncPPError("The study draws its curves with matplotlib: pip install matplotlib.")
    exit_on_signals()
    try:
        return _study(args.out, args.iters, args.seed)
    except KeyboardInterrupt:
        print("\nmegatron_asyncpp: interrupted; the runs are stopped, and no report was written.", file=sys.stderr)
        return 130


def _study(out: Path, iterations: int, seed: int) -> int:
    prefixes = {split: out / "corpus" / f"{split}_document" for split in corpus.SPLITS}
    plans = _plans(prefixes, iterations, seed)
    logs = out / "runs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        # What an earlier call left must not be taken for this one's.
        for old in (*(logs / plan.log for plan in plans), out / "report.md", out / "curves.png"):
            old.unlink(missing_ok=True)
    except OSError as error:
        raise AsyncPPError(f"The folder {out} can't be written to ({error.strerror}): choose another --out.") from error
    # The index of the last split is written last, so the corpus is whole if it is there.
    if not prefixes[corpus.SPLITS[-1]].with_suffix(".idx").exists():
        corpus.build(None, out / "corpus")
    runs = _train(plans, iterations, logs)
    print(f"\n{write_report(runs, iterations, _settings(prefixes, iterations, seed), out)}\n")
    print(f"Report: {out / 'report.md'}, with the picture {out / 'curves.png'}")
    return 0


def _plans(prefixes: dict[str, Path], iterations: int, seed: int) -> list[_Plan]:
    common = shlex.split(f"--pipeline-model-parallel-size {STAGES} {_MODEL} {_TRAINING} {_EVALUATION} {_HOUSEKEEPING}")
    common += ["--train-iters", str(iterations), "--eval-interval", str(iterations // _POINTS), "--seed", str(seed)]
    cache = prefixes["train"].absolute().parent / "cache"
    common += [*corpus.megatron_flags(prefixes), "--data-cache-path", str(cache)]
    return [
        _Plan(optimizer, schedule, [*common, *shlex.split(flags), *shlex.split(_SCHEDULE_FLAGS[schedule])])
        for optimizer, flags in _OPTIMIZERS.items()
        for schedule in SCHEDULES
    ]


def _settings(prefixes: dict[str, Path], iterations: int, seed: int) -> list[tuple[str, str]]:
    """The settings, for the report."""
    sizes = {split: prefix.with_suffix(".bin").stat().st_size // 2 for split, prefix in prefixes.items()}
    return [
        ("pipeline", f"P = {STAGES} processes, one thread each (OMP_NUM_THREADS=1)"),
        ("corpus", f"bytes as tokens, {sizes['train']:,} to train on, {sizes['valid']:,} to validate on"),
        ("iterations", f"{iterations}, seed {seed}"),
        *((name, f"`{flags}`") for name, flags in _OPTIMIZERS.items()),
        *((SCHEDULES[schedule], f"`{flags}`" if flags else "no flag") for schedule, flags in _SCHEDULE_FLAGS.items()),
        ("model", f"`{_MODEL}`"),
        ("training", f"`{_TRAINING}`"),
        ("evaluation", f"`{_EVALUATION}`; the final loss is the mean of two evaluations, the same in all runs"),
    ]


def _train(plans: list[_Plan], iterations: int, logs: Path) -> list[Run]:
    """Make the runs, one after another, under one progress bar."""
    from tqdm import tqdm

    runs = []
    # Where the bar isn't on a terminal every refresh is a line of a file.
    wait = 0.5 if sys.stderr.isatty() else 10.0
    with tqdm(total=len(plans) * iterations, unit="it", smoothing=0, mininterval=wait) as bar:
        for number, plan in enumerate(plans):
            bar.set_description(f"{plan.name} ({number + 1}/{len(plans)})", refresh=False)
            command = [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(STAGES)),
                *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
                *("-m", "megatron_asyncpp", "run", "--cpu", "pretrain_gpt", *plan.flags),
            ]
            log = logs / plan.log
            began = time.monotonic()
            with log.open("ab") as file, started(command, file) as process:
                _follow(process, log, bar, number * iterations, wait)
            if process.returncode:
                bar.close()
                print(_last_words(log), file=sys.stderr)
                raise AsyncPPError(
                    f"The run {plan.name} failed with exit code {process.returncode}: its last lines are above, all "
                    f"it printed is in {log}."
                )
            bar.n = (number + 1) * iterations
            runs.append(Run(plan.optimizer, plan.schedule, command, log, time.monotonic() - began))
        bar.set_description("all runs", refresh=False)
        bar.set_postfix_str("")
    return runs


def _follow(process: subprocess.Popen[bytes], log: Path, bar: Any, done: int, wait: float) -> None:
    """Show in `bar` what a run writes to its log, until the run ends.

    Args:
        process: The run.
        log: Its log.
        bar: The progress bar.
        done: Where in the bar this run begins.
        wait: Seconds between two refreshes.
    """
    began = time.monotonic()
    says = ""
    with log.open("rb") as file:
        while True:
            ended = process.poll() is not None
            start = file.tell()
            new = file.read()
            # A line that is still being written is read again next time.
            whole = new[: new.rfind(b"\n") + 1]
            file.seek(start + len(whole))
            if latest := latest_iteration(whole):
                bar.n = done + latest[0]
                says = f"loss {float(latest[1]):.3f}"
            bar.set_postfix_str(says or f"starting, {time.monotonic() - began:.0f} s", refresh=False)
            bar.refresh()
            if ended:
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait)


def _last_words(log: Path) -> str:
    """The last lines of a failed run's log, without what the launcher adds to them."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    launcher = next((i for i, line in enumerate(lines) if "torch/distributed/elastic" in line), len(lines))
    return "\n".join(lines[:launcher][-20:])
