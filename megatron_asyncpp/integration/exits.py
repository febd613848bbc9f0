"""Leaving the training loop early, on all ranks after the same iteration, without asking all ranks in each.

Megatron gathers over the world in every iteration whether any rank got a signal or has run for too long. Here each rank
says so when it begins a step, with the other figures that are summed over all ranks, and by the end of the next
iteration every rank knows the sum.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Exits:
    """What any rank has asked for, as far as all ranks know.

    Attributes:
        signal: a signal was received, with --exit-signal-handler.
        duration: the run has taken --exit-duration-in-mins.
    """

    signal: bool = False
    duration: bool = False

    def learn(self, requests: Sequence[bool]) -> None:
        """Take in the sums of one step; what was asked for once stays asked for."""
        if requests:
            signal, duration = requests
            self.signal |= signal
            self.duration |= duration


def requested(args: Namespace) -> tuple[bool, bool]:
    """What this rank asks for now: in the order in which ``Exits.learn`` takes the sums."""
    from megatron.training import training
    from megatron.training.global_vars import get_signal_handler

    signal = bool(args.exit_signal_handler) and bool(get_signal_handler()._signal_received)
    minutes = (time.time() - training._TRAIN_START_TIME) / 60.0
    return signal, bool(args.exit_duration_in_mins) and minutes > args.exit_duration_in_mins
