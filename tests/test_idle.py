"""The idle share in the log: against pipelines of which arithmetic says how long their stages wait."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable

import pytest

from megatron_asyncpp.integration.log import LaggingFigures
from megatron_asyncpp.runtime.clock import Clock
from megatron_asyncpp.schedules.actions import Begin
from megatron_asyncpp.schedules.exchanges import Exchange
from tests.harness.flags import tiny_flags
from tests.harness.results import RankResult, Run
from tests.harness.run import run

FORWARD = 0.05  # seconds, on the slowest stage; a backward takes twice as long
TOLERANCE = 0.05  # of a share: messages and steps take some time themselves
ITERATIONS, MICROBATCHES = 8, 4


def the_first_stage_is_twice_as_fast(result: RankResult) -> None:
    """Hook: in the time of one microbatch on the last stage the first could do two."""
    sleep(result, 0.5, 1.0)


def both_stages_are_alike(result: RankResult) -> None:
    """Hook: and evaluations take as long as three iterations."""
    from megatron.training import training

    evaluate = training.evaluate

    def slowly(*args: object, **kwargs: object) -> object:
        time.sleep(1.0)
        return evaluate(*args, **kwargs)

    training.evaluate = slowly
    sleep(result, 1.0, 1.0)


def sleep(result: RankResult, *shares: float) -> None:
    """Let forwards and backwards last a share of FORWARD, and of twice that, by stage. Note what TensorBoard gets."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import global_vars

    def lasts(seconds: float, step: Callable[..., object]) -> Callable[..., object]:
        def timed(*args: object, **kwargs: object) -> object:
            began = time.perf_counter()
            returned = step(*args, **kwargs)
            share = shares[parallel_state.get_pipeline_model_parallel_rank()]
            time.sleep(max(0.0, began + share * seconds - time.perf_counter()))
            return returned

        return timed

    class Writer:
        def add_scalar(self, name: str, value: float, iteration: int) -> None:
            if name == "idle-share":
                result.extra.setdefault("written", {})[iteration] = value

        def log(self, values: dict[str, float], iteration: int) -> None:
            if "idle-share" in values:
                result.extra.setdefault("logged", {})[iteration] = values["idle-share"]

    schedules.forward_step = lasts(FORWARD, schedules.forward_step)
    schedules.backward_step = lasts(2 * FORWARD, schedules.backward_step)
    global_vars.get_tensorboard_writer = global_vars.get_wandb_writer = Writer


def train(hook: str, *extra: str, **options: object) -> Run:
    flags = tiny_flags(2, MICROBATCHES, ITERATIONS, layers=2, clip=0.2, extra=extra, **options)
    return run(flags, 2, hooks=f"tests.test_idle:{hook}")


def printed(done: Run) -> list[tuple[int, int, int, float]]:
    """Iteration of the line, the first and the last that its share is of, and the share."""
    found = re.findall(
        r" iteration +(\d+)/.* idle share: ([\d.]+)% \(iterations? (\d+)(?: to (\d+))?\) \|", done.ranks[-1].stdout
    )
    return [(int(line), int(first), int(last or first), float(share) / 100) for line, share, first, last in found]


def least(shares: Iterable[float]) -> float:
    """The second smallest: what else the machine does makes stages wait longer, and seldom shorter."""
    return sorted(shares)[1]


def test_two_bw_waits_for_its_slowest_stage() -> None:
    done = train("the_first_stage_is_twice_as_fast", "--asyncpp-schedule", "2bw")
    lines = printed(done)
    # One iteration late; the last one flushes, and has its own too.
    assert [line[:3] for line in lines] == [*((k + 1, k, k) for k in range(1, 7)), (8, 7, 8)]
    # One stage never waits, and the other half of the time: by arithmetic 1/4 of the time of both.
    assert least(share for *_, share in lines[2:-1]) == pytest.approx(1 / 4, abs=TOLERANCE)
    for name in ("written", "logged"):
        written = done.ranks[-1].extra[name]
        assert list(written) == list(range(1, ITERATIONS + 1))
        assert [written[first] for _, first, _, _ in lines[:-1]] == pytest.approx([x for *_, x in lines[:-1]], abs=6e-4)


def test_one_f_one_b_drains() -> None:
    extra = ("--asyncpp-schedule", "1f1b", "--log-interval", "4")
    done = train("both_stages_are_alike", *extra, eval_interval=6, eval_iters=1)
    # Megatron prints the first iteration, and every fourth: the mean since the line before. No step is finished late.
    first, second, third = printed(done)
    assert [line[:3] for line in (first, second, third)] == [(1, 1, 1), (4, 2, 4), (8, 5, 8)]
    # (P - 1) / (M + P - 1) of the time, on every stage: in the middle for the next stage's gradient or the previous
    # one's output, and on the last stage in the step, for the first stage's last backward.
    shares = done.ranks[-1].extra["written"]
    assert list(shares) == list(range(1, ITERATIONS + 1))
    assert least(shares[k] for k in range(3, ITERATIONS + 1)) == pytest.approx(1 / 5, abs=TOLERANCE)
    # An evaluation is no part of an iteration: with it the share would be an eighth or less.
    assert shares[7] > 1 / 5 - TOLERANCE
    assert second[3] == pytest.approx(sum(shares[k] for k in (2, 3, 4)) / 3, abs=6e-4)


def test_a_line_has_the_mean_since_the_line_before() -> None:
    lagging = LaggingFigures()
    for iteration, share in ((10, 0.1), (11, 0.2), (12, 0.6)):
        lagging.add_idle(iteration, share)
    assert lagging.text() == " idle share: 30.0% (iterations 10 to 12) |"
    assert lagging.text() == ""


class Stream:
    """A CUDA stream of which the test says how far it is; its events as torch's."""

    def __init__(self) -> None:
        self.now = self.done = self.launched = 0.0

    def event(self, enable_timing: bool) -> Stream.Event:
        assert enable_timing
        return Stream.Event(self)

    class Event:
        def __init__(self, stream: Stream) -> None:
            self.stream, self.at = stream, -1.0

        def record(self) -> None:
            self.at = self.stream.launched

        def query(self) -> bool:
            return self.at <= self.stream.done

        def elapsed_time(self, end: Stream.Event) -> float:
            assert self.query() and end.query(), "torch raises an error here"
            return 1000 * (end.at - self.at)


def test_on_a_gpu_nobody_waits_for_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    monkeypatch.setattr(time, "perf_counter", lambda: stream.now)
    clock, message = Clock(), Exchange(None, "forward")

    def launch(end: float) -> None:
        started = clock.start(message)
        stream.launched = end
        clock.stop(message, started)

    launch(2.0)
    stream.launched = 5.0
    launch(8.0)
    # The host is ahead of the stream: of the two messages, of 2 and 3 seconds, one is through.
    stream.now, stream.done = 10.0, 4.0
    assert clock.share() == pytest.approx(2 / 10)
    stream.now, stream.done = 20.0, 20.0
    assert clock.share() == pytest.approx(3 / 10)
    # What is no message and no wait isn't counted, and costs no event.
    assert clock.start(Begin(0)) is None
    with clock.paused(), clock.paused():
        stream.now = 40.0
    stream.now = 50.0
    launch(9.0)
    assert clock.share() == pytest.approx(1 / 10)
