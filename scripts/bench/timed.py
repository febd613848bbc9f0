"""A step of a stage that lasts a given time, and what the bench reports about such steps."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

# Of a step's time, what passes before its own computation. All stages' steps begin at about the same moment, just after
# their messages, and with fewer cores than stages one's computation would hold up another's message: a GPU's doesn't.
_SETTLES = 0.1


class TimedStep:
    """A step of a stage that lasts a given time: what its own computation leaves of it is slept.

    Attributes:
        own: the time that each call took by itself, in seconds.
    """

    def __init__(self, step: Callable[..., Any], seconds: float) -> None:
        self._step = step
        self._seconds = seconds
        self.own: list[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take the step, and sleep until its time is over."""
        ends = time.perf_counter() + self._seconds
        time.sleep(_SETTLES * self._seconds)
        began = time.perf_counter()
        result = self._step(*args, **kwargs)
        self.own.append(time.perf_counter() - began)
        if (left := ends - time.perf_counter()) > 0:
            time.sleep(left)
        return result

    def report(self, warm_up: int) -> dict[str, float]:
        """What the calls after the first `warm_up` took by themselves."""
        own = self.own[warm_up:]
        return {
            "calls": len(own),
            "late": sum(seconds > (1 - _SETTLES) * self._seconds for seconds in own),
            "own_ms": 1000 * statistics.median(own),
        }


def report(steps: Mapping[str, TimedStep], warm_up: int) -> None:
    """Print for the bench what the steps of this rank took, but for the first `warm_up` calls of each."""
    reports = {name: step.report(warm_up) for name, step in steps.items() if len(step.own) > warm_up}
    print("bench report:", json.dumps({"rank": int(os.environ["RANK"]), **reports}), flush=True)
