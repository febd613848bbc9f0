"""One run of Megatron's pretraining loop on sleeping stages, under torchrun: started, followed, cleaned up after."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from megatron_asyncpp.processes import free_port, started
from scripts.bench.measure import FIRST, Setting, late_steps, logged_iterations, steady_iterations
from scripts.bench.variants import BACKWARD, VARIANTS

ROOT = Path(__file__).resolve().parents[2]
# A run that says nothing for so many seconds, and for so many times as long as an iteration should take, hangs.
# Importing Megatron takes a process 12 s of a core, and there may be more processes than cores.
_SILENCE = 300.0
_SILENT_ITERATIONS = 20
_POLL = 0.5  # seconds
_TAIL = 20  # lines of a failed rank's output that are shown

# One layer a stage, as small as it gets: what a stage computes should be little beside what it sleeps.
_MODEL = (
    "--hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --vocab-size 64 "
    "--untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --mock-data --num-workers 0"
)
_TRAINING = (
    "--micro-batch-size 1 --lr 1e-3 --lr-decay-style constant --clip-grad 1.0 --eval-iters 0 --eval-interval 1000000 "
    "--log-interval 1 --rerun-mode disabled --seed 1"
)


class RunError(Exception):
    """A run failed; the message says how, and has the end of what the failed ranks printed."""


def train(variant: str, setting: Setting, progress: Callable[[int], None]) -> tuple[list[float], tuple[int, int]]:
    """Run a variant once.

    Args:
        variant: a key of VARIANTS.
        setting: what to run it on.
        progress: called twice a second with the number of iterations done.

    Returns:
        The times of the steady iterations in ms, and how many of the stages' steps were late, and of how many.

    Raises:
        RunError: a rank failed or the run hung. All output is left in the folder that the message names.
    """
    folder = Path(tempfile.mkdtemp(prefix="bubble_"))
    try:
        result = _train(variant, setting, progress, folder)
    except RunError as error:
        raise RunError(f"{error}\n\nThe run {variant} failed. All that its ranks printed is in {folder}.") from None
    except BaseException:  # a Ctrl-C too
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    return result


def command(variant: str, setting: Setting, logs: Path) -> list[str]:
    """The command line of a run whose ranks write into subfolders of `logs`."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(setting.stages)),
        *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
        *("--redirects", "3", "--log-dir", str(logs)),
        *("-m", "megatron_asyncpp", "run", "--cpu", str(Path(__file__).with_name("sleeping_stages.py"))),
        *("--bench-forward-ms", str(setting.forward_ms), "--bench-backward-ms", str(BACKWARD * setting.forward_ms)),
        *("--bench-warm-up", str(FIRST * setting.microbatches)),
        *("--pipeline-model-parallel-size", str(setting.stages), "--num-layers", str(setting.stages)),
        *("--global-batch-size", str(setting.microbatches), "--train-iters", str(setting.iterations)),
        *_MODEL.split(),
        *_TRAINING.split(),
        *VARIANTS[variant].flags,
    ]


def _train(
    variant: str, setting: Setting, progress: Callable[[int], None], folder: Path
) -> tuple[list[float], tuple[int, int]]:
    launcher = folder / "launcher.log"
    search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # the package isn't installed
    with (
        launcher.open("wb") as output,
        started(command(variant, setting, folder), output, {"PYTHONPATH": search}) as process,
    ):
        patience = _SILENCE + _SILENT_ITERATIONS * setting.ideal_ms / 1000
        ended = _follow(process, folder, setting.stages - 1, progress, patience)
    ranks = range(setting.stages)
    if not ended:
        raise RunError(_last_words(folder, ranks) + f"\n\nNo iteration ended in {patience:.0f} s, so it was stopped.")
    if process.returncode:
        failed = failed_ranks(launcher.read_text(errors="replace"))
        raise RunError(_last_words(folder, failed or ranks))
    logs = [_output(folder, rank, "stdout") for rank in ranks]
    try:
        late = [late_steps(log) for log in logs]
        times = steady_iterations(logs[-1], setting.iterations)
    except ValueError as error:
        raise RunError(f"{_last_words(folder, ranks)}\n\n{error}") from None
    return times, (sum(few for few, _ in late), sum(all_ for _, all_ in late))


def _follow(
    process: subprocess.Popen[bytes], folder: Path, rank: int, progress: Callable[[int], None], patience: float
) -> bool:
    """Watch the log of a rank until the run ends; False if no iteration ended for `patience` seconds."""
    done, since = 0, time.monotonic()
    while process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL)
        with contextlib.suppress(ValueError):  # a line may be half written: the whole log is checked in the end
            now = len(logged_iterations(_output(folder, rank, "stdout")))
            if now > done:
                done, since = now, time.monotonic()
        progress(done)
        if time.monotonic() > since + patience:
            return False
    return True


def _output(folder: Path, rank: int, stream: str) -> str:
    """What a rank has printed so far; torchrun names the folders above by a random number and the attempt."""
    return "".join(file.read_text(errors="replace") for file in folder.glob(f"*/attempt_0/{rank}/{stream}.log"))


def failed_ranks(launcher: str) -> list[int]:
    """The ranks that torchrun reports as failed, without those that it stopped itself because of the others."""
    found = re.findall(r"^ +rank +: (\d+) .*\n +exitcode +: (-?\d+) ", launcher, re.MULTILINE)
    return sorted({int(rank) for rank, code in found if int(code) not in (-15, -9)})


def _last_words(folder: Path, ranks: range | list[int]) -> str:
    """The last lines of some ranks' output, and of the launcher's if no rank came so far as to print any."""
    parts = []
    for rank in ranks:
        for stream in ("stdout", "stderr"):
            lines = [line for line in _output(folder, rank, stream).splitlines() if line.strip()]
            if lines:
                parts.append("\n".join([f"--- rank {rank}, end of {stream}", *lines[-_TAIL:]]))
    if not parts:
        lines = (folder / "launcher.log").read_text(errors="replace").splitlines()
        parts.append("\n".join(["--- torchrun", *lines[-_TAIL:]]))
    return "\n".join(parts)
