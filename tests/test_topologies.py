"""2BW + Error Feedback + clipping on every topology, bitwise against Megatron's flushed loop on the older weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests import rows
from tests.harness.flags import tiny_flags
from tests.harness.results import Run, assert_bitwise
from tests.harness.run import run


@dataclass(frozen=True)
class Topology:
    """One row: its shape, and what it adds to the flags of both runs."""

    stages: int
    world: int
    extra: tuple[str, ...] = ()
    plugin_only: tuple[str, ...] = ()  # flags that change no bit, and that the fixture can't follow
    flags: dict[str, Any] = field(default_factory=dict)


CLIP = 0.2  # below the norm of nearly every batch of every row
DISTRIBUTED = ("--use-distributed-optimizer",)
SMALL_BUCKETS = ("--ddp-bucket-size", "3000")  # so that there are several
TOPOLOGIES = {
    "pp2": Topology(2, 2),
    "pp4": Topology(4, 4),
    "tp2 pp2": Topology(2, 4, flags={"tensor": 2}),
    "dp2 pp2": Topology(2, 4, flags={"data_parallel": 2}),
    "dp2 pp2 overlap-grad-reduce": Topology(
        2, 4, ("--overlap-grad-reduce", *SMALL_BUCKETS), flags={"data_parallel": 2}
    ),
    "dp2 pp2 distributed": Topology(2, 4, DISTRIBUTED, flags={"data_parallel": 2}),
    "dp2 pp2 distributed overlap-grad-reduce": Topology(
        2, 4, (*DISTRIBUTED, "--overlap-grad-reduce", *SMALL_BUCKETS), flags={"data_parallel": 2}
    ),
    "dp2 pp2 distributed bf16": Topology(2, 4, DISTRIBUTED, flags={"data_parallel": 2, "bf16": True}),
    "dp2 pp2 distributed overlap-param-gather": Topology(
        2,
        4,
        (*DISTRIBUTED, "--overlap-grad-reduce", *SMALL_BUCKETS),
        ("--overlap-param-gather",),
        {"data_parallel": 2, "eval_interval": 5, "eval_iters": 1},
    ),
    "dp2 pp2 distributed overlap-param-gather bf16": Topology(
        2,
        4,
        (*DISTRIBUTED, "--overlap-grad-reduce", *SMALL_BUCKETS),
        ("--overlap-param-gather",),
        {"data_parallel": 2, "bf16": True},
    ),
    "dp2 pp2 distributed muon bf16": Topology(
        2, 4, (*DISTRIBUTED, *rows.MUON), flags={"data_parallel": 2, "bf16": True}
    ),
    "tp2 pp2 sequence parallel": Topology(2, 4, ("--sequence-parallel",), flags={"tensor": 2}),
    "30 layers on 4 stages": Topology(
        4, 4, ("--pipeline-model-parallel-layout", "Et*7|t*8|t*8|t*7L"), flags={"layers": 30}
    ),
    "tied pp2": Topology(2, 2, flags={"tied": True}),
    "tied dp2 pp2 distributed": Topology(2, 4, DISTRIBUTED, flags={"data_parallel": 2, "tied": True}),
    "recompute full": Topology(
        2, 2, ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
    ),
    "recompute selective": Topology(2, 2, ("--recompute-granularity", "selective")),
}


def train(row: Topology, mode: str, lam: float | None = 1.0) -> Run:
    extra = row.extra
    if mode == "plugin":
        extra += (*row.plugin_only, *rows.TWO_BW, *rows.feedback_flags(lam))
    flags = tiny_flags(row.stages, 4, clip=CLIP, extra=extra, **row.flags)
    reference = rows.Reference(delay=1, error_feedback=lam)
    return run(flags, row.world, mode, reference=reference, timeout=180)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_topology_is_the_flushed_loop_on_older_weights(name: str) -> None:
    row = TOPOLOGIES[name]
    done, reference = train(row, "plugin"), train(row, "fixture")
    rows.assert_delayed(done, 4)
    assert sum(norm > CLIP for norm in reference.grad_norms) > rows.ITERATIONS // 2, "clipping wasn't active"
    assert_bitwise(done, reference)
    assert done.grad_norms == reference.grad_norms
