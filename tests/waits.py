"""Judges a recording of Megatron's training loop: what in it makes one stage wait for another?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from tests.harness.collectives import Collective, Recording
from tests.harness.results import RankResult, Run

SCALARS = "ASYNCPP_PIPELINE_SCALARS"
EMBEDDING = "EMBEDDING_GROUP"
SCALAR_BYTES = 72


@dataclass
class Wait:
    """One way in which stages wait for each other.

    Attributes:
        what: a sentence.
        where: of a collective, as in its record.
        places: (rank, call) where it was met.
    """

    what: str
    where: tuple[str, ...] = ()
    places: set[tuple[int, int]] = field(default_factory=set)

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of the calling functions, innermost first."""
        return tuple(frame.rpartition(" ")[2] for frame in self.where)

    def __str__(self) -> str:
        ranks, calls = (", ".join(map(str, sorted(set(column)))) for column in zip(*self.places, strict=True))
        return f"{self.what} (seen on ranks {ranks} after calls {calls})"


def waits(done: Run, calls: range) -> list[Wait]:
    """Every way in which a stage waits for another one between two calls of the schedule.

    Allowed are one sum of a few scalars over the pipeline and, if embeddings are tied, one of their gradients, both
    started by the plugin and not waited for before their batch's step is finished; and the schedule's own messages.

    Args:
        done: a run with the hook ``tests.harness.collectives:record``.
        calls: those judged, by how many calls had returned before: not the first two, nor the last, which flushes.
    """
    found: dict[tuple[str, tuple[str, ...]], Wait] = {}
    for rank in done.ranks:
        for call, what, where in (
            *_spanning(done, rank, calls),
            *_early_finishes(rank, calls),
            *_strange_messages(rank, calls),
            *_new_groups(rank, calls),
        ):
            found.setdefault((what, where), Wait(what, where)).places.add((rank.rank, call))
    return list(found.values())


def recording(rank: RankResult) -> Recording:
    """What the hook recorded."""
    found = rank.extra["recording"]
    assert isinstance(found, Recording)
    return found


def sums(rank: RankResult, group: str, calls: range) -> dict[int, list[Collective]]:
    """For each call, what the rank did on a group."""
    found: dict[int, list[Collective]] = {call: [] for call in calls}
    for collective in recording(rank).collectives:
        if collective.group == group and collective.call in calls:
            found[collective.call].append(collective)
    return found


_Found = Iterator[tuple[int, str, tuple[str, ...]]]


def _spanning(done: Run, rank: RankResult, calls: range) -> _Found:
    """Collectives over several stages."""
    stage_of = {rank.rank: rank.pipeline_rank for rank in done.ranks}
    pipeline, finishes = recording(rank).pipeline, _finishes(rank)
    count: Counter[tuple[int, str]] = Counter()
    for one in recording(rank).collectives:
        stages = sorted({stage_of[r] for r in one.ranks or stage_of})  # a group that nobody knows may be of all
        if one.call not in calls or len(stages) == 1:
            continue
        count[one.call, one.group] += 1
        wrong = None
        if one.group not in (SCALARS, EMBEDDING) or one.op != "all_reduce" or not _is_ours(one):
            wrong = "no stage may wait for another one here"
        elif not set(one.ranks) <= set(pipeline):
            wrong = f"the group isn't within one pipeline, {_text(pipeline)}"
        elif one.group == SCALARS and one.bytes > SCALAR_BYTES:
            wrong = f"that is more than a few scalars ({SCALAR_BYTES} bytes)"
        elif count[one.call, one.group] > 1:
            wrong = "one in an iteration is enough"
        elif one.group == EMBEDDING and rank.pipeline_rank == 0:
            pass  # the last stage's batch ended before, so its part is there already
        elif one.waited is not None and one.waited < finishes[one.call - 1]:
            wrong = "it is waited for before its batch's step is finished, or it can't be seen when"
        if wrong:
            group = f"{one.group or 'unknown group'} of ranks {_text(one.ranks)}, stages {_text(stages)}"
            yield one.call, f"{one.op} of {one.bytes} bytes, {group}, at {' < '.join(one.where)}: {wrong}", one.where


def _is_ours(collective: Collective) -> bool:
    return bool(collective.where) and collective.where[0].startswith("megatron_asyncpp/")


def _finishes(rank: RankResult) -> dict[int, int]:
    """For each batch, how many forwards and backwards had begun when its step was finished."""
    finishes, actions = {}, 0
    for action in rank.actions:
        actions += action.kind in ("Forward", "Backward")
        if action.kind == "Finish":
            finishes[action.batch] = actions
    return finishes


def _early_finishes(rank: RankResult, calls: range) -> _Found:
    """Steps finished earlier than just before the first forward on their weights, or before the next step begins."""
    for action, following in pairwise(rank.actions):
        if action.kind == "Finish" and action.batch + 1 in calls:
            needed = following.kind == "Forward" and following.version == action.batch + 1
            if not needed and not (following.kind == "Begin" and following.batch == action.batch + 1):
                yield action.batch + 1, "the step is finished before its weights are needed", ()


def _strange_messages(rank: RankResult, calls: range) -> _Found:
    """Messages other than the schedule's: one forward and one backward a microbatch, between neighbours."""
    pipeline, messages = recording(rank).pipeline, recording(rank).messages
    place = pipeline.index(rank.rank)
    neighbours = (*pipeline[max(0, place - 1) : place], *pipeline[place + 1 : place + 2])
    microbatches = 1 + max(action.microbatch or 0 for action in rank.actions)
    expected = {(way, peer): microbatches for peer in neighbours for way in ("send", "recv")}
    for call in calls:
        found = {key[1:]: count for key, count in messages.items() if key[0] == call}
        if found != expected:
            yield call, f"messages {found}, and the schedule's are {expected}", ()


def _new_groups(rank: RankResult, calls: range) -> _Found:
    """Process groups made on the way, for which their ranks wait."""
    groups = recording(rank).groups  # groups[i]: when call i + 1 returned
    for call in calls:
        if groups[call - 1] != groups[call]:
            yield call, "a process group is made", ()


def _text(numbers: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, numbers)) or "unknown"
