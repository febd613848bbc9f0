"""A rank that comes late delays the others, and stops nobody for good."""

from __future__ import annotations

import os
import time
from typing import Any

from tests import rows
from tests.harness.flags import tiny_flags
from tests.harness.run import run

LATE = 2.0  # seconds; all polls of another rank between two messages take some milliseconds


def come_late() -> None:
    """Hook: rank 2, on the middle stage, comes late to the sum of its stage's gradient norms, once."""
    from megatron_asyncpp.runtime.step import TwoHalfStep

    begin = TwoHalfStep.begin

    def late(self: Any, batch: int, *args: Any, **kwargs: Any) -> None:
        if os.environ["RANK"] == "2" and batch == 2:
            time.sleep(LATE)
        begin(self, batch, *args, **kwargs)

    TwoHalfStep.begin = late  # type: ignore[method-assign]


def test_a_rank_late_to_its_stages_sum_stops_nobody_for_good() -> None:
    # Rank 3 waits for a forward of rank 1 before the sum within their stage is through; rank 1, before that forward,
    # for the sum over the stages, to which rank 3 comes only after the one within.
    flags = tiny_flags(3, 3, 6, layers=3, data_parallel=2, clip=0.2, extra=rows.TWO_BW)
    assert len(run(flags, 6, hooks="tests.test_straggler:come_late", timeout=90).losses) == 6
