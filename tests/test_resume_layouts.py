"""A checkpoint in another layout of ranks: the same training where Megatron can load it, else one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.results import compare_weights
from tests.resumes import SAVED_AT, Shape, assert_starts_on_stale, control, interrupted, loading, saving
from tests.test_resume import LEAVES, shape

# The vocabulary is padded to a multiple of this times TP, and here to the same number of rows.
TP2 = Shape(2, 4, ("--make-vocab-size-divisible-by", "64"), (("tensor", 2),))
LAYOUTS = {
    "pp2 to pp4": (Shape(), Shape(4, 4)),
    "pp4 to pp2": (Shape(4, 4), Shape()),
    "pp2 to tp2 pp2": (Shape(), TP2),
    "tp2 pp2 to pp2": (TP2, Shape()),
    "dp2 to dp1": (
        shape("adam", "dp2 pp2 distributed", "fp32"),
        Shape(2, 2, ("--use-distributed-optimizer",), microbatches=8),
    ),
    "dp1 to dp2": (
        Shape(2, 2, ("--use-distributed-optimizer",), microbatches=8),
        shape("adam", "dp2 pp2 distributed", "fp32"),
    ),
}


@pytest.mark.parametrize(
    "name", ["pp2 to pp4", *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name != "pp2 to pp4")]
)
def test_it_goes_on_in_another_layout(name: str, tmp_path: Path) -> None:
    """Stale weights, and what Error Feedback keeps, are resharded with the rest."""
    before, after = LAYOUTS[name]
    interrupted(before, tmp_path)
    second, whole = after.train(*loading(tmp_path)), control(before)
    assert_starts_on_stale(second, SAVED_AT, range(4))
    assert "previous update of each weight: restored" in second.ranks[0].stdout
    if "tp" in name or "dp" in name:  # sums are made in another order
        assert second.last.losses == pytest.approx(whole.last.losses[SAVED_AT:], rel=1e-5)
        wrong = after.train(*loading(tmp_path), hook="tests.resume_faults:forget_the_stale_weights")
        assert wrong.last.losses != pytest.approx(whole.last.losses[SAVED_AT:], rel=1e-5)
    else:
        assert second.last.losses == whole.last.losses[SAVED_AT:]
        compare_weights(whole.merged("final"), second.merged("final"), "final weights")


@pytest.mark.parametrize(
    ("before", "after", "kind", "says"),
    [
        pytest.param(
            LEAVES["distributed"],
            Shape(4, 4, ("--use-distributed-optimizer",), (("bf16", True),)),
            "torch_dist",
            "can't be loaded with pipeline_model_parallel_size 2 to 4, since it was saved in the layout of its ranks",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            LEAVES["layer-wise"],
            Shape(2, 2, LEAVES["layer-wise"].extra, (("bf16", True),)),
            "torch_dist",
            "a layer-wise optimizer can't be loaded with data_parallel_size 2 to 1",
            marks=pytest.mark.slow,
        ),
        (Shape(4, 4), Shape(), "torch", "can't be loaded with pipeline_model_parallel_size 4 to 2"),
        pytest.param(Shape(), Shape(4, 4), "torch", "can't be loaded, for the reason", marks=pytest.mark.slow),
    ],
    ids=["distributed", "layer-wise", "fewer parts", "more parts"],
)
def test_a_layout_that_megatron_cant_load_ends_in_a_sentence(
    before: Shape, after: Shape, kind: str, says: str, tmp_path: Path
) -> None:
    interrupted(before, tmp_path, 3, kind)
    done = after.train(*loading(tmp_path, kind), check=False)
    assert all(rank.exit_code for rank in done.ranks)
    assert says in "".join(rank.stderr for rank in done.ranks)


def test_a_format_that_would_corrupt_the_state_is_refused(tmp_path: Path) -> None:
    small = ("--overlap-grad-reduce", "--ddp-bucket-size", "3000")
    run = Shape(2, 4, ("--use-distributed-optimizer", *small), (("data_parallel", 2), ("hidden", 36)))
    save = (*saving(tmp_path), "--dist-ckpt-optim-fully-reshardable")
    done = run.train(*save, check=False)
    assert [rank.exit_code for rank in done.ranks] == [2] * 4
    assert "--dist-ckpt-optim-fully-reshardable would corrupt the optimizer state" in done.ranks[0].stderr
    assert not list(tmp_path.iterdir())
