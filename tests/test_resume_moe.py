"""Mixtures of experts continued from a checkpoint, bit for bit: a router's bias has a stale version as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.resumes import (
    SAVED_AT,
    Shape,
    assert_continued,
    assert_starts_on_stale,
    control,
    interrupted,
    loading,
)
from tests.test_moe import ALLTOALL, EP2, EXPERT_BIAS, MOE, QUANTILES, losses

SHAPES = {
    "expert bias, torch_dist": (Shape(extra=(*MOE, *EXPERT_BIAS)), "torch_dist"),
    "expert bias, torch": (Shape(extra=(*MOE, *EXPERT_BIAS)), "torch"),
    "quantile balancing bf16": (Shape(extra=(*MOE, *QUANTILES), options=(("bf16", True),)), "torch_dist"),
    "ep2 distributed bf16, expert bias": (
        Shape(
            world=4,
            extra=(*EP2, *ALLTOALL, "--use-distributed-optimizer", *EXPERT_BIAS),
            options=(("bf16", True), ("data_parallel", 2)),
        ),
        "torch_dist",
    ),
    "global_aux_loss": (Shape(extra=(*MOE, *losses("global_aux_loss"))), "torch_dist"),
}


QUICK = ("expert bias, torch",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SHAPES]
)
def test_experts_continue_bit_for_bit(name: str, tmp_path: Path) -> None:
    shape, kind = SHAPES[name]
    first = interrupted(shape, tmp_path, SAVED_AT, kind)
    second = shape.train(*loading(tmp_path, kind))
    assert_starts_on_stale(second, SAVED_AT)
    assert_continued(control(shape), second, SAVED_AT, first)
