"""2BW + Error Feedback + clipping on every topology, bitwise against Megatron's flushed loop on the older weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader

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
        4, 4, ("--pipeline-model-parallel-layout", "Et*7|t*8|t*8|t*7L"), flags={"layers": 30, "tied": True}
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


@pytest.mark.parametrize("fault", ["without_bucket_pointers", "without_shard_caches", "without_views", "without_copy"])
def test_leaving_out_one_pointer_is_seen(fault: str) -> None:
    """``buffer.param_data`` and ``shard_float16_groups`` follow for tidiness: no run was seen to read them."""
    row = TOPOLOGIES["dp2 pp2 distributed"]
    flags = tiny_flags(
        row.stages, 4, clip=CLIP, extra=(*row.extra, *rows.TWO_BW, *rows.feedback_flags(1.0)), **row.flags
    )
    wrong = run(flags, row.world, hooks=f"tests.faults:{fault}")
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise(wrong, train(row, "fixture"))


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_no_tensor_points_into_a_version_unknown_to_the_ring(bf16: bool) -> None:
    """Finds the pointer that a new version of Megatron adds."""
    extra = (*DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather", *SMALL_BUCKETS, *rows.TWO_BW)
    flags = tiny_flags(2, 4, iterations=7, data_parallel=2, bf16=bf16, extra=extra)
    done = run(flags, 4, hooks="tests.faults:walk_aliases")
    assert [rank.extra["aliases"] for rank in done.ranks] == [[], [], [], []]


def test_the_walk_finds_a_planted_tensor() -> None:
    done = run(tiny_flags(2, 4, iterations=7, extra=rows.TWO_BW), 2, hooks="tests.faults:plant_alias")
    assert all((77,) in rank.extra["aliases"] for rank in done.ranks)


@pytest.mark.parametrize(
    "sharding",
    [pytest.param((), marks=pytest.mark.slow), ("--dist-ckpt-optim-fully-reshardable",)],
    ids=["default", "reshardable"],
)
def test_the_sharded_checkpoint_has_what_error_feedback_keeps(sharding: tuple[str, ...], tmp_path: Path) -> None:
    save = ("--save", str(tmp_path), "--save-interval", "2", "--ckpt-format", "torch_dist", *sharding)
    extra = (*DISTRIBUTED, *rows.TWO_BW, *rows.feedback_flags(1.0), *save)
    run(tiny_flags(2, 4, iterations=4, data_parallel=2, bf16=True, extra=extra), 4)
    for iteration in (2, 4):
        folder = tmp_path / f"iter_{iteration:07}"
        saved = FileSystemReader(folder).read_metadata().state_dict_metadata
        moments = [name for name in saved if "exp_avg_sq" in name]
        assert moments
        assert [name for name in moments if name.replace("exp_avg_sq", "previous_update") not in saved] == []


def test_overlap_changes_nothing_where_iterations_differ() -> None:
    """Megatron's buckets learn in the first iteration how many gradients to wait for (case 7): here the first ones are
    synchronous, and the number of microbatches grows."""

    def train(*overlap: str) -> Run:
        extra = (*rows.TWO_BW, *rows.feedback_flags(1.0), "--asyncpp-sync-start-iters", "2", *DISTRIBUTED, *overlap)
        # Without clipping: only with the overlap are there several buckets, and their shards' norms add up differently.
        flags = tiny_flags(2, ramp_up=((2, 4), (4, 4)), data_parallel=2, extra=extra)
        return run(flags, 4)

    assert_bitwise(train("--overlap-grad-reduce", "--overlap-param-gather", *SMALL_BUCKETS), train())


def test_tied_weights_stay_equal(tmp_path: Path) -> None:
    """Embedding and output weights drift apart with the distributed optimizer (case 5)."""
    extra = (*DISTRIBUTED, *rows.TWO_BW, *rows.feedback_flags(1.0), "--iterations-to-skip", "7")
    extra += ("--save", str(tmp_path), "--save-interval", "10", "--ckpt-format", "torch_dist")
    flags = tiny_flags(
        2, 4, iterations=20, clip=CLIP, tied=True, data_parallel=2, eval_interval=5, eval_iters=1, extra=extra
    )
    done = run(flags, 4)
    assert done.merged("final")  # raises if the copies or replicas differ
    copies = [
        rank.final.get("embedding.word_embeddings.weight", rank.final.get("output_layer.weight")) for rank in done.ranks
    ]
    assert len(copies) == 4
    assert all(copy is not None and copy.equal(copies[0]) for copy in copies)
