"""The ring of weight versions, and the check that a backward uses the weights of its forward (CASES 14 and 22)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from megatron_asyncpp.runtime.check import VersionCheck
from megatron_asyncpp.runtime.weights import WeightRing


class SavesParameter(torch.autograd.Function):
    """Like Megatron's linear layers: saves the parameter itself, and reads whatever it shows at backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


OPERATIONS = {"saved parameter": SavesParameter.apply, "saved view": functional.linear}


def make(versions: int = 2, steppable: bool = True) -> tuple[torch.nn.Parameter, WeightRing]:
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    return weight, WeightRing([weight], [weight] if steppable else [], versions, newest=0)


def step(weight: torch.nn.Parameter, ring: WeightRing) -> None:
    with ring.advance():
        weight.mul_(2).add_(1)


def test_versions_stay_as_they_were_written() -> None:
    weight, ring = make()
    values = [weight.detach().clone()]
    for k in range(1, 6):
        step(weight, ring)
        values.append(values[-1] * 2 + 1)
        assert ring.newest == ring.lent == k
        assert torch.equal(weight, values[k])
        ring.lend(k - 1)
        assert torch.equal(weight, values[k - 1])
    with pytest.raises(RuntimeError, match=r"V\(3\) were asked for, but the ring holds \[4, 5\]"):
        ring.lend(3)


def test_a_step_starts_from_the_newest_whatever_was_lent() -> None:
    weight, ring = make()
    step(weight, ring)
    ring.lend(0)
    step(weight, ring)
    assert torch.equal(weight, torch.arange(6.0).view(2, 3) * 4 + 3)


def test_masters_elsewhere_need_no_copy() -> None:
    weight, ring = make(steppable=False)
    with ring.advance():
        weight.fill_(7)
    ring.lend(0)
    assert torch.equal(weight, torch.arange(6.0).view(2, 3))


def test_buffers_that_are_weights_have_versions_and_start_from_the_newest() -> None:
    weight, bias = torch.nn.Parameter(torch.ones(3)), torch.zeros(2)
    ring = WeightRing([weight], [], 2, newest=0, buffers=[bias])
    assert not ring.steps_in_place, "no optimizer steps them"
    assert ring.extra_bytes == 4 * (3 + 2)
    counter = bias._version
    for k in range(1, 5):
        with ring.advance():
            weight.fill_(k)
            bias.add_(k)
        assert bias.tolist() == [k * (k + 1) / 2] * 2
        ring.lend(k - 1)
        assert bias.tolist() == [k * (k - 1) / 2] * 2
    assert bias._version == counter, "autograd would take it for an overwritten weight"
    ring.repeat()
    assert (ring.newest, bias.tolist()) == (5, [10.0, 10.0])
    assert ring.find(bias) == (bias, 5)


def test_frozen_parameters_have_one_version() -> None:
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    ring = WeightRing([frozen], [], 2, newest=0)
    with ring.advance():
        pass
    assert ring.extra_bytes == 0
    assert ring.find(frozen) is None


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_a_step_between_forward_and_backward_changes_no_gradient(operation: Any) -> None:
    weight, ring = make()
    x = torch.ones(1, 3, requires_grad=True)
    expected = torch.ones(1, 2) @ weight.detach()
    out = operation(x, weight)
    step(weight, ring)
    ring.lend(0)
    out.sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_one_live_buffer_gives_a_wrong_gradient_and_the_check_sees_it(operation: Any) -> None:
    for check in (False, True):
        weight, ring = make(versions=1)
        watch = VersionCheck(ring, {weight: "weight"}).watch() if check else torch.autograd.grad_mode.enable_grad()
        x = torch.ones(1, 3, requires_grad=True)
        expected = torch.ones(1, 2) @ weight.detach()
        with watch:
            out = operation(x, weight)
        step(weight, ring)
        if check:
            with pytest.raises(RuntimeError, match=r"the weight weight of V\(1\), but its forward ran on V\(0\)"):
                out.sum().backward()
        else:
            out.sum().backward()  # no error
            assert not torch.equal(x.grad, expected)


def test_a_backward_without_the_switch_back_is_seen() -> None:
    weight, ring = make()
    x = torch.ones(1, 3, requires_grad=True)
    with VersionCheck(ring, {weight: "weight"}).watch():
        out = SavesParameter.apply(x, weight)
    step(weight, ring)  # and no lend(0)
    with pytest.raises(RuntimeError, match=r"uses the weight weight of V\(1\), but its forward ran on V\(0\)"):
        out.sum().backward()


def test_an_overwritten_buffer_is_seen_through_a_saved_view() -> None:
    weight, ring = make()
    x = torch.ones(1, 3, requires_grad=True)
    with VersionCheck(ring, {weight: "weight"}).watch():
        out = functional.linear(x, weight)
    step(weight, ring)
    step(weight, ring)  # V(2) is where V(0) was
    with pytest.raises(RuntimeError, match=r"a view of the weight weight of V\(2\), but its forward ran on V\(0\)"):
        out.sum().backward()


def test_an_alias_that_a_module_keeps_is_seen() -> None:
    weight, ring = make()
    alias = weight.data
    step(weight, ring)
    x = torch.ones(1, 3, requires_grad=True)
    with (
        VersionCheck(ring, {weight: "weight"}).watch(),
        pytest.raises(RuntimeError, match=r"a forward on V\(1\) uses weight of V\(0\): a module keeps an alias"),
    ):
        functional.linear(x, alias)
