"""Slowdown against a pipeline without bubble, for equal stages, in closed form (arXiv:2606.30634, appendix F.2)."""

from __future__ import annotations


def one_f_one_b(stages: int, microbatches: int) -> float:
    """1F1B with a flush after each batch: 1 + (P - 1) / M."""
    return 1 + (stages - 1) / microbatches


def two_bw_blocking(stages: int, microbatches: int, backward: float) -> float:
    """2BW whose optimizer step waits for all stages: 1 + (P - 1) B / (M (F + B)).

    Args:
        stages: P.
        microbatches: M.
        backward: B / F, the time of a backward in forwards.
    """
    return 1 + (stages - 1) * backward / (microbatches * (1 + backward))
