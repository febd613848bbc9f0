"""The extra memory of 2BW against plain Megatron, measured as ``scripts/bench/memory.py`` does: no copy too many."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from scripts.bench import memory
from scripts.bench.live_bytes import ACTIVATIONS, KEPT, LiveBytes
from scripts.bench.memory import PART, Extra, Row
from tests.harness.results import RankResult, Run

STAGES = 2
SCALARS = 256  # bytes of the sums that are under way, and such
# Of Megatron's scalars one or another outlives a log line: its own figures vary by 1 to 4 bytes between runs.
A_SCALAR = 8
FEEDBACK = {None: 0, "bf16": 2, "fp32": 4}
GOAL = {False: 1.2, True: 2.0}  # GB of 200M parameters


@functools.cache
def synchronous(name: str, clips: bool) -> Run:
    return memory.train(Row(name, clips, None), asynchronous=False, stages=STAGES)


def extras(row: Row, hook: Any = "scripts.bench.memory:measure") -> list[Extra]:
    done = memory.train(row, asynchronous=True, stages=STAGES, hook=hook)
    return memory.extras(done, synchronous(row.name, row.clips))


def check(row: Row, ranks: list[Extra]) -> None:
    """Nothing but: a second weight buffer on all stages but the last, u_prev, and gradients where they wait."""
    for extra in ranks:
        expected = 0 if extra.stage == STAGES - 1 else 2 * extra.parameters
        expected += (FEEDBACK[row.feedback] + 4 * row.clips) * extra.masters
        where = f"stage {extra.stage}: {extra}"
        assert abs(extra.between - expected) <= SCALARS, (
            f"between two calls {extra.between - expected} too much, {where}"
        )
        assert abs(extra.running - expected) <= SCALARS, f"while running {extra.running - expected} too much, {where}"
        # Megatron's own step is in one piece, so it holds more temporaries of its inner optimizer for a moment.
        momentary = 4 * PART if row.feedback else 0
        most = extra.megatrons_step + momentary + A_SCALAR
        assert extra.step <= most, f"stepping takes {extra.step} for a moment, {where}"
        assert extra.stepping <= expected + momentary + SCALARS, f"stepping takes too much, {where}"
        assert extra.activations <= 0, f"more activations, {where}"
        assert extra.collectives == 0, f"larger collectives, {where}"
        assert memory.scaled(extra) <= 1.001 * GOAL[row.clips], where


ROWS = [
    Row("DP 1", False, "fp32"),
    Row("DP 1", True, "fp32"),
    Row("DP 1", True, None),
    Row("DP 2, distributed optimizer", True, "bf16"),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_extra_memory(row: Row) -> None:
    check(row, extras(row))


# A copy too many: each of these hooks adds one.


def held_gradients(result: RankResult) -> None:
    """Gradients are copied where nothing is waited for."""
    from megatron_asyncpp.runtime.step import TwoHalfStep

    memory.measure(result)
    TwoHalfStep.holds_gradients = property(lambda self: True)  # type: ignore[assignment,method-assign]


def gradients_of_the_last_step(result: RankResult) -> None:
    """A step's gradients live until the next one is finished."""
    from megatron_asyncpp.runtime.step import TwoHalfStep

    memory.measure(result)
    finish = TwoHalfStep.finish

    def keeping(self: Any, keep: bool) -> Any:
        self.kept = self._begun
        return finish(self, keep)

    TwoHalfStep.finish = keeping  # type: ignore[method-assign]


def two_buffers_on_every_stage(result: RankResult) -> None:
    """The last stage keeps a version that it doesn't need."""
    from megatron_asyncpp.runtime.weights import WeightRing

    memory.measure(result)
    advance = WeightRing.advance
    WeightRing.advance = lambda self, keep=True: advance(self, True)  # type: ignore[method-assign]


def weights_of_the_whole_step(result: RankResult) -> None:
    """Error Feedback holds all weights while it steps."""
    from megatron_asyncpp.optim import correction

    memory.measure(result)
    correction.stream = lambda optimizer: lambda: None


def inputs_of_the_last_batch(result: RankResult) -> None:
    """What a forward received lives on after its backward."""
    from megatron_asyncpp.runtime.pipeline import Pipeline

    memory.measure(result)
    backward, kept = Pipeline._backward, []

    def keeping(self: Any, action: Any) -> None:
        kept.append(self._in_flight[0].outputs)
        kept[:-4] = []
        backward(self, action)

    Pipeline._backward = keeping  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("hook", "row", "message"),
    [
        (held_gradients, ROWS[0], "between two calls"),
        (gradients_of_the_last_step, ROWS[2], "too much"),
        (two_buffers_on_every_stage, ROWS[0], "between two calls .* stage 1"),
        (weights_of_the_whole_step, ROWS[0], "for a moment"),
        (inputs_of_the_last_batch, ROWS[0], "more activations"),
    ],
)
def test_a_copy_too_many_is_seen(hook: Callable[[RankResult], None], row: Row, message: str) -> None:
    ranks = extras(row, hook)
    with pytest.raises(AssertionError, match=message):
        check(row, ranks)


# The counting


def test_live_bytes() -> None:
    with LiveBytes("rest") as count:
        a = torch.zeros(100)
        view, part = a.view(10, 10), a[:7]
        assert count.live[KEPT] == 400
        with count.during("moment"):
            (a + 1).add_(1) * 2  # at the end two copies at once
        assert count.live[KEPT] == 400
        del a, view
        assert count.live[KEPT] == 400
        del part
        assert count.live == {KEPT: 0}
        assert count.most == {
            ("rest", KEPT): 400,
            ("rest", "all"): 400,
            ("moment", KEPT): 1200,
            ("moment", "all"): 1200,
        }


def test_live_bytes_of_a_backward_and_of_kinds() -> None:
    with LiveBytes("rest") as count:
        w = torch.nn.Parameter(torch.ones(50))
        with count.making(ACTIVATIONS):
            loss = (w * 2).exp().sum()
        assert count.live == {KEPT: 200, ACTIVATIONS: 200 + 4}  # what exp() keeps, and the sum
        loss.backward()
        assert w.grad is not None
        assert count.live[KEPT] == 200 + 200
        del loss
        assert count.live[ACTIVATIONS] == 0


def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [Extra(stage, 1000, 500, 4000 - 2000 * stage, 3999, 4000 + 2 * PART, 0, 0, 0, 0, 0) for stage in (0, 1)]

    def measured(rows: Any, stages: int) -> Iterator[tuple[Row, list[Extra]]]:
        assert (rows, stages) == (memory.ROWS, 3)
        yield ROWS[0], ranks

    monkeypatch.setattr(memory, "measured", measured)
    monkeypatch.setattr(sys, "argv", ["memory.py", "--pp", "3", "--json"])
    memory.main()
    captured = capsys.readouterr()
    (row,) = json.loads(captured.out)["rows"]
    assert (row["name"], row["clips"], row["feedback"], row["ranks"][1]["between"]) == ("DP 1", False, "fp32", 2000)
    assert captured.err.splitlines()[2] == "| DP 1 | off | fp32 | 4.00 | 4.00 | 0.80 GB | 0.50 |"


def test_it_runs_by_its_path() -> None:
    done = subprocess.run([sys.executable, memory.__file__, "--help"], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
