"""The recorder of collectives sees each, however it is called, and says so if something left no record."""

from __future__ import annotations

from functools import cache

import pytest

from tests import collective_calls
from tests.harness.collectives import UNSEEN, Collective
from tests.harness.results import Run
from tests.harness.run import RankError, run
from tests.waits import recording

SEEN = [name for name in collective_calls.WAYS if name != "group_of_its_own"]


def called(hooks: str) -> Run:
    return run([], 2, "megatron", hooks=f"tests.collective_calls:{hooks}", entry="tests.collective_calls")


recorded = cache(lambda: called("record"))


def by(name: str, rank: int) -> list[Collective]:
    """What a function of collective_calls did on a rank."""
    return [one for one in recording(recorded().ranks[rank]).collectives if one.where[0].endswith(f" {name}")]


@pytest.mark.parametrize("name", SEEN)
def test_each_way_to_call_a_collective_is_recorded(name: str) -> None:
    for rank in (0, 1):
        found = by(name, rank)
        assert tuple(one.op for one in found) == collective_calls.WAYS[name]
        assert all((one.group, one.ranks) == ("BOTH", (0, 1)) for one in found)
        assert all(one.where[0].startswith("tests/collective_calls.py:") for one in found)


def test_a_group_that_torch_does_not_know_is_recorded() -> None:
    assert [(one.op, one.ranks) for one in by("group_of_its_own", 0)] == [("all_reduce", ())]


def test_sizes_are_in_bytes() -> None:
    assert [by(name, 0)[0].bytes for name in ("imported_by_value", "several_at_once", "barrier")] == [16, 32, 0]


def test_waits_are_seen_or_known_not_to_be() -> None:
    ways = ("imported_by_value", "asked_first", "never", "method_of_the_group", "method_of_the_backend", "coalesced")
    assert [by(name, 0)[0].waited for name in ways] == [0, None, None, 0, UNSEEN, UNSEEN]


def test_messages_are_kept_apart() -> None:
    assert recording(recorded().ranks[0]).messages == {(0, "send", 1): 2, (0, "recv", 1): 1}
    assert recording(recorded().ranks[1]).messages == {(0, "send", 0): 1, (0, "recv", 0): 2}


def test_what_leaves_no_record_is_noticed() -> None:
    with pytest.raises(RankError, match=r"BOTH of ranks \(0, 1\): numbers \[\d+.*\] left no record"):
        called("record_without_monitored_barriers")
