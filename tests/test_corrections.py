"""Every correction for the delay against its recursion, written as a loop here; its state, and whole runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon

from megatron_asyncpp.optim.correction import Correction
from megatron_asyncpp.optim.delay_compensation import DelayCompensation
from megatron_asyncpp.optim.error_feedback import ErrorFeedback, GradientErrorFeedback
from tests import rows
from tests.harness.flags import tiny_flags
from tests.harness.reference import Reference
from tests.harness.results import Run, assert_bitwise, compare_weights
from tests.harness.run import run

STEPS = 12
RATE, DECAY, BETAS, EPS = 3e-2, 0.1, (0.9, 0.95), 1e-8
ATTACH: dict[str, Callable[..., Correction]] = {
    "update": ErrorFeedback,
    "gradient": GradientErrorFeedback,
    "dc-asgd": DelayCompensation,
}
# Of so many steps: which are synchronous.
PARTS = {"none": set(), "start": {0, 1, 2}, "start and cooldown": {0, 1, 2, 9, 10, 11}}


def start(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.nn.Parameter(torch.linspace(-3, 3, 24, dtype=dtype).view(4, 6))


def gradient(k: int, weights: torch.Tensor) -> torch.Tensor:
    """Of a function that isn't quadratic, and changes with the batch."""
    noise = torch.randn(4, 6, generator=torch.Generator().manual_seed(k)).to(weights.dtype)
    return torch.tanh(weights) + 0.3 * weights + 0.5 * noise


def version(k: int, synchronous: set[int]) -> int:
    """The j of W(k) = V(j)."""
    return k if k in synchronous or k == 0 or k - 1 in synchronous else k - 1


def train(
    attach: Callable[[torch.optim.Optimizer], Correction | None],
    synchronous: set[int] = PARTS["none"],
    dtype: torch.dtype = torch.float64,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    save_at: int | None = None,
) -> list[torch.Tensor]:
    """All V(k) of a delayed run; with `save_at` a new optimizer goes on from the old one's state before that step."""
    make = optimizer or (lambda p: torch.optim.AdamW(p, lr=RATE, weight_decay=DECAY, betas=BETAS, eps=EPS))
    x = start(dtype)
    inner = make([x])
    correction = attach(inner)
    versions = [x.detach().clone()]
    for k in range(STEPS):
        if k == save_at:
            saved = inner.state_dict()
            x = torch.nn.Parameter(x.detach().clone())
            inner = make([x])
            correction = attach(inner)
            inner.load_state_dict(saved)
        if correction is not None:
            correction.correcting = k not in synchronous
        x.grad = gradient(k, versions[version(k, synchronous)])
        inner.step()
        versions.append(x.detach().clone())
    return versions


def literal(kind: str, lam: float, synchronous: set[int], kept: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """The same by the formulas: AdamW and the correction written out, everything that ever was at hand."""
    versions = [start().detach()]
    mean = square = torch.zeros_like(versions[0])
    last_u = last_g = torch.zeros_like(versions[0])
    for k in range(STEPS):
        x, read, corrects = versions[k], versions[version(k, synchronous)], k not in synchronous
        g = gradient(k, read)
        stepped_with = g
        if kind == "gradient" and corrects:
            stepped_with = g + lam * (g - last_g)
        if kind == "dc-asgd":
            stepped_with = g + lam * g**2 * (x - read)
        last_g = g.to(kept).double()
        mean = BETAS[0] * mean + (1 - BETAS[0]) * stepped_with
        square = BETAS[1] * square + (1 - BETAS[1]) * stepped_with**2
        direction = mean / (1 - BETAS[0] ** (k + 1)) / ((square / (1 - BETAS[1] ** (k + 1))).sqrt() + EPS)
        u = RATE * direction + RATE * DECAY * x
        versions.append(x - u - (lam * (u - last_u) if kind == "update" and corrects else 0))
        last_u = u.to(kept).double()
    return versions


def assert_close(done: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    # Twelve steps of some ten roundings each, at |x| = 3 where half an ulp is 2e-16.
    for k, (a, b) in enumerate(zip(done, expected, strict=True)):
        assert torch.allclose(a, b, rtol=0, atol=5e-14), f"V({k}) differs by {(a - b).abs().max():.1e}"


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("kind", ATTACH)
def test_the_recursion(kind: str, parts: str) -> None:
    synchronous = PARTS[parts]
    done = train(lambda inner: ATTACH[kind](inner, 0.5), synchronous)
    assert_close(done, literal(kind, 0.5, synchronous))
    assert (done[-1] - literal(kind, 0.0, synchronous)[-1]).abs().max() > 1e-4, "a correction that does nothing"
    begin = max(synchronous & {0, 1, 2}, default=-1) + 1
    assert_close(done[: begin + 1], literal(kind, 0.0, synchronous)[: begin + 1])  # before it only tracks


@pytest.mark.parametrize("kind", ["update", "gradient"])
def test_only_what_is_kept_is_rounded(kind: str) -> None:
    done = train(lambda inner: ATTACH[kind](inner, 1.0, torch.bfloat16))
    assert_close(done, literal(kind, 1.0, set(), torch.bfloat16))
    exact = literal(kind, 1.0, set())
    assert 1e-6 < (done[-1] - exact[-1]).abs().max() < 1e-2


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=RATE, weight_decay=DECAY),
    "sgd": lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9),
    "muon": lambda p: Muon(p, lr=RATE, momentum=0.9, weight_decay=DECAY),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ATTACH)
def test_lambda_zero_changes_no_bit(kind: str, name: str) -> None:
    def train_with(attach: Callable[[torch.optim.Optimizer], Correction | None]) -> list[torch.Tensor]:
        return train(attach, PARTS["start"], torch.float32, OPTIMIZERS[name])

    plain = train_with(lambda inner: None)
    assert all(map(torch.equal, plain, train_with(lambda inner: ATTACH[kind](inner, 0.0))))
    assert not torch.equal(plain[-1], train_with(lambda inner: ATTACH[kind](inner, 0.5))[-1])


KEPT: dict[str, tuple[str, tuple[torch.dtype, ...]]] = {
    "update": ("update", ()),
    "update bf16": ("update", (torch.bfloat16,)),
    "gradient": ("gradient", ()),
    "gradient bf16": ("gradient", (torch.bfloat16,)),
    "dc-asgd": ("dc-asgd", ()),
}


@pytest.mark.parametrize("name", KEPT)
def test_the_state_is_saved_and_loaded_in_its_dtype(name: str) -> None:
    kind, dtype = KEPT[name]
    attached: list[Correction] = []

    def attach(inner: torch.optim.Optimizer) -> Correction:
        attached.append(ATTACH[kind](inner, 1.0, *dtype))
        return attached[-1]

    through, resumed = train(attach, dtype=torch.float32), train(attach, dtype=torch.float32, save_at=5)
    assert all(map(torch.equal, through, resumed))
    for correction in attached:
        ((_, state),) = correction._optimizer.state.items()
        assert state[correction.STATE_KEY].dtype == (dtype or (torch.float32,))[0]
        assert correction.kept_bytes == 24 * (2 if dtype else 4)


def test_attached_to_an_optimizer_that_is_loaded_already_or_again() -> None:
    """Megatron loads a checkpoint before training starts."""
    x = start(torch.float32)
    inner = torch.optim.SGD([x], lr=RATE)
    ErrorFeedback(inner, 1.0, torch.bfloat16)
    x.grad = torch.ones_like(x) / 3
    inner.step()
    saved = inner.state_dict()
    other = torch.optim.SGD([x], lr=RATE)
    other.load_state_dict(saved)
    assert other.state[x][ErrorFeedback.STATE_KEY].dtype == torch.float32  # torch's own doing
    ErrorFeedback(other, 1.0, torch.bfloat16)
    assert other.state[x][ErrorFeedback.STATE_KEY].dtype == torch.bfloat16
    assert torch.equal(other.state[x][ErrorFeedback.STATE_KEY], saved["state"][0][ErrorFeedback.STATE_KEY])
    other.load_state_dict(saved)
    assert other.state[x][ErrorFeedback.STATE_KEY].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["gradient", "dc-asgd"])
def test_the_gradient_is_the_callers_again_after_the_step(kind: str) -> None:
    """Its buffer is Megatron's: with fp32 gradients that of the data-parallel reduction."""
    x = start(torch.float32)
    inner = torch.optim.SGD([x], lr=RATE)
    correction = ATTACH[kind](inner, 1.0)
    buffer = torch.empty(4, 6)
    for k in range(3):
        buffer.copy_(given := gradient(k, x.detach()))
        x.grad = buffer
        inner.step()
        assert x.grad is buffer
        assert torch.equal(buffer, given)
        kept = inner.state[x][correction.STATE_KEY]
        buffer.zero_()
        assert kept.abs().max() > 0, "what is kept is the caller's buffer"


@pytest.mark.parametrize("kind", ATTACH)
def test_a_step_inside_a_step_is_corrected_once(kind: str) -> None:
    class Nested(torch.optim.SGD):
        inside = False

        def step(self, closure: None = None) -> None:
            if not self.inside:
                self.inside = True
                self.step()
                self.inside = False
            super().step()

    def attach(inner: torch.optim.Optimizer) -> Correction:
        return ATTACH[kind](inner, 0.5)

    twice = train(attach, optimizer=lambda p: Nested(p, lr=0.01))
    assert_close(twice, train(attach, optimizer=lambda p: torch.optim.SGD(p, lr=0.02)))


@pytest.mark.parametrize("kind", ATTACH)
def test_a_parameter_without_gradient_stays_and_a_detached_correction_does_nothing(kind: str) -> None:
    x, idle = start(torch.float32), start(torch.float32)
    inner = torch.optim.AdamW([x, idle], lr=RATE)
    correction = ATTACH[kind](inner, 1.0)
    x.grad = torch.ones_like(x)
    inner.step()
    assert torch.equal(idle, start(torch.float32))
    assert idle not in inner.state
    kept = inner.state[x][correction.STATE_KEY].clone()
    correction.detach()
    inner.step()
    assert torch.equal(inner.state[x][correction.STATE_KEY], kept)


# Transformer Engine


class FusedAdamDouble(torch.optim.Optimizer):
    """What Transformer Engine's FusedAdam (2.x, pytorch/optimizers/fused_adam.py) does with state, on the CPU.

    Every tensor of a parameter's state has a dtype in ``name_to_dtype_map``: a KeyError otherwise. What isn't fp32 has
    an entry in ``_scales``, is saved as fp32, and is made anew in its own dtype on loading. A parameter's empty state
    is the signal to initialise it. The count of steps is the group's.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": RATE})
        self.name_to_dtype_map = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32, "master_param": torch.float32}
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def make(self, p: torch.Tensor, name: str) -> None:
        dtype = self.name_to_dtype_map[name]
        self.state[p][name] = torch.zeros_like(p, dtype=dtype)
        if dtype != torch.float32:
            self._scales.setdefault(p, {})[name] = torch.ones(1)

    def get_unscaled_state(self, p: torch.Tensor, name: str) -> torch.Tensor:
        state = self.state[p][name]
        assert state.dtype == self.name_to_dtype_map[name] in (torch.float32, torch.bfloat16)
        return state.float()

    def set_scaled_state(self, p: torch.Tensor, name: str, value: torch.Tensor) -> None:
        assert value.dtype == torch.float32
        if name not in self.state[p]:
            self.make(p, name)
        if self.name_to_dtype_map[name] != torch.float32:
            assert name in self._scales[p]
        self.state[p][name].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        for number, p in enumerate(p for group in self.param_groups for p in group["params"]):
            if number in saved["state"]:
                saved["state"][number] = {name: self.get_unscaled_state(p, name) for name in saved["state"][number]}
        return saved

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)
        for number, p in enumerate(p for group in self.param_groups for p in group["params"]):
            if number in saved["state"]:
                self.state[p] = {}
                for name, value in saved["state"][number].items():
                    self.set_scaled_state(p, name, value.float())

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if not self.state[p]:
                    self.make(p, "exp_avg")
                    self.make(p, "exp_avg_sq")
                if p.grad is not None:
                    mean, square = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
                    mean.lerp_(p.grad, 0.1)
                    square.lerp_(p.grad**2, 0.05)
                    correction = math.sqrt(1 - 0.95 ** group["step"]) / (1 - 0.9 ** group["step"])
                    p.sub_(group["lr"] * correction * mean / (square.sqrt() + EPS))


@pytest.mark.parametrize("name", KEPT)
def test_the_state_survives_transformer_engines_fused_adam(name: str) -> None:
    kind, dtype = KEPT[name]
    attached: list[Correction] = []

    def attach(inner: torch.optim.Optimizer) -> Correction:
        attached.append(ATTACH[kind](inner, 1.0, *dtype))
        return attached[-1]

    def train_on(save_at: int | None) -> list[torch.Tensor]:
        return train(attach, dtype=torch.float32, optimizer=FusedAdamDouble, save_at=save_at)

    assert all(map(torch.equal, train_on(None), train_on(5)))
    correction = attached[-1]
    ((_, state),) = correction._optimizer.state.items()
    assert state[correction.STATE_KEY].dtype == (dtype or (torch.float32,))[0]
    correction.detach()
    # Megatron saves after training as well, when the correction is gone.
    assert correction.STATE_KEY in correction._optimizer.state_dict()["state"][0]


def test_the_double_refuses_a_key_that_it_does_not_know() -> None:
    x = start(torch.float32)
    inner = FusedAdamDouble([x])
    x.grad = torch.ones_like(x)
    inner.step()
    inner.state[x]["unknown"] = torch.zeros_like(x)
    with pytest.raises(KeyError, match="unknown"):
        inner.state_dict()


# Whole runs

CLIP = 0.2  # below the norm of nearly every batch
LAMBDA = 1000.0  # of DC-ASGD: gradients of a few thousandths are squared
SYNCHRONOUS = ("--asyncpp-sync-start-iters", "3", "--asyncpp-sync-cooldown-iters", "3")
BF16 = ("--asyncpp-error-feedback", "--asyncpp-error-feedback-dtype", "bf16")
GRADIENT = ("--asyncpp-error-feedback", "0.5", "--asyncpp-error-feedback-on", "gradient")
DC_ASGD = ("--asyncpp-delay-compensation", str(LAMBDA))


def plugin(flags: tuple[str, ...], **kw: Any) -> Run:
    """Two stages, four microbatches, 12 iterations."""
    flags = tiny_flags(2, 4, clip=CLIP, extra=(*rows.TWO_BW, *flags), **kw)
    return run(flags, 2, initial=rows.initial(), timeout=120)


@pytest.mark.parametrize(
    ("flags", "reference", "printed"),
    [
        (BF16, {"error_feedback": 1.0, "feedback_dtype": torch.bfloat16}, "lambda 1, last update kept in bf16"),
        (GRADIENT, {"error_feedback": 0.5, "feedback_on": "gradient"}, "Error Feedback on the gradient lambda 0.5"),
        (DC_ASGD, {"delay_compensation": LAMBDA}, "delay compensation (DC-ASGD) lambda 1000"),
    ],
    ids=["update in bf16", "gradient", "dc-asgd"],
)
def test_a_run_is_the_recursion_computed_in_one_process(
    flags: tuple[str, ...], reference: dict[str, Any], printed: str
) -> None:
    done = plugin(flags)
    rows.assert_delayed(done, 4)
    expected = run(
        tiny_flags(1, 4, clip=CLIP),
        mode="oracle",
        reference=Reference(delay=1, **reference),
        initial=rows.initial(),
    )
    assert sum(norm > CLIP for norm in expected.grad_norms) > rows.ITERATIONS // 2, "clipping wasn't active"
    assert_bitwise(done, expected)
    plain = rows.oracle(4, clip=CLIP)
    with pytest.raises(AssertionError, match="differ"):
        compare_weights(done.merged("final"), plain.merged("final"), "weights")
    assert printed in done.ranks[0].stdout
    assert ("the paper's ablation, not Error Feedback" in done.ranks[0].stdout) == (flags == GRADIENT)


@pytest.mark.parametrize(
    ("flags", "reference"),
    [
        (GRADIENT, {"error_feedback": 0.5, "feedback_on": "gradient"}),
        (DC_ASGD, {"delay_compensation": LAMBDA}),
    ],
    ids=["gradient", "dc-asgd"],
)
def test_in_bf16_with_synchronous_parts_it_works_on_masters(flags: tuple[str, ...], reference: dict[str, Any]) -> None:
    done = plugin((*flags, *SYNCHRONOUS), bf16=True)
    expected = run(
        tiny_flags(2, 4, clip=CLIP, bf16=True),
        2,
        "fixture",
        reference=Reference(delay=1, sync_start=3, sync_cooldown=3, **reference),
        initial=rows.initial(),
    )
    assert_bitwise(done, expected)
