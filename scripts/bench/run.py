"""One run of a job of the bench: started, followed, read, cleaned up after."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from scripts.bench.measure import Length, Setting, late_steps, logged_iterations, steady_iterations
from scripts.bench.ranks import Job, started
from scripts.bench.variants import BACKWARD, VARIANTS

# A run that says nothing for so many seconds, and for so many times as long as an iteration should take, hangs.
_SILENCE = 120.0
_SILENT_ITERATIONS = 20
_POLL = 0.5  # seconds
_TAIL = 20  # lines of a failed rank's output that are shown

# One layer a model chunk, as small as it gets: what a stage computes should be little beside what it sleeps.
MODEL = (
    "--hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --vocab-size 64 "
    "--untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --mock-data --num-workers 0"
)
TRAINING = (
    "--micro-batch-size 1 --lr 1e-3 --lr-decay-style constant --clip-grad 1.0 --eval-iters 0 --eval-interval 1000000 "
    "--log-interval 1 --rerun-mode disabled --seed 1"
)


class RunError(Exception):
    """A run failed; the message says how, and has the end of what the failed ranks printed."""


def train(
    variant: str, setting: Setting, length: Length, progress: Callable[[int], None]
) -> tuple[list[float], tuple[int, int]]:
    """Run a variant once.

    Args:
        variant: a key of VARIANTS.
        setting: what to run it on.
        length: of the run.
        progress: called twice a second with the number of iterations done.

    Returns:
        The times of the iterations that count in ms, and how many of the stages' steps were late, and of how many.

    Raises:
        RunError: a rank failed or the run hung. All output is left in the folder that the message names.
    """
    patience = _SILENCE + _SILENT_ITERATIONS * setting.ideal_ms / 1000

    def read(outputs: list[str]) -> tuple[list[float], tuple[int, int]]:
        late = [late_steps(output) for output in outputs]
        return steady_iterations(outputs[-1], length), (sum(few for few, _ in late), sum(all_ for _, all_ in late))

    return followed(variant, lambda folder: job_of(variant, setting, length, folder), patience, progress, read)


def job_of(variant: str, setting: Setting, length: Length, folder: Path) -> Job:
    """What the ranks of a variant's run do."""
    chosen = VARIANTS[variant]
    seconds = setting.forward_ms / 1000
    arguments = {
        "forward": seconds / chosen.chunks,
        "backward": BACKWARD * seconds / chosen.chunks,
        "message": setting.latency * seconds,
        "folder": folder,
    }
    if chosen.peer is not None:
        arguments |= {
            "schedule": chosen.peer,
            "chunks": chosen.chunks,
            "microbatches": setting.microbatches,
            "iterations": length.of_a_run,
            "warm_up": length.warm_up * setting.microbatches,
        }
        return Job("scripts.bench.peers:main", arguments, setting.stages)
    flags = [
        *("--pipeline-model-parallel-size", str(setting.stages)),
        *("--num-layers", str(setting.stages * chosen.chunks)),
        *("--global-batch-size", str(setting.microbatches), "--train-iters", str(length.of_a_run)),
        *MODEL.split(),
        *TRAINING.split(),
        *chosen.flags,
    ]
    arguments |= {"flags": flags, "warm_up": length.warm_up * setting.microbatches * chosen.chunks}
    return Job("scripts.bench.sleeping_stages:main", arguments, setting.stages)


def followed[Result](
    name: str,
    job_in: Callable[[Path], Job],
    patience: float,
    progress: Callable[[int], None],
    read: Callable[[list[str]], Result],
) -> Result:
    """Run a job in a folder of its own, and read what its ranks printed.

    Args:
        name: of the run, for a message.
        job_in: the job, from its folder.
        patience: seconds that an iteration, or the start, may take.
        progress: called twice a second with the number of iterations that the last rank has logged.
        read: makes the result of the ranks' standard outputs; a ValueError of its says what is missing.

    Raises:
        RunError: a rank failed or the run hung, or the output can't be read. It is left in the folder that the
            message names.
    """
    with kept_if_it_fails(name) as folder:
        job = job_in(folder)
        with started(job, folder) as processes:
            _follow(processes, folder, progress, patience)
        return result_of(folder, job.processes, read)


@contextlib.contextmanager
def kept_if_it_fails(name: str) -> Iterator[Path]:
    """A folder for the context, which is left behind by a ``RunError`` alone, whose message then names it.

    Args:
        name: of the run.
    """
    folder = Path(tempfile.mkdtemp(prefix="bench_"))
    try:
        yield folder
    except RunError as error:
        raise RunError(f"{error}\n\nThe run {name} failed. All that its ranks printed is in {folder}.") from None
    except BaseException:  # a Ctrl-C too
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def raise_if_failed(processes: list[BaseProcess], folder: Path) -> None:
    """Look at the ranks. Those that failed first may drag the others along, so look often.

    Raises:
        RunError: one has failed.
    """
    if failed := [number for number, process in enumerate(processes) if process.exitcode]:
        codes = ", ".join(f"{number} with {processes[number].exitcode}" for number in failed)
        raise RunError(_last_words(folder, failed, f"ranks that ended first: {codes}"))


def hung(folder: Path, processes: int, patience: float) -> RunError:
    """The error of a run that was given up."""
    return RunError(_last_words(folder, range(processes), f"no iteration ended in {patience:.0f} s, so it was stopped"))


def result_of[Result](folder: Path, processes: int, read: Callable[[list[str]], Result]) -> Result:
    """Read what the ranks of a whole run printed.

    Raises:
        RunError: ``read`` raised a ValueError.
    """
    try:
        return read([_output(folder, number) for number in range(processes)])
    except ValueError as error:
        raise RunError(_last_words(folder, range(processes), f"{error}")) from None


def logged(folder: Path, number: int) -> int:
    """How many iterations a rank has logged; the whole log is checked in the end."""
    try:
        return len(logged_iterations(_output(folder, number)))
    except ValueError:
        return 0


def _follow(processes: list[BaseProcess], folder: Path, progress: Callable[[int], None], patience: float) -> None:
    """Watch until all ranks have ended."""
    done, since = 0, time.monotonic()
    while running := [process for process in processes if process.exitcode is None]:
        wait([process.sentinel for process in running], _POLL)
        raise_if_failed(processes, folder)
        now = logged(folder, len(processes) - 1)
        if now > done:
            done, since = now, time.monotonic()
        progress(done)
        if time.monotonic() > since + patience:
            raise hung(folder, len(processes), patience)
    raise_if_failed(processes, folder)  # the last one may have ended since the look above


def _output(folder: Path, number: int, stream: str = "stdout") -> str:
    """What a rank has printed so far."""
    path = folder / f"{number}.{stream}"
    return path.read_text(errors="replace") if path.exists() else ""


def _last_words(folder: Path, ranks: Iterable[int], why: str) -> str:
    """The last lines of some ranks' output, and why they are shown."""
    parts = []
    for rank in ranks:
        for stream in ("stdout", "stderr"):
            lines = [line for line in _output(folder, rank, stream).splitlines() if line.strip()]
            if lines:
                parts.append("\n".join([f"--- rank {rank}, end of {stream}", *lines[-_TAIL:]]))
    return "\n".join([*parts, "", why])
