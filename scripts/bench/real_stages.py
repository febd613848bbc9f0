"""What each rank of the compute bench runs: Megatron's pretraining loop on stages that really compute."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from scripts.bench.timed import TimedStep, report


def main(flags: Sequence[str], warm_up: int) -> None:
    """Pretrain, and print for the bench how long forwards and backwards took.

    Args:
        flags: Megatron's and the plugin's; those that a machine without a GPU needs are added.
        warm_up: calls of each that the report leaves out.
    """
    import megatron_asyncpp
    from megatron_asyncpp import pretrain_gpt
    from megatron_asyncpp.integration import cpu

    megatron_asyncpp.install()
    from megatron.core.pipeline_parallel import schedules

    steps = {"forward": TimedStep(schedules.forward_step, 0), "backward": TimedStep(schedules.backward_step, 0)}
    schedules.forward_step, schedules.backward_step = steps["forward"], steps["backward"]
    sys.argv = ["pretrain_gpt", *cpu.with_flags(list(flags))[0]]
    pretrain_gpt.main()
    report(steps, warm_up)
