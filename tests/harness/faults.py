"""Hooks that plant a fault in a rank."""

from __future__ import annotations

import os
import time


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("planted")


def hang_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(1000)
