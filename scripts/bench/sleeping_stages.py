"""What each rank of the bench runs: Megatron's pretraining loop on stages of a known speed.

Every forward lasts as long as it was told, and every backward too, so a machine with fewer cores than stages shows what
a pipeline of that many GPUs would do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.bench import latency
from scripts.bench.timed import TimedStep, report


def main(
    flags: Sequence[str],
    forward: float,
    backward: float,
    warm_up: int,
    message: float = 0.0,
    folder: Path | None = None,
) -> None:
    """Replace Megatron's two steps, pretrain, and print a report for the bench.

    Args:
        flags: Megatron's and the plugin's; those that a machine without a GPU needs are added.
        forward: seconds that each forward lasts at least, of one model chunk.
        backward: the same of each backward.
        warm_up: calls of each that the report leaves out.
        message: seconds until a message can be seen.
        folder: the run's own, where messages take time.
    """
    import megatron_asyncpp
    from megatron_asyncpp import pretrain_gpt
    from megatron_asyncpp.integration import cpu

    megatron_asyncpp.install()
    if message:
        assert folder is not None
        latency.install(message, folder)
    # Megatron's schedules find both functions in this module when they call them, and the runtime does too.
    from megatron.core.pipeline_parallel import schedules

    steps = {
        "forward": TimedStep(schedules.forward_step, forward),
        "backward": TimedStep(schedules.backward_step, backward),
    }
    schedules.forward_step, schedules.backward_step = steps["forward"], steps["backward"]
    sys.argv = ["pretrain_gpt", *cpu.with_flags(list(flags))[0]]
    pretrain_gpt.main()
    report(steps, warm_up)
