"""A rank that comes late delays the others, and stops nobody for good."""

from __future__ import annotations

from tests import rows
from tests.harness.flags import tiny_flags
from tests.harness.run import run


def test_a_rank_late_to_its_stages_sum_stops_nobody_for_good() -> None:
    # Rank 3 waits for a forward of rank 1 before the sum within their stage is through; rank 1, before that forward,
    # for the sum over the stages, to which rank 3 comes only after the one within.
    flags = tiny_flags(3, 3, 6, layers=3, data_parallel=2, clip=0.2, extra=rows.TWO_BW)
    done = run(flags, 6, hooks="tests.late_ranks:come_two_seconds_late_on_rank_2", timeout=90)
    assert len(done.losses) == 6
