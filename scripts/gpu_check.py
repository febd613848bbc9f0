"""Checks the plugin on the machine that it is started on, and writes one report: see gpu_check.sh."""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a script, this folder is all that's on the path

from megatron_asyncpp.processes import exit_on_signals  # noqa: E402
from megatron_asyncpp.schedules import slowdown  # noqa: E402
from scripts.gpu.report import Check, Failed, NotHere, report  # noqa: E402
from scripts.gpu.runs import ASYNCHRONOUS, HALF, Machine, Runs, Trained, compare, launch  # noqa: E402

_BLOCKING = (*ASYNCHRONOUS, "--asyncpp-blocking-step")
# Of the bubble of 1F1B, this share must be gone.
_GONE = 0.75
# Bytes a parameter that 2BW + Error Feedback + clipping take in bf16 without data parallelism, and how much more an
# allocator may take.
_BYTES, _SLACK = 10.0, 1.1
_TE = "--transformer-impl transformer_engine"


def main(argv: list[str]) -> int:
    """Make all checks. Returns 0 if none failed, 1 if one did; a wrong call leaves with 2."""
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description="Checks the plugin on this machine.")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, over gloo, for machines without a GPU")
    parser.add_argument("--stages", type=int, metavar="P", help="as many as there are GPUs if left out; with --cpu 2")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu_check.txt"), metavar="FILE", help="the report, default %(default)s"
    )
    args = parser.parse_args(argv)
    gpus = 0 if args.cpu else _gpus()
    if not args.cpu and gpus == 0:
        parser.exit(2, "gpu_check.sh: torch finds no GPU here: add --cpu to check the plugin without one\n")
    stages = args.stages if args.stages is not None else gpus or 2
    if stages < 1 or (gpus and stages > gpus):
        parser.exit(2, f"gpu_check.sh: --stages {stages} is none of 1 to {gpus or 'any number'}: give another\n")
    try:
        out = args.out.open("w")
    except OSError as error:
        parser.exit(2, f"gpu_check.sh: --out {args.out} can't be written ({error.strerror}): name another file\n")
    machine = Machine(args.cpu, stages, Path(tempfile.mkdtemp(prefix="gpu_check_")))
    where = f"{stages} processes on the CPU" if args.cpu else f"{stages} of {gpus} GPU(s)"
    title = f"megatron_asyncpp on {where}, {datetime.now(UTC):%d %B %Y %H:%M} UTC, Python {platform.python_version()}"
    with out:
        code = report(title, checks(machine), (sys.stdout, out))
    print(f"The report is in {args.out}, logs and checkpoints are in {machine.folder}.")
    return code


def checks(machine: Machine) -> Iterator[Check]:
    """All that is checked, in this order."""
    runs = Runs(machine)
    model = machine.flags(*((32, 32) if machine.cpu else (256, 256)))

    def asynchronous() -> Trained:
        return runs.train("2bw", model, *ASYNCHRONOUS, *runs.save("2bw"))

    def synchronous() -> Trained:
        return runs.train("megatron", model)

    yield Check("installation", _installation)
    yield Check("gloo" if machine.cpu else "NCCL and gloo", lambda: _collectives(machine))
    yield Check("2BW + Error Feedback + clipping", lambda: _trains(asynchronous(), synchronous()))
    yield Check(
        "the deferred step equals the blocking one",
        lambda: compare(asynchronous(), runs.train("blocking", model, *_BLOCKING, *runs.save("blocking"))),
    )
    yield Check("a continued run equals one that goes on", lambda: _resumes(asynchronous(), runs, model))
    yield Check("weight versions", lambda: _versions(runs, model))
    yield Check("Transformer Engine", lambda: _transformer_engine(machine, runs, model))
    yield Check("bubble", lambda: _bubble(machine, runs))
    yield Check("extra memory", lambda: _memory(machine, runs))


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _installation() -> str:
    """What the doctor says."""
    done = subprocess.run(
        [sys.executable, "-m", "megatron_asyncpp", "doctor"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    if done.returncode:
        problems = [line for line in lines if line.startswith("a run would be refused")]
        raise Failed(problems[0] if problems else f"doctor failed: {done.stderr.strip().splitlines()[-1]}")
    until = next(i for i, line in enumerate(lines) if line.startswith("replaced in Megatron"))
    return "; ".join(lines[:until])


def _collectives(machine: Machine) -> str:
    backend = "gloo" if machine.cpu else "nccl"
    launch([str(ROOT / "scripts/gpu/collectives.py"), backend], machine.stages, machine.folder / "collectives.log")
    return f"{machine.stages} ranks, sums and messages between neighbours"


def _trains(delayed: Trained, plain: Trained) -> str:
    """The loss falls, and the delay is there: iterations 1 and 2 run on the initial weights, and later ones differ."""
    first, last = (float(delayed.losses[number]) for number in (1, max(delayed.losses)))
    if not all(math.isfinite(float(loss)) for loss in delayed.losses.values()) or last >= first:
        raise Failed(f"the loss goes from {first} to {last}")
    if delayed.losses[1] != plain.losses[1]:
        raise Failed(f"the first loss is {delayed.losses[1]}, and Megatron's own is {plain.losses[1]}")
    if list(delayed.losses.values()) == list(plain.losses.values()):
        raise Failed("all losses are those of synchronous training: the schedule didn't run")
    return f"loss {first:.3f} to {last:.3f}; Megatron's own run, flushed: {float(plain.losses[max(plain.losses)]):.3f}"


def _resumes(whole: Trained, runs: Runs, model: list[str]) -> str:
    load = ("--load", str(whole.folder), "--ckpt-step", str(HALF))
    continued = runs.train("continued", model, *ASYNCHRONOUS, *load, *runs.save("continued"))
    if min(continued.losses) != HALF + 1:
        raise Failed(f"it began with iteration {min(continued.losses)}, not {HALF + 1}")
    return compare(whole, continued, since=HALF + 1)


def _versions(runs: Runs, model: list[str]) -> str:
    runs.train("checked", model, *ASYNCHRONOUS, "--asyncpp-check-versions")
    return "every backward used the weights of its forward"


def _transformer_engine(machine: Machine, runs: Runs, model: list[str]) -> str:
    if machine.cpu:
        raise NotHere("its kernels are CUDA")
    if find_spec("transformer_engine") is None:
        raise NotHere("it isn't installed")
    deferred, blocking = (
        runs.train(name, model, *flags, *runs.save(name), implementation=_TE)
        for name, flags in (("te", ASYNCHRONOUS), ("te-blocking", _BLOCKING))
    )
    return f"loss {deferred.losses[1]} to {deferred.losses[max(deferred.losses)]}; {compare(deferred, blocking)}"


def _bubble(machine: Machine, runs: Runs) -> str:
    """Measured with stages that sleep on the CPU, and with a model large enough to keep a GPU busy otherwise."""
    stages = machine.stages
    if stages == 1:
        raise NotHere("one stage has no bubble")
    if machine.cpu:
        program = [sys.executable, str(ROOT / "scripts/bench/bubble.py"), "--pp", str(stages)]
        program += ["--microbatches", str(2 * stages), "--variants", "1f1b,2bw", "--json"]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(f"bubble.py: {done.stderr.strip().splitlines()[-1]}")
        slowdowns = {row["variant"]: row["slowdown"] for row in json.loads(done.stdout)["rows"]}
        plain, delayed = slowdowns["1f1b"], slowdowns["2bw"]
    else:
        flushed, filled = _large(machine, runs)
        # The bubble of 1F1B is known, so its time gives that of a pipeline without.
        plain = slowdown.one_f_one_b(stages, 2 * stages)
        delayed = filled.typical / (flushed.typical / plain)
    theory = slowdown.one_f_one_b(stages, 2 * stages)
    told = f"1F1B {plain:.3f} (theory {theory:.3f}), 2BW {delayed:.3f}, of a pipeline without bubble"
    if plain - delayed < _GONE * (theory - 1):
        raise Failed(f"{told}: less than {_GONE:.0%} of the bubble is gone")
    return told


def _memory(machine: Machine, runs: Runs) -> str:
    if machine.cpu:
        from scripts.bench.memory import Row, measured

        ((_, ranks),) = measured([Row("DP 1", True, "fp32")], machine.stages)
        extra = max(rank.lasting / rank.parameters for rank in ranks)
    else:
        flushed, filled = _large(machine, runs)
        extra = (filled.most_memory - flushed.most_memory) / filled.parameters
    told = f"{extra:.2f} bytes per parameter more than Megatron, {_BYTES:g} by theory"
    if extra > _BYTES * _SLACK:
        raise Failed(told)
    return told


def _large(machine: Machine, runs: Runs) -> tuple[Trained, Trained]:
    """Megatron's own run and one of 2BW, of a model that keeps a GPU busy."""
    model = machine.flags(4096, 2048)
    return runs.train("large-megatron", model), runs.train("large-2bw", model, *ASYNCHRONOUS)


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main(sys.argv[1:]))
