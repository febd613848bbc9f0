"""A timeline as it was measured: what each rank wrote down, put together on one clock and cut to the same time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from megatron_asyncpp.schedules.actions import Backward, Begin, Compute, Finish, Forward
from megatron_asyncpp.schedules.exchanges import Exchange, Payload
from megatron_asyncpp.schedules.simulate import Span


class Record(NamedTuple):
    """Something that a rank did, in seconds of its own clock.

    Attributes:
        kind: ``Forward``, ``Backward``, ``Begin``, ``Finish``, ``Exchange``; or a wait within an action whose
            record comes next: ``Sums``, for what a step needs to know of other ranks, or ``Arrival``, for a message.
        what: the fields of the action: microbatch, batch and version of a computation, batch of a step or of sums,
            what an exchange sends and what it receives, what arrives.
        start: when it began.
        end: when it had ended.
    """

    kind: str
    what: tuple[Any, ...]
    start: float
    end: float


class Iteration(NamedTuple):
    """One of Megatron's, counted from 1: how many microbatches it has, and when its call of the schedule began."""

    number: int
    microbatches: int
    start: float


@dataclass(frozen=True)
class Part:
    """What one rank wrote down.

    Attributes:
        rank: which one.
        ranks: how many there are.
        pipeline: the rank of its pipeline's first stage.
        stage: s.
        stages: P.
        schedule: its name.
        ahead: whether exchanges only post their messages.
        first: the first iteration that was asked for.
        last: the last one. The iterations next to both are here too, so that all stages are seen for the whole time.
        behind: what to add to this rank's clock to get that of rank 0, in seconds.
        iterations: that were recorded, in order.
        end: of the recording.
        records: in the order in which they ended.
    """

    rank: int
    ranks: int
    pipeline: int
    stage: int
    stages: int
    schedule: str
    ahead: bool
    first: int
    last: int
    behind: float
    iterations: list[Iteration]
    end: float
    records: list[Record]

    def as_json(self) -> dict[str, Any]:
        """The part as plain data."""
        return asdict(self)

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> Part:
        """The part that ``as_json`` was of."""
        records = [Record(kind, tuple(what), start, end) for kind, what, start, end in data["records"]]
        return cls(**{**data, "iterations": [Iteration(*each) for each in data["iterations"]], "records": records})

    @property
    def shown(self) -> tuple[float, float]:
        """When the first iteration that was asked for began here, and when the last one had ended, by rank 0's clock.

        Raises:
            ValueError: none of them was recorded.
        """
        wanted = [each.start for each in self.iterations if self.first <= each.number <= self.last]
        if not wanted:
            raise ValueError(f"rank {self.rank} came to none of the iterations {self.first} to {self.last}")
        later = [each.start for each in self.iterations if each.number > self.last]
        return min(wanted) + self.behind, min([*later, self.end]) + self.behind


@dataclass(frozen=True)
class Blocked:
    """A stage exchanged a message or waited, and did nothing else."""

    stage: int
    what: str
    start: float
    end: float


@dataclass(frozen=True)
class Row:
    """What one rank did, by rank 0's clock and in order: spans and waits don't overlap."""

    rank: int
    spans: list[Span]
    blocked: list[Blocked]

    @property
    def all(self) -> list[Span | Blocked]:
        """Both, in no order."""
        return [*self.spans, *self.blocked]


@dataclass(frozen=True)
class Timeline:
    """What all ranks did over the same time.

    Attributes:
        name: of the schedule, and which iterations these are.
        microbatches: the fewest and the most of an iteration.
        pipelines: by the rank of each one's first stage, its ranks by stage.
        slowdown: the time shown over the time in it that the busiest stage of rank 0's pipeline computed.
    """

    name: str
    microbatches: tuple[int, int]
    pipelines: dict[int, list[Row]]
    slowdown: float


def timeline(parts: Sequence[Part]) -> Timeline:
    """Put the parts of a run together.

    Args:
        parts: of all ranks, rank 0's among them.

    Raises:
        ValueError: what was asked for wasn't recorded.
    """
    shown = [part.shown for part in parts]
    start, end = min(start for start, _ in shown), max(end for _, end in shown)
    pipelines: dict[int, list[Row]] = {}
    for part in sorted(parts, key=lambda part: (part.pipeline, part.stage)):
        pipelines.setdefault(part.pipeline, []).append(_row(part, start, end))
    computed = [
        sum(span.end - span.start for span in row.spans if isinstance(span.action, Compute)) for row in pipelines[0]
    ]
    counts = [each.microbatches for each in parts[0].iterations]
    numbers = [each.number for each in parts[0].iterations if parts[0].first <= each.number <= parts[0].last]
    which = f"iterations {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"iteration {numbers[0]}"
    return Timeline(
        name=f"{parts[0].schedule}, {which} as measured",
        microbatches=(min(counts), max(counts)),
        pipelines=pipelines,
        slowdown=(end - start) / max(computed),
    )


def _row(part: Part, start: float, end: float) -> Row:
    spans, blocked = [], []
    for each in _aligned(part):
        if each.start < end and each.end > start:
            cut = replace(each, start=max(each.start, start), end=min(each.end, end))
            if isinstance(cut, Span):
                spans.append(cut)
            else:
                blocked.append(cut)
    return Row(part.rank, spans, blocked)


def _aligned(part: Part) -> Iterator[Span | Blocked]:
    """All that the rank did, by rank 0's clock. Of an action it is what comes before or after its waits."""
    waits: list[Blocked] = []  # within the action whose record comes next
    for index, (kind, what, local_start, local_end) in enumerate(part.records):
        start, end = local_start + part.behind, local_end + part.behind
        match kind:
            case "Forward" | "Backward":
                yield from waits
                action = Forward(*what) if kind == "Forward" else Backward(*what)
                yield Span(part.stage, action, max([wait.end for wait in waits], default=start), end)
                waits.clear()
            case "Arrival" if _has_neighbour(part, what[0], sends=False):
                waits.append(Blocked(part.stage, f"receive {what[0]}{_microbatch(part.records[index:])}", start, end))
            case "Exchange":
                if name := _exchanged(part, index):
                    yield Blocked(part.stage, name, start, end)
            case "Sums":
                waits.append(Blocked(part.stage, f"wait for sums of step {what[0]}", start, end))
            case "Begin":
                yield Span(part.stage, Begin(*what), start, min([wait.start for wait in waits], default=end))
                yield from waits
                waits.clear()
            case "Finish":
                yield from waits
                yield Span(part.stage, Finish(*what), max([wait.end for wait in waits], default=start), end)
                waits.clear()


def _exchanged(part: Part, index: int) -> str:
    """What an exchange does with neighbours that there are, in words: "send forward 3.1, receive backward 2.0"."""
    exchange = Exchange(*part.records[index].what)
    before, after = part.records[:index][::-1], part.records[index + 1 :]
    words = []
    if exchange.send is not None and _has_neighbour(part, exchange.send, sends=True):
        words.append(f"send {exchange.send}{_microbatch(before)}")
    if exchange.receive is not None and _has_neighbour(part, exchange.receive, sends=False):
        # What was posted ahead isn't needed next.
        words.append(
            f"receive {exchange.receive}{_microbatch(after)}" if not part.ahead else f"post {exchange.receive}"
        )
    return ", ".join(words)


def _has_neighbour(part: Part, payload: Payload, sends: bool) -> bool:
    to_next = (payload == "forward") == sends
    return part.stage + 1 < part.stages if to_next else part.stage > 0


def _microbatch(records: Sequence[Record]) -> str:
    """The microbatch of the next computation, as " batch.microbatch"; nothing if that wasn't recorded."""
    computed = next((record.what for record in records if record.kind in ("Forward", "Backward")), None)
    return "" if computed is None else f" {computed[1]}.{computed[0]}"
