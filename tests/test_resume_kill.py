"""A rank is killed at some moment, also in a save: what was saved last continues as if nothing had been."""

from __future__ import annotations

import functools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests import rows
from tests.harness.flags import tiny_flags
from tests.harness.results import RankResult, compare_weights
from tests.harness.run import run
from tests.resumes import Shape, control, loading, saving

SHAPE = Shape()
EVERY = 3  # iterations between saves


def kill(seconds: float, save: int | None, result: RankResult) -> None:
    """Hook: rank 1 gets a SIGKILL so many seconds after training has begun, or after its n-th save has."""
    from megatron.training import training

    name = "train" if save is None else "save_checkpoint_and_time"
    original, calls = getattr(training, name), iter(range(1 << 30))

    def watched(*args: Any, **kwargs: Any) -> Any:
        if os.environ["RANK"] == "1" and next(calls) == (save or 0):
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return original(*args, **kwargs)

    setattr(training, name, watched)


# Seconds are of a run that takes about two, and a save about a tenth.
MOMENTS = {
    "in the first iterations": (0.2, None),
    "somewhere": (1.1, None),
    "as a save begins": (0.0, 1),
    "within a save": (0.03, 1),
    "late in a save": (0.08, 2),
}


@pytest.mark.parametrize(
    "moment", [name if name == "within a save" else pytest.param(name, marks=pytest.mark.slow) for name in MOMENTS]
)
def test_what_was_saved_last_continues(moment: str, tmp_path: Path) -> None:
    killed = SHAPE.train(*saving(tmp_path, EVERY), hook=functools.partial(kill, *MOMENTS[moment]), check=False)
    assert killed.ranks[1].exit_code == -signal.SIGKILL, "it wasn't killed"
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    begun = int(tracker.read_text()) if tracker.exists() else 0
    second = SHAPE.train(*saving(tmp_path, EVERY), *loading(tmp_path))
    assert len(second.last.losses) == rows.ITERATIONS - begun
    assert second.last.losses == control(SHAPE).last.losses[begun:]
    for rank, ours in zip(control(SHAPE).ranks, second.ranks, strict=True):
        compare_weights(rank.final, ours.final, f"rank {rank.rank}, killed {moment}")
    assert tracker.read_text() == str(rows.ITERATIONS)


def watch_memory(result: RankResult) -> None:
    """Hook: keep the resident memory of this rank, in bytes, after each iteration, and nothing else."""
    import psutil
    from megatron.training import training

    train_step, process = training.train_step, psutil.Process()
    result.extra["resident"] = resident = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        returned = train_step(*args, **kwargs)
        result.actions.clear()  # the harness's own record, some 5 KB an iteration
        resident.append(process.memory_info().rss)
        return returned

    training.train_step = watched


@pytest.mark.slow
def test_memory_stays_flat() -> None:
    # The C library's heap takes some 400 iterations to settle, under plain Megatron too.
    flags = tiny_flags(
        2, 4, 600, clip=0.2, extra=(*rows.TWO_BW, *rows.feedback_flags(1.0)), eval_interval=50, eval_iters=1
    )
    done = run(flags, 2, hooks=watch_memory, timeout=600)
    for rank in done.ranks:
        resident = rank.extra["resident"]
        assert isinstance(resident, list)
        early, late = (sum(resident[i : i + 50]) / 50 for i in (400, 550))
        print(f"rank {rank.rank}: {early / 1e6:.2f} MB, 150 iterations later {late / 1e6:.2f} MB")
        # A leak of one activation (32 tokens of 32 floats) in two iterations would be 0.3 MB.
        assert late - early < 0.3e6, f"rank {rank.rank} grew by {late - early:.0f} bytes"
