"""What each rank of ``compute.py`` runs: Megatron's pretraining loop, with a note of when each part of it ran."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any


def main(flags: Sequence[str]) -> None:
    """Pretrain, and print a report for the bench: when each iteration, forward and backward began and ended.

    Args:
        flags: Megatron's and the plugin's; those that a machine without a GPU needs are added.
    """
    import megatron_asyncpp
    from megatron_asyncpp import pretrain_gpt
    from megatron_asyncpp.integration import cpu

    megatron_asyncpp.install()
    # Megatron's schedules and its loop find these in their modules when they call them, and the runtime does too.
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import training

    spans: dict[str, list[tuple[float, float]]] = {}
    for owner, name, kind in (
        (training, "train_step", "iteration"),
        (schedules, "forward_step", "forward"),
        (schedules, "backward_step", "backward"),
    ):
        setattr(owner, name, _noted(getattr(owner, name), spans.setdefault(kind, [])))
    sys.argv = ["pretrain_gpt", *cpu.with_flags(list(flags))[0]]
    pretrain_gpt.main()
    print("bench report:", json.dumps({"rank": int(os.environ["RANK"]), **spans}), flush=True)


def _noted(function: Callable[..., Any], spans: list[tuple[float, float]]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        result = function(*args, **kwargs)
        spans.append((began, time.monotonic()))
        return result

    return noted
