"""2BW in Megatron's real loop against two independent references, bitwise: every loss, and all final weights."""

from __future__ import annotations

import pytest

from tests import rows
from tests.harness.flags import tiny_flags
from tests.harness.results import Run, assert_bitwise
from tests.harness.run import run

SHAPES = [(1, 2), (1, 4), (2, 2), (2, 4), (4, 4), (4, 8)]


@pytest.mark.parametrize("lam", [None, 1.0])
@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_adamw_is_the_recursion(stages: int, microbatches: int, lam: float | None) -> None:
    # P = 1 and P = 2 with the same M are compared with the same run of the oracle, so they equal each other.
    done = rows.plugin(stages, microbatches, lam)
    rows.assert_delayed(done, microbatches)
    assert_bitwise(done, rows.oracle(microbatches, lam))


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 2), (2, 2), (4, 4)])
def test_clipping_is_by_the_norm_of_the_whole_model(stages: int, microbatches: int) -> None:
    done = rows.plugin(stages, microbatches, 1.0, rows.CLIP)
    rows.assert_delayed(done, microbatches)
    reference = rows.oracle(microbatches, 1.0, rows.CLIP)
    assert sum(norm > rows.CLIP for norm in reference.grad_norms) > rows.ITERATIONS // 2, "clipping wasn't active"
    # Their squares are summed in fp64: the order of stages doesn't show in an fp32 factor.
    assert done.grad_norms == reference.grad_norms
    assert_bitwise(done, reference)
    assert_bitwise(done, rows.fixture(stages, microbatches, 1.0, rows.CLIP))


@pytest.mark.parametrize("lam", [None, 1.0])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 4)])
def test_muon_is_the_flushed_loop_on_older_weights(stages: int, microbatches: int, lam: float | None) -> None:
    done = rows.plugin(stages, microbatches, lam, extra=rows.MUON)
    rows.assert_delayed(done, microbatches)
    assert "TensorParallelMuon" in done.ranks[0].stdout, "another optimizer ran"
    assert_bitwise(done, rows.fixture(stages, microbatches, lam, extra=rows.MUON))


@pytest.mark.parametrize("extra", [(), rows.MUON, ("--optimizer", "sgd")], ids=["adam", "muon", "sgd"])
def test_bf16_is_the_flushed_loop_on_older_weights(extra: tuple[str, ...]) -> None:
    done = rows.plugin(2, 4, 1.0, rows.CLIP, extra=extra, bf16=True)
    rows.assert_delayed(done, 4)
    assert all(rank.masters for rank in done.ranks), "no fp32 masters"
    assert_bitwise(done, rows.fixture(2, 4, 1.0, rows.CLIP, extra=extra, bf16=True))


def test_lambda_zero_is_plain_delay() -> None:
    rows.assert_delayed(rows.plugin(2, 4, 0.0), 4)
    assert_bitwise(rows.plugin(2, 4, 0.0), rows.plugin(2, 4, None))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("extra", [(), ("--asyncpp-schedule", "1f1b")], ids=["no flag", "1f1b"])
def test_without_a_delay_it_is_megatron(extra: tuple[str, ...], stages: int) -> None:
    def train(mode: str, *more: str) -> Run:
        return run(tiny_flags(stages, 4, clip=rows.CLIP, extra=more), stages, mode, initial=rows.initial())

    plain, done = train("megatron"), train("plugin", *extra)
    assert_bitwise(plain, done)
    assert plain.grad_norms == done.grad_norms
    assert bool(done.ranks[0].actions) == bool(extra), "a plan runs only if a schedule was asked for"


def test_the_comparison_sees_a_wrong_version() -> None:
    # The same run without the delay of the backward's weights: losses move by 1e-4, weights by much more.
    flags = tiny_flags(2, 4, extra=rows.TWO_BW)
    wrong = run(flags, 2, "plugin", initial=rows.initial(), hooks="tests.faults:backward_on_the_newest")
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise(wrong, rows.oracle(4))


def test_the_comparison_sees_a_synchronous_run() -> None:
    flags = tiny_flags(2, 4, extra=("--asyncpp-schedule", "1f1b"))
    synchronous = run(flags, 2, "plugin", initial=rows.initial())
    with pytest.raises(AssertionError, match="ran on other versions"):
        rows.assert_delayed(synchronous, 4)
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise(synchronous, rows.oracle(4))
