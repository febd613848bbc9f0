"""2BW + Error Feedback on topologies against the oracle: one process, no pipeline, no replicas, no shards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from tests import rows
from tests.harness.flags import VOCABULARY, tiny_flags
from tests.harness.reference import Reference
from tests.harness.results import Run, assert_bitwise, max_difference
from tests.harness.run import run
from tests.test_topologies import CLIP, TOPOLOGIES

MICROBATCHES = 4  # of each replica


@dataclass(frozen=True)
class Tolerance:
    """Largest relative difference of a loss and of a gradient norm, and absolute difference of a weight."""

    loss: float
    norm: float
    weight: float


# Two partial products are added in place of one longer sum, in every layer. Where a gradient is near zero, Adam turns
# its last bits into a good part of a step (which is 5e-3).
PRODUCT_ORDER = Tolerance(loss=2e-6, norm=2e-4, weight=5e-4)

EXACT = ("tied pp2", "dp2 pp2", "dp2 pp2 distributed", "tied dp2 pp2 distributed", "30 layers on 4 stages")
CLOSE = ("tp2 pp2", "tp2 pp2 sequence parallel")


@cache
def plugin(name: str) -> Run:
    row = TOPOLOGIES[name]
    extra = (*row.extra, *rows.TWO_BW, *rows.feedback_flags(1.0))
    return run(tiny_flags(row.stages, MICROBATCHES, clip=CLIP, extra=extra, **row.flags), row.world, timeout=180)


@cache
def oracle(name: str, **changed: Any) -> Run:
    """The same from the same weights; what is changed are fields of the Reference."""
    row, done = TOPOLOGIES[name], plugin(name)
    replicas, tied = row.flags.get("data_parallel", 1), row.flags.get("tied", False)
    reference = Reference(delay=1, error_feedback=1.0, replicas=replicas, tied_apart=tied)
    # Megatron pads the vocabulary to a multiple of this for each tensor-parallel rank.
    padding = ("--make-vocab-size-divisible-by", str(VOCABULARY * row.flags.get("tensor", 1)))
    flags = tiny_flags(
        1, MICROBATCHES * replicas, clip=CLIP, layers=row.flags.get("layers", 4), tied=tied, extra=padding
    )
    return run(
        flags, mode="oracle", reference=replace(reference, **changed), initial=done.merged("initial"), timeout=180
    )


def assert_close(left: Run, right: Run, tolerance: Tolerance) -> None:
    assert left.losses == pytest.approx(right.losses, rel=tolerance.loss)
    assert left.grad_norms == pytest.approx(right.grad_norms, rel=tolerance.norm)
    weights, others = left.merged("final"), right.merged("final")
    assert weights.keys() == others.keys()
    differences = {name: max_difference(weights[name], others[name]) for name in weights}
    worst = max(differences, key=lambda name: differences[name])
    assert differences[worst] <= tolerance.weight, f"{worst} differs by {differences[worst]:.3e}"


def assert_clipped(reference: Run) -> None:
    assert sum(norm > CLIP for norm in reference.grad_norms) > rows.ITERATIONS // 2, "clipping wasn't active"


@pytest.mark.parametrize("name", EXACT)
def test_a_topology_is_the_recursion(name: str) -> None:
    done, reference = plugin(name), oracle(name)
    rows.assert_delayed(done, MICROBATCHES)
    assert_clipped(reference)
    assert_bitwise(done, reference)
    assert done.grad_norms == reference.grad_norms


@pytest.mark.parametrize("name", CLOSE)
def test_tensor_parallelism_is_the_recursion_but_for_the_order_of_sums(name: str) -> None:
    done, reference = plugin(name), oracle(name)
    rows.assert_delayed(done, MICROBATCHES)
    assert_clipped(reference)
    assert_close(done, reference, PRODUCT_ORDER)


@pytest.mark.parametrize(
    ("name", "changed"),
    [("tied pp2", {"tied_apart": False}), ("dp2 pp2", {"replicas": 1})],
    ids=["tied", "replicas"],
)
def test_another_order_of_sums_is_seen(name: str, changed: dict[str, Any]) -> None:
    """The oracle has the same order as Megatron, not only the same sums."""
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise(plugin(name), oracle(name, **changed))
    assert_close(plugin(name), oracle(name, **changed), PRODUCT_ORDER)


@pytest.mark.parametrize("changed", [{"delay": 0}, {"error_feedback": 0.9}], ids=["delay", "lambda"])
def test_the_tolerance_sees_another_recursion(changed: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        assert_close(plugin("tp2 pp2"), oracle("tp2 pp2", **changed), PRODUCT_ORDER)
