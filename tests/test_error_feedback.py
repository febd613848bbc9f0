"""Error Feedback against its closed form: V(k) = Y(k) + lam * (Y(k) - Y(k-1)), Y being the optimizer's own sequence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon

from megatron_asyncpp.optim.error_feedback import ErrorFeedback

OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9),
    "muon": lambda p: Muon(p, lr=1e-2, momentum=0.9, weight_decay=0.0),
}
STEPS = 8


def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 6, generator=generator).to(dtype) for _ in range(STEPS)]


def start(dtype: torch.dtype) -> torch.Tensor:
    return torch.nn.Parameter(torch.linspace(-3, 3, 24, dtype=dtype).view(4, 6))


def train(name: str, lam: float | None, dtype: torch.dtype) -> list[torch.Tensor]:
    """All V(k) for gradients that don't depend on the weights."""
    x = start(dtype)
    optimizer = OPTIMIZERS[name]([x])
    if lam is not None:
        ErrorFeedback(optimizer, lam)
    versions = [x.detach().clone()]
    for gradient in gradients(dtype):
        x.grad = gradient.clone()
        optimizer.step()
        versions.append(x.detach().clone())
    return versions


@pytest.mark.parametrize("lam", [0.5, 1.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_closed_form(name: str, lam: float) -> None:
    # Without weight decay an update depends on the gradients alone, so the plain sequence gives the whole answer.
    # Each of 8 steps rounds a few times at |x| = 3 to 6, where half an ulp is 4e-16 in fp64 and 2e-7 in fp32, the only
    # precision in which Muon iterates.
    dtype, atol = (torch.float32, 2e-6) if name == "muon" else (torch.float64, 2e-14)
    plain, corrected = train(name, None, dtype), train(name, lam, dtype)
    for k in range(1, STEPS + 1):
        expected = plain[k] + lam * (plain[k] - plain[k - 1])
        assert torch.allclose(corrected[k], expected, rtol=0, atol=atol), f"V({k})"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_lambda_zero_changes_no_bit(name: str) -> None:
    assert all(map(torch.equal, train(name, None, torch.float32), train(name, 0.0, torch.float32)))


def test_decoupled_weight_decay_is_part_of_the_update() -> None:
    x = start(torch.float64)
    optimizer = torch.optim.AdamW([x], lr=1e-2, weight_decay=0.5)
    ErrorFeedback(optimizer, 1.0)
    x.grad = torch.zeros_like(x)  # decay alone moves x: u_0 = lr * decay * V(0), doubled by the first correction
    before = x.detach().clone()
    optimizer.step()
    assert torch.allclose(x.detach(), before * (1 - 2 * 1e-2 * 0.5), rtol=1e-15, atol=0)


def test_the_last_update_is_in_the_state_dict_and_restored() -> None:
    reference = train("adamw", 1.0, torch.float32)
    x = start(torch.float32)
    optimizer = OPTIMIZERS["adamw"]([x])
    ErrorFeedback(optimizer, 1.0)
    for k, gradient in enumerate(gradients(torch.float32)):
        if k == STEPS // 2:
            saved = optimizer.state_dict()
            x = torch.nn.Parameter(x.detach().clone())
            optimizer = OPTIMIZERS["adamw"]([x])
            ErrorFeedback(optimizer, 1.0)
            optimizer.load_state_dict(saved)
            assert torch.equal(optimizer.state[x][ErrorFeedback.STATE_KEY], saved["state"][0][ErrorFeedback.STATE_KEY])
        x.grad = gradient.clone()
        optimizer.step()
    assert torch.equal(x.detach(), reference[-1])


def test_a_parameter_without_gradient_stays() -> None:
    x, idle = start(torch.float32), start(torch.float32)
    optimizer = torch.optim.AdamW([x, idle], lr=1e-2)
    ErrorFeedback(optimizer, 1.0)
    x.grad = torch.ones_like(x)
    optimizer.step()
    assert torch.equal(idle, start(torch.float32))
    assert idle not in optimizer.state


def test_a_step_inside_a_step_is_one_update() -> None:
    class Nested(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            if not getattr(self, "inside", False):
                self.inside = True
                self.step()
                self.inside = False
            super().step()

    x, plain = start(torch.float64), start(torch.float64)
    nested, reference = Nested([x], lr=0.1), torch.optim.SGD([plain], lr=0.2)
    ErrorFeedback(nested, 1.0)
    ErrorFeedback(reference, 1.0)
    for gradient in gradients(torch.float64):
        x.grad, plain.grad = gradient.clone(), gradient.clone()
        nested.step()
        reference.step()
    assert torch.allclose(x, plain, rtol=0, atol=2e-14)


def test_detached_it_does_nothing() -> None:
    x = start(torch.float32)
    optimizer = OPTIMIZERS["sgd"]([x])
    ErrorFeedback(optimizer, 1.0).detach()
    x.grad = torch.ones_like(x)
    optimizer.step()
    assert ErrorFeedback.STATE_KEY not in optimizer.state[x]
