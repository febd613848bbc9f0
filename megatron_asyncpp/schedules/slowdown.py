"""Slowdown against a pipeline without bubble, for equal stages and messages that take no time, in closed form.

The simulator computes the same for the schedules that are plans. Those that aren't have nothing but their formula:
interleaved 1F1B, ZB1P and DualPipe. P is the number of stages, M of microbatches, F and B the times of a forward and
of a whole backward, and W of that part of a backward which computes the weights' gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def one_f_one_b(stages: int, microbatches: int) -> float:
    """1F1B with a flush after each batch: 1 + (P - 1) / M (arXiv:2606.30634, appendix F.2)."""
    return 1 + (stages - 1) / microbatches


def two_bw_blocking(stages: int, microbatches: int, backward: float) -> float:
    """2BW whose optimizer step waits for all stages: 1 + (P - 1) B / (M (F + B)).

    Args:
        stages: P.
        microbatches: M.
        backward: B / F, the time of a backward in forwards.
    """
    return 1 + (stages - 1) * backward / (microbatches * (1 + backward))


def interleaved(stages: int, microbatches: int, virtual_stages: int) -> float:
    """Interleaved 1F1B with a flush: 1 + (P - 1) / (v M) (arXiv:2104.04473, section 2.2.2).

    Args:
        stages: P.
        microbatches: M, a multiple of P.
        virtual_stages: v, model chunks on each stage.
    """
    return 1 + (stages - 1) / (virtual_stages * microbatches)


def zb1p(stages: int, microbatches: int, backward: float) -> float:
    """ZB1P, its bubble being (P - 1)(F + B - 2W) (arXiv:2412.19437, table 2, after arXiv:2401.10241), with W = F.

    Args:
        stages: P.
        microbatches: M.
        backward: B / F, at least 1, as a backward includes W.
    """
    return 1 + (stages - 1) * (backward - 1) / (microbatches * (1 + backward))


def dualpipe(stages: int, microbatches: int, backward: float) -> float:
    """DualPipe, its bubble being (P / 2 - 1)(F&B + B - 3W) (arXiv:2412.19437, table 2), with W = F, F&B = F + B.

    F&B is the time of a forward and a backward that overlap. They gain nothing by it here, as communication takes no
    time in these formulas.

    Args:
        stages: P, even.
        microbatches: M.
        backward: B / F, at least 1, as a backward includes W.
    """
    return 1 + (stages / 2 - 1) * (2 * backward - 2) / (microbatches * (1 + backward))


@dataclass(frozen=True)
class Formula:
    """The slowdown of a schedule that isn't a plan here.

    Attributes:
        slowdown: from P, M, B / F and the model chunks on each stage, where there are several.
        source: where the formula is from.
        holds: whether it does for P and M.
    """

    slowdown: Callable[[int, int, float, int], float]
    source: str
    holds: Callable[[int, int], bool] = lambda stages, microbatches: True


FORMULAS = {
    "interleaved": Formula(
        lambda p, m, backward, v: interleaved(p, m, v), "arXiv:2104.04473, section 2.2.2", lambda p, m: m % p == 0
    ),
    "zb1p": Formula(lambda p, m, backward, v: zb1p(p, m, backward), "arXiv:2412.19437, table 2"),
    "dualpipe": Formula(
        lambda p, m, backward, v: dualpipe(p, m, backward), "arXiv:2412.19437, table 2", lambda p, m: p % 2 == 0
    ),
}
