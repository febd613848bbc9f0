"""Measures the memory that 2BW takes on each rank on top of synchronous training: plain Megatron, same model and flags.

    python scripts/bench/memory.py [--pp 4] [--json]

Real runs of Megatron's loop in bf16, on the CPU. What is counted are the bytes of live tensors (``live_bytes.py``) at
every moment of some iterations in mid-run, in three kinds:

- activations: whatever is made within a forward, a backward or an exchange between stages;
- what collectives of data parallelism make: gloo's own copies, which NCCL doesn't need;
- all else: weights, gradients, optimizer, copies. This is what the table is about.

Of the last kind the largest figure of three kinds of moments is taken, and Megatron's own for the same moments is
subtracted, on the same stage:

- between: from one iteration to the next, where a step is begun and not finished;
- running: while forwards and backwards run, so also those of batch k+1 between begin(k) and finish(k);
- stepping: inside begin and finish, where Megatron's is that of its ``optimizer.step``.

2BW holds the activations of as many microbatches at a time as 1F1B; the ``--json`` output has the difference of the
most of each, and that of collectives, so that nothing can hide there. While it steps there is one microbatch less in
flight than at that peak, so what it takes for that moment raises the peak of an accelerator only if it is larger.

The last stage needs no second weight buffer, unless a step has to be finished early (evaluation, checkpoint): then it
takes 2 bytes a parameter there as well. In these runs nothing is evaluated.

Bytes per parameter don't depend on the size of the model, except for what lasts for a moment of the step: with Error
Feedback that is a copy of one part of the step. A part has 2**24 elements, or one parameter if that is larger
(``optim/streaming.py``); in these runs PART elements, so that the small model steps in several of them.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # run by its path
    sys.path.insert(0, str(ROOT))

from scripts.bench.live_bytes import ACTIVATIONS, COLLECTIVES, KEPT, LiveBytes  # noqa: E402
from tests.harness.flags import tiny_flags  # noqa: E402
from tests.harness.results import RankResult, Run  # noqa: E402
from tests.harness.run import run  # noqa: E402

PARAMETERS = 200_000_000  # on a GPU, that the figures are scaled to
PART = 2**16  # of these runs: the largest parameter has as many
ITERATIONS, STEADY = 5, range(2, 4)  # the first ones fill the pipeline and make state, the last one drains it
MOMENTS = ("between", "running", "stepping")


@dataclass(frozen=True)
class Row:
    """One configuration of 2BW.

    Attributes:
        name: of the way of data parallelism, a key of DATA_PARALLEL.
        clips: whether gradients are clipped by their norm.
        feedback: the precision in which Error Feedback keeps the last update, or None without Error Feedback.
    """

    name: str
    clips: bool
    feedback: str | None


@dataclass(frozen=True)
class Extra:
    """What a row takes on one rank on top of synchronous training, in bytes.

    Attributes:
        stage: of the rank.
        parameters: of the model on this rank.
        masters: fp32 elements that its optimizer steps.
        between: see the module's text.
        running: see there.
        stepping: see there.
        activations: the difference of the most of them at once.
        collectives: the same of what collectives make.
        peak: the difference of the most of all live bytes at once, collectives' left out.
        step: what the step alone takes for a moment, that of the inner optimizer included; no difference.
        megatrons_step: the same of Megatron's.
    """

    stage: int
    parameters: int
    masters: int
    between: int
    running: int
    stepping: int
    activations: int
    collectives: int
    peak: int
    step: int
    megatrons_step: int

    @property
    def lasting(self) -> int:
        """What lasts for longer than a moment of the step: this grows with the model."""
        return max(self.between, self.running)


# Data parallelism: its size, and Megatron's flags for it.
DATA_PARALLEL: dict[str, tuple[int, tuple[str, ...]]] = {
    "DP 1": (1, ()),
    "DP 2": (2, ()),
    "DP 2, distributed optimizer": (2, ("--use-distributed-optimizer",)),
}
ROWS = [
    *(
        Row(name, clips, feedback)
        for name in ("DP 1", "DP 2, distributed optimizer")
        for clips in (False, True)
        for feedback in (None, "bf16", "fp32")
    ),
    Row("DP 2", True, "fp32"),
]


def measure(result: RankResult) -> None:
    """In a rank, before training: count live bytes, and leave the most of each kind of moment in ``result.extra``."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.training import training

    from megatron_asyncpp.optim import correction, streaming
    from megatron_asyncpp.runtime.step import TwoHalfStep

    correction.stream = functools.partial(streaming.stream, part=PART)
    count = LiveBytes("between")
    count.__enter__()

    def wrap(owner: Any, name: str, context: Callable[[], Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with context():
                return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    for owner, name in ((schedules, "forward_step"), (schedules, "backward_step"), (P2PCommunicator, "_communicate")):
        wrap(owner, name, lambda: count.making(ACTIVATIONS))
    for name in ("start_grad_sync", "finish_grad_sync", "start_param_sync", "finish_param_sync"):
        wrap(_ParamAndGradBucketGroup, name, lambda: count.making(COLLECTIVES))
    for owner, name in ((ChainedOptimizer, "step"), (TwoHalfStep, "begin"), (TwoHalfStep, "finish")):
        wrap(owner, name, lambda: count.during("stepping"))
    wrap(training, "train_step", lambda: count.during("running"))

    train_step, iterations = training.train_step, iter(range(ITERATIONS))

    @functools.wraps(train_step)
    def watched(forward_step: Any, data: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        iteration = next(iterations)
        if iteration == 0:
            result.initial.clear()  # a copy that the harness made
            result.extra["parameters"] = sum(p.numel() for p in model[0].parameters())
            result.extra["masters"] = sum(p.numel() for p in optimizer.get_parameters())
        if iteration == STEADY.start:
            count.most.clear()
        if iteration == STEADY.stop:
            result.extra["most"] = dict(count.most)
        return train_step(forward_step, data, model, optimizer, *args, **kwargs)

    training.train_step = watched


def train(row: Row, asynchronous: bool, stages: int = 4, hook: Any = "scripts.bench.memory:measure") -> Run:
    """Train a small model in bf16, with 2BW or plain Megatron, and count.

    Args:
        row: the configuration.
        asynchronous: whether as 2BW.
        stages: P, each of one layer.
        hook: calls ``measure`` in each rank.
    """
    size, extra = DATA_PARALLEL[row.name]
    if asynchronous:
        extra = (*extra, "--asyncpp-schedule", "2bw")
        if row.feedback is not None:
            extra = (*extra, "--asyncpp-error-feedback", "--asyncpp-error-feedback-dtype", row.feedback)
    flags = tiny_flags(
        stages,
        stages,
        ITERATIONS,
        layers=stages,
        hidden=128,
        data_parallel=size,
        clip=0.1 if row.clips else 0.0,
        bf16=True,
        extra=extra,
    )
    return run(flags, stages * size, "plugin" if asynchronous else "megatron", hooks=hook, timeout=500)


def extras(done: Run, synchronous: Run) -> list[Extra]:
    """What a run took more than a synchronous one of the same shape, per rank."""
    found = []
    for rank, other in zip(done.ranks, synchronous.ranks, strict=True):
        most, plain = (r.extra["most"] for r in (rank, other))
        assert isinstance(most, dict) and isinstance(plain, dict)
        differences = {moment: most[moment, KEPT] - plain[moment, KEPT] for moment in MOMENTS}

        def most_of(kind: str, figures: dict[tuple[str, str], int]) -> int:
            return max(figures.get((moment, kind), 0) for moment in MOMENTS)

        found.append(
            Extra(
                rank.pipeline_rank,
                rank.extra["parameters"],
                rank.extra["masters"],
                activations=most_of(ACTIVATIONS, most) - most_of(ACTIVATIONS, plain),
                collectives=most_of(COLLECTIVES, most) - most_of(COLLECTIVES, plain),
                peak=most_of("all", most) - most_of("all", plain),
                step=most["stepping", KEPT] - most["between", KEPT],
                megatrons_step=plain["stepping", KEPT] - plain["between", KEPT],
                **differences,
            )
        )
    return found


def measured(rows: Sequence[Row], stages: int = 4) -> Iterator[tuple[Row, list[Extra]]]:
    """Each row with the extra memory of all its ranks. Rows of the same shape share a synchronous run."""
    synchronous: dict[Row, Run] = {}
    for row in rows:
        plain = replace(row, feedback=None)
        if plain not in synchronous:
            synchronous[plain] = train(plain, asynchronous=False, stages=stages)
        yield row, extras(train(row, asynchronous=True, stages=stages), synchronous[plain])


def scaled(extra: Extra) -> float:
    """What lasts, in GB, with PARAMETERS parameters on the GPU."""
    return extra.lasting / extra.parameters * PARAMETERS / 1e9


def line(row: Row, ranks: Sequence[Extra]) -> str:
    """A row of the table: of the rank with most bytes per parameter, and of the last stage."""
    most, last = max(ranks, key=scaled), max(ranks, key=lambda extra: extra.stage)
    cells = [row.name, "on" if row.clips else "off", row.feedback or "off"]
    cells += [f"{extra.lasting / extra.parameters:.2f}" for extra in (most, last)]
    cells += [f"{scaled(most):.2f} GB", f"{(most.stepping - most.lasting) / (4 * PART):.2f}"]
    return "| " + " | ".join(cells) + " |"


HEADER = """\
| data parallelism | clipping | Error Feedback | bytes per parameter | last stage | 200M parameters | in a step, parts |
|---|---|---|---|---|---|---|"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Extra memory of 2BW against plain Megatron, measured.")
    parser.add_argument("--pp", type=int, default=4, help="pipeline stages")
    parser.add_argument("--json", action="store_true", help="print bytes of every rank; the table goes to stderr")
    options = parser.parse_args()
    found, table = [], sys.stderr if options.json else sys.stdout
    print(HEADER, file=table, flush=True)
    for row, ranks in measured(ROWS, options.pp):
        found.append({**asdict(row), "part": PART, "ranks": [asdict(extra) for extra in ranks]})
        print(line(row, ranks), file=table, flush=True)
    if options.json:
        print(json.dumps({"rows": found}))


if __name__ == "__main__":
    main()
