"""A step in parts: the same bits as in one piece, where the optimizer allows it; and little memory for a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

from megatron_asyncpp.optim import correction, streaming
from megatron_asyncpp.optim.correction import Correction
from megatron_asyncpp.optim.delay_compensation import DelayCompensation
from megatron_asyncpp.optim.error_feedback import ErrorFeedback, GradientErrorFeedback
from scripts.bench.live_bytes import KEPT, LiveBytes
from tests.test_corrections import FusedAdamDouble

STEPS = 6
SHAPES = [(4, 6), (8, 3), (5, 5), (2, 7), (9, 9)]  # 24, 24, 25, 14 and 81 elements, of which the last has no gradient
PARTS = {1: [24, 24, 25, 14, 81], 50: [48, 39, 81], 10**6: [168]}  # part -> elements of each part, if all have one

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adamw, amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True),
    "muon": lambda p: Muon(p, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "megatron's muon": lambda p: TensorParallelMuon(p, lr=1e-2, momentum=0.9, weight_decay=0.1, tp_mode="duplicated"),
}
CORRECTIONS: dict[str, Callable[[torch.optim.Optimizer], Correction]] = {
    "update": lambda inner: ErrorFeedback(inner, 0.5),
    "update bf16": lambda inner: ErrorFeedback(inner, 0.5, torch.bfloat16),
    "gradient": lambda inner: GradientErrorFeedback(inner, 0.5),
    "gradient bf16": lambda inner: GradientErrorFeedback(inner, 0.5, torch.bfloat16),
    "dc-asgd": lambda inner: DelayCompensation(inner, 5.0),
}


@contextmanager
def parts_of(elements: int | None) -> Iterator[None]:
    """Within the context corrections step their optimizers in parts of so many elements, or not in parts."""
    before = correction.stream
    streamed = partial(streaming.stream, part=elements or 0)
    correction.stream = streamed if elements is not None else lambda optimizer: lambda: None
    try:
        yield
    finally:
        correction.stream = before


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def train(
    make: Callable[..., torch.optim.Optimizer],
    correct: Callable[[torch.optim.Optimizer], Correction],
    elements: int | None,
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]], list[int]]:
    """Six steps, in two groups of other rates; the last parameter has a gradient in the second and the fourth only.

    Returns:
        The weights, all tensors of their state, and how many elements each call of the optimizer's own step stepped.
    """
    weights = parameters()
    with parts_of(elements):
        inner = make([{"params": weights[:2], "lr": 3e-2}, {"params": weights[2:]}])
        stepped: list[int] = []
        inner.register_step_pre_hook(lambda *_: stepped.append(sum(p.numel() for p in weights if p.grad is not None)))
        correct(inner)
    for k in range(STEPS):
        generator = torch.Generator().manual_seed(k)
        for p in weights:
            p.grad = torch.randn(p.shape, generator=generator)
        if k not in (1, 3):
            weights[-1].grad = None
        given = [p.grad for p in weights]
        inner.step()
        assert all(p.grad is gradient for p, gradient in zip(weights, given, strict=True))
    states = [[t for _, t in sorted(inner.state[p].items()) if isinstance(t, torch.Tensor)] for p in weights]
    return weights, states, stepped


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parts_change_no_bit(name: str, kind: str) -> None:
    make, correct = OPTIMIZERS[name], CORRECTIONS[kind]
    weights, states, at_once = train(make, correct, None)
    assert at_once == [87, 168, 87, 168, 87, 87]
    for elements, parts in PARTS.items():
        done, kept, stepped = train(make, correct, elements)
        without = [n for n in parts if n != 81] if elements < 10**6 else [87]
        assert stepped == [n for k in range(STEPS) for n in (parts if k in (1, 3) else without)]
        assert all(map(torch.equal, weights, done))
        for state, other in zip(states, kept, strict=True):
            assert len(state) == len(other) > 0
            assert all(map(torch.equal, state, other))


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_one_count_of_steps_for_a_group_is_left_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Transformer Engine's and Apex's FusedAdam have: each part would be taken for a step of all parameters."""
    weights, _, at_once = train(FusedAdamDouble, CORRECTIONS[kind], None)
    done, _, stepped = train(FusedAdamDouble, CORRECTIONS[kind], 1)
    assert stepped == at_once
    assert all(map(torch.equal, weights, done))
    monkeypatch.setattr(streaming, "_SEPARABLE", (FusedAdamDouble,))
    wrong, _, stepped = train(FusedAdamDouble, CORRECTIONS[kind], 1)
    assert len(stepped) > len(at_once)
    assert not torch.equal(wrong[0], weights[0])


def test_what_is_undone_is_as_before() -> None:
    for optimizer in (torch.optim.SGD(parameters()), FusedAdamDouble(parameters())):
        assert "step" not in vars(optimizer)
        undo = streaming.stream(optimizer, 1)
        assert ("step" in vars(optimizer)) == isinstance(optimizer, torch.optim.SGD)
        undo()
        assert "step" not in vars(optimizer)
        added = CORRECTIONS["update"](optimizer)
        added.detach()
        assert "step" not in vars(optimizer)
        assert not optimizer._optimizer_step_pre_hooks


# Memory

SIZE, COUNT = 1000, 16  # elements of each parameter, and how many there are


def most_in_a_step(
    make: Callable[..., torch.optim.Optimizer],
    correct: Callable[[torch.optim.Optimizer], Any],
    elements: int | None,
    count: int = COUNT,
) -> float:
    """The most bytes that a third step takes for a moment, in fp32 copies of one parameter."""
    weights = [torch.nn.Parameter(torch.ones(SIZE)) for _ in range(count)]
    with LiveBytes("outside") as live:
        with parts_of(elements):
            inner = make(weights)
            correct(inner)
        for _ in range(3):
            for p in weights:
                p.grad = torch.ones(SIZE)
            live.most.clear()
            with live.during("step"):
                before = live.live[KEPT]
                inner.step()
        return (live.most["step", KEPT] - before) / (4 * SIZE)


def sgd(p: Any) -> torch.optim.Optimizer:
    """Needs no memory of its own, nor does it keep any."""
    return torch.optim.SGD(p, lr=0.1, foreach=False)


# Copies of each parameter of a part: its weights before; with DC-ASGD its gradient too, on the gradient only that.
# Then of one parameter at a time: where the last update is kept in bf16 a difference in fp32; a new gradient to keep.
COPIES = {"update": (1, 0), "update bf16": (1, 1), "gradient": (1, 1), "gradient bf16": (1, 1), "dc-asgd": (2, 0)}


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_what_a_step_holds_for_a_moment_is_bounded_by_its_part(kind: str) -> None:
    all_of_a_part, one_more = COPIES[kind]
    for many in (1, 4):
        most = most_in_a_step(sgd, CORRECTIONS[kind], many * SIZE)
        assert all_of_a_part * many <= most <= all_of_a_part * many + one_more + 0.1
    assert most_in_a_step(sgd, CORRECTIONS[kind], None) >= all_of_a_part * COUNT
    # A parameter larger than a part is a part of its own.
    assert most_in_a_step(sgd, CORRECTIONS[kind], SIZE // 10, count=1) <= all_of_a_part + one_more + 0.1


def test_the_optimizers_own_temporaries_come_to_it() -> None:
    def adamw(p: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(p, lr=0.1, foreach=False)

    own = most_in_a_step(adamw, lambda inner: None, None)
    assert most_in_a_step(adamw, CORRECTIONS["update"], 4 * SIZE) <= own + 4.1
