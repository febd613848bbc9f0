"""12 iterations are 6, a checkpoint, and 6 more in new processes: the same bits, whatever the run is made of."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import rows
from tests.resumes import (
    SAVED_AT,
    Shape,
    assert_continued,
    assert_starts_on_stale,
    control,
    interrupted,
    loading,
    saving,
)
from tests.test_topologies import TOPOLOGIES

OPTIMIZERS = {"adam": (), "muon": rows.MUON, "sgd": ("--optimizer", "sgd")}
# Every pair of an optimizer, a topology, a precision and a format that Megatron can train is in one of these.
IN_CI = """
    adam | pp2                                        | fp32 | torch_dist
    sgd  | pp2                                        | bf16 | torch
    muon | pp2                                        | fp32 | torch_dist
    muon | tied pp2                                   | bf16 | torch
    adam | tied dp2 pp2 distributed                   | fp32 | torch_dist
    muon | dp2 pp2 distributed                        | bf16 | torch_dist
"""
ELSEWHERE = """
    adam | pp4                                        | bf16 | torch
    muon | pp4                                        | fp32 | torch_dist
    sgd  | pp4                                        | fp32 | torch_dist
    muon | tp2 pp2                                    | fp32 | torch
    adam | tp2 pp2                                    | bf16 | torch_dist
    sgd  | tp2 pp2                                    | bf16 | torch_dist
    muon | dp2 pp2                                    | bf16 | torch_dist
    adam | dp2 pp2                                    | fp32 | torch
    sgd  | dp2 pp2                                    | bf16 | torch
    adam | dp2 pp2 overlap-grad-reduce                | fp32 | torch_dist
    muon | dp2 pp2 overlap-grad-reduce                | bf16 | torch
    sgd  | dp2 pp2 overlap-grad-reduce                | fp32 | torch
    adam | dp2 pp2 distributed                        | fp32 | torch_dist
    muon | dp2 pp2 distributed                        | bf16 | torch
    adam | dp2 pp2 distributed overlap-grad-reduce    | fp32 | torch_dist
    muon | dp2 pp2 distributed overlap-grad-reduce    | bf16 | torch
    adam | dp2 pp2 distributed overlap-param-gather   | fp32 | torch_dist
    adam | tp2 pp2 sequence parallel                  | fp32 | torch_dist
    muon | tp2 pp2 sequence parallel                  | bf16 | torch
    sgd  | tp2 pp2 sequence parallel                  | bf16 | torch_dist
    adam | 30 layers on 4 stages                      | fp32 | torch_dist
    muon | 30 layers on 4 stages                      | bf16 | torch
    sgd  | 30 layers on 4 stages                      | fp32 | torch
    adam | tied pp2                                   | fp32 | torch_dist
    sgd  | tied pp2                                   | fp32 | torch_dist
    muon | tied dp2 pp2 distributed                   | bf16 | torch
    adam | recompute full                             | fp32 | torch_dist
    muon | recompute full                             | bf16 | torch
    sgd  | recompute full                             | fp32 | torch
    adam | recompute selective                        | fp32 | torch_dist
    muon | recompute selective                        | bf16 | torch
    sgd  | recompute selective                        | fp32 | torch_dist
    adam | dp2 pp2 distributed overlap-param-gather   | bf16 | torch
"""


def combinations(text: str) -> list[tuple[str, ...]]:
    return [tuple(field.strip() for field in line.split("|")) for line in text.strip().splitlines()]


def shape(optimizer: str, topology: str, precision: str) -> Shape:
    row = TOPOLOGIES[topology]
    options = {**row.flags, "bf16": precision == "bf16"}
    extra = (*row.extra, *row.plugin_only, *OPTIMIZERS[optimizer])
    return Shape(row.stages, row.world, extra, tuple(options.items()))


def check(optimizer: str, topology: str, precision: str, kind: str, folder: Path) -> None:
    run = shape(optimizer, topology, precision)
    first = interrupted(run, folder, SAVED_AT, kind)
    second = run.train(*loading(folder, kind))
    assert_starts_on_stale(second, SAVED_AT, range(4))
    assert_continued(control(run), second, SAVED_AT, first)
    assert second.merged("final")  # raises if tied weights, or replicas, differ
    assert "stale weights are restored: W(6) = V(5)" in second.ranks[0].stdout
    assert "previous update of each weight: restored" in second.ranks[0].stdout


@pytest.mark.parametrize(("optimizer", "topology", "precision", "kind"), combinations(IN_CI))
def test_a_continued_run_is_the_uninterrupted_one(
    optimizer: str, topology: str, precision: str, kind: str, tmp_path: Path
) -> None:
    check(optimizer, topology, precision, kind, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "topology", "precision", "kind"), combinations(ELSEWHERE))
def test_a_continued_run_is_the_uninterrupted_one_too(
    optimizer: str, topology: str, precision: str, kind: str, tmp_path: Path
) -> None:
    check(optimizer, topology, precision, kind, tmp_path)


def can_train(optimizer: str, topology: str, precision: str) -> bool:
    """Whether Megatron trains it, and the plugin doesn't refuse it."""
    if "distributed" not in topology:
        return True
    if optimizer == "sgd" or (optimizer == "muon" and precision == "fp32"):
        return False
    return optimizer == "adam" or "overlap-param-gather" not in topology


def test_the_list_has_every_pair() -> None:
    base = [name for name in TOPOLOGIES if "bf16" not in name]
    listed = combinations(IN_CI + ELSEWHERE.lstrip("\n"))
    assert len(listed) == len(set(listed)) >= 24
    every = [
        combination
        for combination in itertools.product(OPTIMIZERS, base, ("fp32", "bf16"), ("torch_dist", "torch"))
        if can_train(*combination[:3])
    ]

    def pairs(combination: tuple[str, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(combination), 2))

    missing = set().union(*map(pairs, every)) - set().union(*map(pairs, listed))
    assert not missing


LEAVES = {
    "fp32": Shape(),
    "float16": Shape(options=(("bf16", True),)),
    "distributed": shape("adam", "dp2 pp2 distributed", "bf16"),
    "layer-wise": shape("muon", "dp2 pp2 distributed", "bf16"),
}


@pytest.mark.parametrize("name", ["fp32", pytest.param("distributed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", ["forget_the_stale_weights", "take_the_newest_for_stale", "forget_the_correction"])
def test_what_is_not_restored_is_seen(name: str, fault: str, tmp_path: Path) -> None:
    run = LEAVES[name]
    first = interrupted(run, tmp_path)
    wrong = run.train(*loading(tmp_path), hook=f"tests.resume_faults:{fault}")
    with pytest.raises(AssertionError, match="differ"):
        assert_continued(control(run), wrong, SAVED_AT, first)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float16", "layer-wise"])
def test_a_correction_that_is_not_restored_is_seen(name: str, tmp_path: Path) -> None:
    run = LEAVES[name]
    interrupted(run, tmp_path)
    wrong = run.train(*loading(tmp_path), hook="tests.resume_faults:forget_the_correction")
    with pytest.raises(AssertionError, match="differ"):
        assert_continued(control(run), wrong, SAVED_AT)


@pytest.mark.slow
def test_the_fully_reshardable_format(tmp_path: Path) -> None:
    run = LEAVES["distributed"]
    reshardable = ("--dist-ckpt-optim-fully-reshardable",)
    first = interrupted(run, tmp_path, SAVED_AT, "torch_dist", *reshardable)
    assert_continued(control(run), run.train(*loading(tmp_path), *reshardable), SAVED_AT, first)
    wrong = run.train(*loading(tmp_path), *reshardable, hook="tests.resume_faults:forget_the_correction")
    with pytest.raises(AssertionError, match="differ"):
        assert_continued(control(run), wrong, SAVED_AT)


KEPT_IN_BF16 = ("--asyncpp-error-feedback-dtype", "bf16")
CORRECTIONS = {
    "kept in bf16": (LEAVES["fp32"], KEPT_IN_BF16),
    "kept in bf16, distributed": (LEAVES["distributed"], KEPT_IN_BF16),
    "on the gradient": (LEAVES["float16"], ("--asyncpp-error-feedback-on", "gradient")),
    "delay compensation": (replace(LEAVES["fp32"], lam=None), ("--asyncpp-delay-compensation", "0.5")),
}


@pytest.mark.parametrize("kind", ["torch_dist", pytest.param("torch", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [name if name == "kept in bf16" else pytest.param(name, marks=pytest.mark.slow) for name in CORRECTIONS],
)
def test_every_correction_goes_on(name: str, kind: str, tmp_path: Path) -> None:
    plain, flags = CORRECTIONS[name]
    run = replace(plain, extra=(*plain.extra, *flags))
    first = interrupted(run, tmp_path, SAVED_AT, kind)
    second = run.train(*loading(tmp_path, kind))
    assert_continued(control(run), second, SAVED_AT, first)
    assert re.search(r"(previous|last) \w+ of each weight: restored", second.ranks[0].stdout)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_20_iterations_are_10_and_10(stages: int, tmp_path: Path) -> None:
    """Losses jump after a resume (case 11)."""
    dropout = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
    run = Shape(stages, stages, dropout, (("iterations", 20),))
    first = interrupted(run, tmp_path, 10)
    assert_continued(control(run), run.train(*loading(tmp_path)), 10, first)


def test_saving_in_the_background(tmp_path: Path) -> None:
    run = LEAVES["fp32"]
    background = ("--async-save", "--async-strategy", "mcore")
    saver = run.train(*saving(tmp_path, 5), *background)  # and goes on while the file is written
    assert_continued(control(run), saver, 0)
    assert_continued(control(run), run.train(*loading(tmp_path, step=5)), 5)
