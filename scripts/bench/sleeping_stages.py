"""The bench's training script, for `megatron_asyncpp run --cpu`: pretrains a GPT on stages of a known speed.

Every forward lasts as long as it was told, and every backward too: what their own computation leaves of the time is
slept. So a machine with fewer cores than stages shows what a pipeline of that many GPUs would do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any


class TimedStep:
    """A step of a stage that lasts a given time.

    Attributes:
        own: the time that each call took by itself, in seconds.
    """

    def __init__(self, step: Callable[..., Any], seconds: float) -> None:
        self._step = step
        self._seconds = seconds
        self.own: list[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take the step, and sleep until its time is over."""
        began = time.perf_counter()
        result = self._step(*args, **kwargs)
        self.own.append(time.perf_counter() - began)
        if (left := self._seconds - self.own[-1]) > 0:
            time.sleep(left)
        return result

    def report(self, warm_up: int) -> dict[str, float]:
        """What the calls after the first `warm_up` took by themselves."""
        own = self.own[warm_up:]
        return {
            "calls": len(own),
            "late": sum(seconds > self._seconds for seconds in own),
            "own_ms": 1000 * statistics.median(own),
        }


def main() -> None:
    """Replace Megatron's two steps, pretrain as the other flags say, and print a report for the bench."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--bench-forward-ms", type=float, required=True)
    parser.add_argument("--bench-backward-ms", type=float, required=True)
    parser.add_argument("--bench-warm-up", type=int, required=True, metavar="CALLS")
    bench, sys.argv[1:] = parser.parse_known_args(sys.argv[1:])

    # Megatron's schedules find both functions in this module when they call them, and the runtime does too.
    from megatron.core.pipeline_parallel import schedules

    forward = schedules.forward_step = TimedStep(schedules.forward_step, bench.bench_forward_ms / 1000)
    backward = schedules.backward_step = TimedStep(schedules.backward_step, bench.bench_backward_ms / 1000)

    from megatron_asyncpp import pretrain_gpt

    pretrain_gpt.main()
    report = {name: step.report(bench.bench_warm_up) for name, step in (("forward", forward), ("backward", backward))}
    print("bench report:", json.dumps({"rank": int(os.environ["RANK"]), **report}), flush=True)


if __name__ == "__main__":
    main()
