"""What each rank of the overhead bench runs: Megatron's pretraining loop, timed by what its thread computes."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any


def main(flags: Sequence[str]) -> None:
    """Pretrain, and print for the bench how long this rank's main thread computed in each iteration.

    Waits for other stages don't count, nor what else runs on the machine.

    Args:
        flags: Megatron's and the plugin's; those that a machine without a GPU needs are added.
    """
    import megatron_asyncpp
    from megatron_asyncpp import pretrain_gpt
    from megatron_asyncpp.integration import cpu

    megatron_asyncpp.install()
    from megatron.training import training

    times: list[float] = []

    def marked(function: Any) -> Any:
        @functools.wraps(function)
        def at(*args: Any, **kwargs: Any) -> Any:
            times.append(time.thread_time())
            return function(*args, **kwargs)

        return at

    # An iteration is from one of its calls to the next: logging is in it.
    training.train_step = marked(training.train_step)
    sys.argv = ["pretrain_gpt", *cpu.with_flags(list(flags))[0]]
    pretrain_gpt.main()
    iterations = [1000 * (end - start) for start, end in zip(times, times[1:], strict=False)]
    print("bench own:", json.dumps({"rank": int(os.environ["RANK"]), "iterations_ms": iterations}), flush=True)
