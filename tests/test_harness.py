"""The harness proves itself: plain Megatron, the fixture and the oracle agree bit for bit, and each check can fail."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.harness import faults
from tests.harness.flags import tiny_flags
from tests.harness.reference import Reference
from tests.harness.results import Run, assert_bitwise
from tests.harness.run import Mode, RankError, run

SYNCHRONOUS = Reference()
DELAY = Reference(delay=1)
FEEDBACK = Reference(delay=1, error_feedback=1.0)
ROOT = Path(__file__).resolve().parents[1]
ITERATIONS = 8
CLIP = 0.5  # below every norm of the tiny model: active in each iteration


@cache
def trained(mode: Mode, pipeline: int, reference: Reference = SYNCHRONOUS, clip: float = 0.0) -> Run:
    return run(tiny_flags(pipeline, iterations=ITERATIONS, clip=clip), pipeline, mode, reference=reference)


def oracle(run_: Run, reference: Reference, clip: float = 0.0) -> Run:
    """The oracle from the initial weights of another run, its norm summed stage by stage as there."""
    reference = Reference(**{**vars(reference), "norm_partition": run_.partition})
    flags = tiny_flags(iterations=ITERATIONS, clip=clip)
    return run(flags, 1, "oracle", reference=reference, initial=run_.merged("initial"))


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("clip", [0.0, CLIP])
def test_oracle_without_delay_is_megatron(pipeline: int, clip: float) -> None:
    megatron = trained("megatron", pipeline, clip=clip)
    reference = oracle(megatron, SYNCHRONOUS, clip)
    assert_bitwise(megatron, reference)
    assert megatron.grad_norms == reference.grad_norms
    assert min(megatron.grad_norms) > CLIP
    assert megatron.learning_rates == reference.learning_rates
    assert len(set(megatron.learning_rates)) == ITERATIONS  # warm-up and decay were really passed through


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("reference", [DELAY, FEEDBACK], ids=["delay", "error-feedback"])
def test_fixture_is_the_oracle(pipeline: int, reference: Reference) -> None:
    fixture = trained("fixture", pipeline, reference)
    assert_bitwise(fixture, oracle(fixture, reference))


def test_fixture_is_the_oracle_with_synchronous_parts_and_clipping() -> None:
    reference = Reference(delay=1, error_feedback=0.5, sync_start=2, sync_cooldown=2)
    fixture = trained("fixture", 2, reference, CLIP)
    assert_bitwise(fixture, oracle(fixture, reference, CLIP))


def test_fixture_without_delay_is_megatron_in_bf16() -> None:
    flags = tiny_flags(2, iterations=ITERATIONS, bf16=True)
    megatron, fixture = run(flags, 2, "megatron"), run(flags, 2, "fixture")
    assert megatron.ranks[0].masters.keys() == megatron.ranks[0].final.keys()
    assert_bitwise(megatron, fixture)


def test_wrong_delay_fails_in_losses_and_in_weights() -> None:
    fixture, synchronous = trained("fixture", 2, DELAY), trained("megatron", 2)
    assert fixture.losses[:2] != synchronous.losses[:2]  # batch 1 runs on V(0), not V(1)
    assert fixture.losses[0] == synchronous.losses[0]
    with pytest.raises(AssertionError, match="losses differ first at iteration 1"):
        assert_bitwise(fixture, synchronous)
    fixture = Run([*fixture.ranks], 0.0)
    fixture.ranks[1] = type(fixture.ranks[1])(**{**vars(fixture.ranks[1]), "losses": synchronous.losses})
    with pytest.raises(AssertionError, match=r"final weights: \d+ of \d+ tensors differ; first .*embedding.* by"):
        assert_bitwise(fixture, synchronous)


def test_lam_zero_is_plain_delay_and_lam_one_is_not() -> None:
    plain = trained("fixture", 1, DELAY)
    assert_bitwise(plain, trained("fixture", 1, Reference(delay=1, error_feedback=0.0)))
    with pytest.raises(AssertionError, match="iteration 2"):  # V(1) is corrected already, batch 2 sees it first
        assert_bitwise(plain, trained("fixture", 1, FEEDBACK))


def test_a_failing_rank_is_readable_and_ends_the_run() -> None:
    with pytest.raises(RankError, match="ZeroDivisionError: planted") as error:
        run(tiny_flags(2), 2, "megatron", hooks=faults.fail_on_rank_1, timeout=100)
    assert error.value.run.seconds < 60  # rank 0 would wait for rank 1 for good
    assert [rank.exit_code for rank in error.value.run.ranks] == [-9, 1]
    assert "rank 0, killed while running, stderr" in str(error.value)


def test_a_hanging_rank_shows_its_stack_and_is_gone() -> None:
    readable = re.compile("no end after 6 s.*in hang_on_rank_1", re.DOTALL)
    with pytest.raises(RankError, match=readable) as error:
        run(tiny_flags(2), 2, "megatron", hooks="tests.harness.faults:hang_on_rank_1", timeout=6)
    assert error.value.run.seconds < 30
    assert [rank.exit_code for rank in error.value.run.ranks] == [-9, -9]


def test_the_exit_code_of_a_rank_can_be_asked_for() -> None:
    refused = run([*tiny_flags(), "--no-such-flag"], 1, "megatron", check=False)
    assert refused.ranks[0].exit_code == 2
    assert "--no-such-flag" in refused.ranks[0].stderr


def source(module: str) -> Path | None:
    """The file of a module of these tests; nothing is imported to find it."""
    path = ROOT.joinpath(*module.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in candidates if module.startswith("tests") and file.exists()), None)


def imported(module: str, seen: set[str]) -> set[str]:
    """All names that a module imports anywhere in its text, also through other modules of these tests."""
    if module in seen:
        return seen
    seen.add(module)
    if (file := source(module)) is None:
        return seen
    if "." in module:
        imported(module.rpartition(".")[0], seen)  # its package's __init__ runs first
    for node in ast.walk(ast.parse(file.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names = [f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = [ast.unparse(argument).strip("'") for argument in node.args]
        for name in names:
            imported(name, seen)
    return seen


@pytest.mark.parametrize("module", ["oracle", "entry", "fixture"])
def test_the_references_import_nothing_of_the_plugin(module: str) -> None:
    names = imported(f"tests.harness.{module}", set())
    assert not [name for name in names if "megatron_asyncpp" in name]
    assert "tests.harness.reference" in names or module == "entry"


def test_the_import_check_can_fail() -> None:
    assert any("megatron_asyncpp" in name for name in imported("tests.harness.rank", set()))
