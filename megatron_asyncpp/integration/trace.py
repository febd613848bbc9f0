"""--asyncpp-trace: every rank writes down what it does in a few iterations, and rank 0 puts it together in the end.

No rank waits for another one while it trains. Each writes its part into the folder as soon as it has all of it, and
``timeline --from`` can put the parts together from then on.
"""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import fields
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_asyncpp import trace_files
from megatron_asyncpp.arguments import PREFIX, AsyncPPConfig
from megatron_asyncpp.errors import AsyncPPError, leave
from megatron_asyncpp.runtime import clock
from megatron_asyncpp.runtime.alignment import seconds_behind
from megatron_asyncpp.schedules.measured import Iteration, Part, Record

# Without --asyncpp-trace-iters, from which iteration of the run to which: the first ones fill the pipeline.
_FIRST, _LAST = 3, 5


class Trace:
    """Of one rank."""

    def __init__(self, config: AsyncPPConfig, args: Namespace, rank_clock: clock.Clock, pipeline: Any) -> None:
        """Make the folder ready, and find out how far this rank's clock is behind. All ranks must make theirs.

        Args:
            config: asks for it.
            args: Megatron's.
            rank_clock: of this rank.
            pipeline: as ``agreement.pipeline_group`` makes it.
        """
        assert config.trace is not None
        self._folder = config.trace
        self._schedule = config.name + " wide" * config.schedule.ahead
        self._ahead = config.schedule.ahead
        self._clock = rank_clock
        self._ranks = torch.distributed.get_process_group_ranks(pipeline)
        first, last = config.trace_iterations or (args.iteration + _FIRST, args.iteration + _LAST)
        self._first, self._last = int(first), int(last)
        if not args.iteration < self._first <= args.train_iters:
            leave(
                AsyncPPError(
                    f"the run has the iterations {args.iteration + 1} to {args.train_iters}, and the first to trace is "
                    f"{self._first}: give other ones with {PREFIX}trace-iters A-B"
                )
            )
        if torch.distributed.get_rank() == 0:
            trace_files.forget_parts(self._folder)
        self._behind = seconds_behind(pipeline)
        self._iterations: list[Iteration] = []
        self._records: list[clock.Record] = []
        self._end: Any = None  # an event at the end of the recording
        self._written = False

    def iteration(self, number: int) -> None:
        """This rank is about to call the schedule for an iteration, counted from 1."""
        if self._first - 1 <= number <= self._last + 1:
            if not self._iterations:
                self._set_anchor()
                self._clock.record(self._records)
            self._iterations.append(Iteration(number, get_num_microbatches(), time.perf_counter()))
        elif number > self._last + 1 and not self._written:
            self._stop()
            if self._end.query():  # else a GPU has still to come there
                self._write()

    def end(self) -> None:
        """All ranks' training has ended: write what isn't written, and on rank 0 put all parts together."""
        if not self._written:
            self._stop()
            self._end.synchronize()
            self._write()
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            try:
                timeline = trace_files.read(self._folder)
                trace_files.draw(timeline, self._folder / "timeline.png")
                trace_files.write_trace(timeline, self._folder / "trace.json")
            except (AsyncPPError, OSError) as error:
                print(f"megatron_asyncpp: the trace can't be put together: {error}", flush=True)
            else:
                print(
                    f"megatron_asyncpp: wrote {self._folder}/timeline.png, and trace.json beside it: open that at "
                    f"https://ui.perfetto.dev",
                    flush=True,
                )

    def _set_anchor(self) -> None:
        """An event of which the time by ``time.perf_counter`` is known too: on a GPU, once its stream is empty."""
        clock.event().synchronize()
        self._anchor, self._anchor_time = clock.event(), time.perf_counter()

    def _stop(self) -> None:
        if self._end is None:
            self._clock.record(None)
            self._end = clock.event()

    def _seconds(self, event: Any) -> float:
        return self._anchor_time + float(self._anchor.elapsed_time(event)) / 1000

    def _write(self) -> None:
        self._written = True
        records = [
            Record(type(what).__name__, _fields(what), self._seconds(start), self._seconds(end))
            for what, start, end in self._records
        ]
        part = Part(
            rank=torch.distributed.get_rank(),
            ranks=torch.distributed.get_world_size(),
            pipeline=self._ranks[0],
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            stages=len(self._ranks),
            schedule=self._schedule,
            ahead=self._ahead,
            first=self._first,
            last=self._last,
            behind=self._behind,
            iterations=self._iterations,
            end=self._seconds(self._end),
            records=records,
        )
        self._records.clear()
        trace_files.write_part(self._folder, part)
        if part.rank == 0:
            print(
                f"megatron_asyncpp: rank 0 has traced iterations {self._first} to {self._last}; to see them before the "
                f"run ends: python -m megatron_asyncpp timeline --from {self._folder} --out timeline.png",
                flush=True,
            )


def _fields(what: clock.Timed) -> tuple[Any, ...]:
    return tuple(getattr(what, field.name) for field in fields(what))
