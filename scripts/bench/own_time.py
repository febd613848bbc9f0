"""What each rank of the overhead bench runs: Megatron's pretraining loop, timed by what its thread computes."""

from __future__ import annotations

import cProfile
import functools
import json
import os
import pstats
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(flags: Sequence[str], iterations: int, warm_up: int) -> None:
    """Pretrain, and print for the bench what this rank's main thread computed in each iteration.

    Waits for other stages don't count, nor what else runs on the machine. Every second iteration is profiled, which
    takes time itself; the others are timed.

    Args:
        flags: Megatron's and the plugin's; those that a machine without a GPU needs are added.
        iterations: of the run. The last, in which the pipeline drains, doesn't count.
        warm_up: the first ones, which don't count either.
    """
    import megatron_asyncpp
    from megatron_asyncpp import pretrain_gpt
    from megatron_asyncpp.integration import cpu

    megatron_asyncpp.install()
    from megatron.training import training

    # An iteration is from one call of train_step to the next, so logging is in it, and the last has no end.
    counts = range(warm_up, iterations - 2)
    starts: list[float] = []
    profile = cProfile.Profile(time.thread_time)  # else the wait for a message is that of who waits

    def marked(function: Any) -> Any:
        @functools.wraps(function)
        def at(*args: Any, **kwargs: Any) -> Any:
            profile.disable()
            starts.append(time.thread_time())
            if (number := len(starts) - 1) in counts and number % 2:
                profile.enable()
            return function(*args, **kwargs)

        return at

    training.train_step = marked(training.train_step)
    sys.argv = ["pretrain_gpt", *cpu.with_flags(list(flags))[0]]
    pretrain_gpt.main()
    report = {
        "rank": int(os.environ["RANK"]),
        "iterations_ms": [1000 * (starts[i + 1] - starts[i]) for i in counts if not i % 2],
        "functions": _own(profile, Path(megatron_asyncpp.__file__).parent, sum(i % 2 for i in counts)),
    }
    print("bench own:", json.dumps(report), flush=True)


def _own(profile: cProfile.Profile, package: Path, iterations: int) -> dict[str, tuple[float, float]]:
    """Of each function of a package, ms of its own and calls, per iteration; not what it calls elsewhere."""
    entries: Any = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    return {
        f"{Path(file).relative_to(package)}:{line} {name}": (1000 * own / iterations, calls / iterations)
        for (file, line, name), (_, calls, own, *_rest) in entries.items()
        if Path(file).is_relative_to(package)
    }
