"""Hooks that let something happen to one rank when it begins a step: it comes late, hangs, dies, or asks to leave."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.harness.results import RankResult


def _around_begin(before: Callable[[Any, int], Any], after: Callable[[], Any] = lambda: None) -> None:
    """Call ``before(step, batch)`` before the first half of each step, and ``after()`` after it."""
    from megatron_asyncpp.runtime.step import TwoHalfStep

    begin = TwoHalfStep.begin

    def watched(self: TwoHalfStep, batch: int, *args: Any) -> None:
        before(self, batch)
        begin(self, batch, *args)
        after()

    TwoHalfStep.begin = watched  # type: ignore[method-assign]


def _once(rank: int, batch: int, happens: Callable[[], Any]) -> None:
    """Call ``happens()`` on one rank before it begins one batch's step."""
    if os.environ["RANK"] == str(rank):
        _around_begin(lambda _, k: happens() if k == batch else None)


def end_after_an_hour_on_rank_1() -> None:
    """Let one rank, and only one, find that it has run for an hour when batch 3's step begins."""
    from megatron.training import training

    _once(1, 3, lambda: setattr(training, "_TRAIN_START_TIME", training._TRAIN_START_TIME - 3600))


def get_a_signal_on_rank_1() -> None:
    """Send one rank, and only one, a SIGTERM when batch 3's step begins."""
    _once(1, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))


def hang_before_batch_three_on_rank_1() -> None:
    """Let one rank begin batch 3's step five seconds late, where the others wait for two."""
    from megatron_asyncpp.integration import run

    group = run.pipeline_group
    run.pipeline_group = lambda timeout: group(timedelta(seconds=2))
    _once(1, 3, lambda: time.sleep(5))


def die_before_batch_three_on_rank_1() -> None:
    """Let one rank be gone when batch 3's step begins."""
    _once(1, 3, lambda: os._exit(7))


def come_two_seconds_late_on_rank_2() -> None:
    """All polls of another rank between two messages take some milliseconds."""
    _once(2, 2, lambda: time.sleep(2))


def delay_one_stage(result: RankResult) -> None:
    """Let the middle stage sleep up to 100 ms before and after each begin, and note what the last one finds."""
    from megatron.core import parallel_state

    generator = random.Random(5)

    def late() -> None:
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        if parallel_state.get_pipeline_model_parallel_rank() == stages // 2:
            time.sleep(generator.uniform(0, 0.1))

    def note(step: Any, batch: int) -> None:
        result.extra["holds gradients"] = step.holds_gradients
        result.extra["slots"] = len(step._ring._slots)
        late()

    _around_begin(note, late)
