"""Each rule by which a recording is judged can fail: two pipelines do all as they should, but for one thing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.harness.collectives import UNSEEN, Collective, Recording
from tests.harness.results import Action, RankResult, Run
from tests.waits import EMBEDDING, SCALARS, recording, waits

MICROBATCHES, STEADY = 2, range(3, 5)
PIPELINES = ((0, 2), (1, 3))
OURS = ("megatron_asyncpp/runtime/agreement.py:1 total", "megatron/training/training.py:2 train_step")
# The plan of a first stage, which finishes a step before its first forward on the new weights.
ACTIONS = [
    action
    for k in range(6)
    for action in (
        *(Action("Forward", k, 1, max(0, k - 1)), Action("Backward", k, 0, max(0, k - 1))),
        *([Action("Finish", k - 1)] if k else []),
        *(Action("Forward", k + 1, 0, k), Action("Backward", k, 1, max(0, k - 1)), Action("Begin", k)),
    )
]


def good() -> Run:
    return Run([rank_of(rank) for rank in range(4)], 0.0)


def rank_of(rank: int) -> RankResult:
    pipeline = PIPELINES[rank % 2]
    collectives = []
    for call in range(1, 6):
        finish = 4 * call + 2  # forwards and backwards before batch (call - 1) is finished
        collectives += [
            Collective("all_reduce", SCALARS, pipeline, 32, call, OURS, finish),
            Collective("all_reduce", EMBEDDING, pipeline, 4096, call, OURS, None),
            Collective("all_gather", "DATA_PARALLEL_GROUP", (0, 1) if rank < 2 else (2, 3), 4096, call, ()),
        ]
    (peer,) = {*pipeline} - {rank}
    messages = Counter({(call, way, peer): MICROBATCHES for call in range(6) for way in ("send", "recv")})
    found = Recording(pipeline, collectives, messages, [9] * 6)
    return RankResult(rank, pipeline.index(rank), actions=list(ACTIONS), extra={"recording": found})


def test_what_is_as_it_should_be_is_not_judged() -> None:
    assert waits(good(), STEADY) == []


def changed(group: str, /, **values: object) -> Callable[[RankResult], None]:
    """Change what rank 2 does on a group after call 4."""

    def change(rank: RankResult) -> None:
        collectives = recording(rank).collectives
        (index,) = (i for i, one in enumerate(collectives) if (one.group, one.call) == (group, 4))
        collectives[index] = replace(collectives[index], **values)

    return change


def twice(group: str) -> Callable[[RankResult], None]:
    def change(rank: RankResult) -> None:
        recording(rank).collectives.extend([one for one in recording(rank).collectives if one.group == group])

    return change


def finish_at_once(rank: RankResult) -> None:
    finish, begin = Action("Finish", 3), Action("Begin", 3)
    rank.actions.remove(finish)
    rank.actions.insert(rank.actions.index(begin) + 1, finish)


def message(*key: object) -> Callable[[RankResult], None]:
    return lambda rank: recording(rank).messages.update([key])


def make_group(rank: RankResult) -> None:
    recording(rank).groups[4:] = [10, 10]


LATE = "it is waited for before its batch's step is finished, or it can't be seen when"
NOT_HERE = "no stage may wait for another one here"
BROKEN: dict[str, tuple[Callable[[RankResult], None], str]] = {
    "another group": (changed(SCALARS, group="MODEL_PARALLEL_GROUP"), f"MODEL_PARALLEL_GROUP .* total .*: {NOT_HERE}"),
    "another operation": (changed(SCALARS, op="barrier"), f"barrier of 32 bytes, {SCALARS} .*: {NOT_HERE}"),
    "Megatron's call": (
        changed(EMBEDDING, where=("megatron/core/x.py:1 f",)),
        f"at megatron/core/x.py:1 f: {NOT_HERE}",
    ),
    "call of nobody": (changed(EMBEDDING, where=()), NOT_HERE),
    "group over pipelines": (changed(SCALARS, ranks=(0, 1, 2, 3)), "isn't within one pipeline, 0, 2"),
    "large": (changed(SCALARS, bytes=80), r"80 bytes.*more than a few scalars \(72 bytes\)"),
    "scalars twice": (twice(SCALARS), f"{SCALARS} .*one in an iteration is enough"),
    "embedding twice": (twice(EMBEDDING), f"{EMBEDDING} .*one in an iteration is enough"),
    "waited early": (changed(SCALARS, waited=17), LATE),
    "waited unseen": (changed(EMBEDDING, waited=UNSEEN), LATE),
    "within a stage no more": (
        changed("DATA_PARALLEL_GROUP", ranks=(0, 1, 2, 3)),
        r"ranks 0, 1, 2, 3, stages 0, 1, .*",
    ),
    "unknown group": (changed("DATA_PARALLEL_GROUP", ranks=()), "ranks unknown, stages 0, 1, at .*"),
    "finished at once": (finish_at_once, "the step is finished before its weights are needed"),
    "one message more": (message(4, "send", 0), r"messages \{.*'send', 0\): 3"),
    "message to another": (message(4, "recv", 3), r"messages \{.*'recv', 3\): 1"),
    "new group": (make_group, "a process group is made"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named(name: str) -> None:
    fault, sentence = BROKEN[name]
    done = good()
    fault(done.ranks[2])
    found = waits(done, STEADY)
    assert len(found) == 1
    assert re.search(f"{sentence}.* \\(seen on ranks 2 after calls ", str(found[0])), found[0]
