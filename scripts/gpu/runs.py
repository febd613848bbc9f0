"""Training runs of the GPU check: started under torchrun with the plugin's launcher, read from logs and checkpoints."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_asyncpp.processes import free_port, started
from scripts.gpu.report import Failed

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS, HALF = 12, 6
TIMEOUT = 900.0  # seconds that a run may take: a first one on a GPU compiles and loads kernels
_LINE = re.compile(r" iteration +(\d+)/ *\d+ \|.*? elapsed time per iteration \(ms\): ([0-9.]+) \|.*?lm loss: (\S+) \|")
_MEMORY = re.compile(r"^\[Rank \d+\] .*memory \(MB\).*? max allocated: ([0-9.]+)", re.MULTILINE)
_PARAMETERS = re.compile(r"number of parameters on .*model parallel rank .*: (\d+)")
# For bits that repeat: cuBLAS, NCCL and Transformer Engine choose among kernels otherwise.
_REPEATS = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTHONPATH": str(ROOT),
}
_LOCAL = (
    "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-rope-fusion "
    "--no-masked-softmax-fusion"
)
ASYNCHRONOUS = ("--asyncpp-schedule", "2bw", "--asyncpp-error-feedback")


@dataclass(frozen=True)
class Machine:
    """Where the check runs.

    Attributes:
        cpu: whether in CPU mode.
        stages: P, a process each.
        folder: for logs and checkpoints.
    """

    cpu: bool
    stages: int
    folder: Path

    def flags(self, hidden: int, sequence: int) -> list[str]:
        """A model of two layers a stage, as small as it is asked for."""
        return (
            f"--pipeline-model-parallel-size {self.stages} --num-layers {2 * self.stages} --hidden-size {hidden} "
            f"--ffn-hidden-size {4 * hidden} --num-attention-heads 4 --seq-length {sequence} "
            f"--max-position-embeddings {sequence} --position-embedding-type rope --normalization RMSNorm --swiglu "
            f"--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
            f"--micro-batch-size 1 --global-batch-size {2 * self.stages} --train-iters {ITERATIONS} --bf16 "
            f"--optimizer adam --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 "
            f"--clip-grad 0.5 --tokenizer-type NullTokenizer --vocab-size 256 --mock-data --num-workers 0 --seed 7 "
            f"--log-interval 1 --log-memory-interval 1 --eval-iters 0 --eval-interval 1000 --rerun-mode disabled "
            f"--no-create-attention-mask-in-dataloader"
        ).split()


@dataclass
class Trained:
    """What a run left.

    Attributes:
        name: of the run.
        folder: of its checkpoints.
        losses: of each iteration, by its number.
        milliseconds: of each iteration, as Megatron measured them.
        log: all that the ranks printed.
    """

    name: str
    folder: Path
    losses: dict[int, str] = field(default_factory=dict)
    milliseconds: list[float] = field(default_factory=list)
    log: str = ""

    @property
    def typical(self) -> float:
        """The median iteration's time in ms, without the first three and the last."""
        return statistics.median(self.milliseconds[3:-1])

    @property
    def most_memory(self) -> float:
        """What the rank with most had allocated at most, in bytes."""
        return max(map(float, _MEMORY.findall(self.log))) * 2**20

    @property
    def parameters(self) -> int:
        """Of the stage with most."""
        return max(map(int, _PARAMETERS.findall(self.log)))


class Runs:
    """The runs of one check; what several checks compare is trained once."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._done: dict[str, Trained | Failed] = {}

    def train(self, name: str, model: Sequence[str], *extra: str, implementation: str = _LOCAL) -> Trained:
        """Train, or give back what a run of that name left.

        Raises:
            Failed: the run failed, as often as it is asked for.
        """
        if name not in self._done:
            try:
                self._done[name] = self._train(name, [*model, *implementation.split(), *extra])
            except Failed as error:
                self._done[name] = error
        done = self._done[name]
        if isinstance(done, Failed):
            raise done
        return done

    def save(self, name: str) -> tuple[str, ...]:
        """Flags that save a run of that name in mid-run and at its end."""
        return ("--save", str(self._machine.folder / name), "--save-interval", str(HALF), "--ckpt-format", "torch")

    def _train(self, name: str, flags: list[str]) -> Trained:
        log = self._machine.folder / f"{name}.log"
        launch(
            [*("-m", "megatron_asyncpp", "run"), *(["--cpu"] if self._machine.cpu else []), "pretrain_gpt", *flags],
            self._machine.stages,
            log,
        )
        done = Trained(name, self._machine.folder / name, log=log.read_text(errors="replace"))
        for number, milliseconds, loss in _LINE.findall(done.log):
            done.losses[int(number)] = loss
            done.milliseconds.append(float(milliseconds))
        if not done.losses or max(done.losses) != ITERATIONS:
            raise Failed(f"the run {name} ended before iteration {ITERATIONS}: see {log}")
        return done


def launch(program: Sequence[str], processes: int, log: Path) -> None:
    """Run a Python program in so many processes under torchrun, until it ends.

    Raises:
        Failed: it failed, or took longer than TIMEOUT.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)),
        *("--master-addr", "127.0.0.1", "--master-port", str(free_port()), *program),
    ]
    with log.open("wb") as output, started(command, output, _REPEATS) as process:
        try:
            code = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            raise Failed(f"no end after {TIMEOUT:.0f} s: see {log}") from None
    if code:
        raise Failed(f"exit code {code}: {_reason(log.read_text(errors='replace'))}; all of it is in {log}")


def _reason(log: str) -> str:
    """The first error that a rank raised, or else the last thing that the plugin said: its refusals come last."""
    for pattern, which in ((r"^.*?(\w+Error: \S.*)$", 0), (r"^megatron_asyncpp: (.*)$", -1)):
        if found := re.findall(pattern, log, re.MULTILINE):
            return str(found[which])
    return "no error was printed"


def compare(left: Trained, right: Trained, since: int = 1) -> str:
    """Compare the losses from an iteration on, and all tensors of the last checkpoints, bit for bit.

    Args:
        left: A run.
        right: Another one.
        since: The iteration that the other one began with. In the second line after any start Megatron logs the mean
            of the first two losses, so that line is left out unless both began there.

    Returns:
        What was compared.

    Raises:
        Failed: something differs.
    """
    compared = [number for number in range(since, ITERATIONS + 1) if since == 1 or number != since + 1]
    for number in compared:
        if left.losses[number] != right.losses[number]:
            raise Failed(
                f"iteration {number} has the loss {left.losses[number]} in {left.name}, {right.losses[number]} in "
                f"{right.name}"
            )
    tensors = 0
    last = f"iter_{ITERATIONS:07d}"
    parts = sorted(path.relative_to(left.folder / last) for path in (left.folder / last).glob("*/*.pt"))
    if not parts:
        raise Failed(f"{left.folder / last} holds no checkpoint")
    for part in parts:
        states = [_state(run.folder / last / part) for run in (left, right)]
        tensors += _equal(*states, f"{part}")
    return f"{len(compared)} losses and {tensors} tensors of the last checkpoints are equal"


def _state(path: Path) -> dict[str, Any]:
    import torch

    if not path.exists():
        raise Failed(f"{path} isn't there")
    state = torch.load(path, map_location="cpu", weights_only=False)  # the run's own
    return {key: state[key] for key in ("model", "optimizer")}


def _equal(left: Any, right: Any, where: str) -> int:
    """The number of tensors in two equal trees."""
    import torch

    if torch.is_tensor(left):
        if not torch.equal(left, right):
            raise Failed(f"{where} differs by up to {(left.double() - right.double()).abs().max():.1e}")
        return 1
    if isinstance(left, dict):
        if left.keys() != right.keys():
            raise Failed(f"{where} has other keys")
        return sum(_equal(left[key], right[key], f"{where}:{key}") for key in left)
    if isinstance(left, list | tuple):
        if len(left) != len(right):
            raise Failed(f"{where} has another length")
        return sum(_equal(one, other, f"{where}:{i}") for i, (one, other) in enumerate(zip(left, right, strict=True)))
    return 0
