"""Muon's settings: what each does to one step (case 16), what a preset sets, and that all in force are printed."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

from megatron_asyncpp import muon_preset
from megatron_asyncpp.integration import banner
from tests import rows
from tests.harness.flags import tiny_flags
from tests.harness.results import assert_bitwise
from tests.harness.run import run

PAPER: dict[str, Any] = {
    "momentum": 0.95,
    "nesterov": True,
    "coefficient_type": "simple",
    "num_ns_steps": 5,
    "scale_mode": "spectral",
    "extra_scale_factor": 0.2,
    "fp32_matmul_prec": "high",  # fp32 everywhere: with Megatron's "medium" the iteration is in bf16
    "weight_decay": 0.1,
    "lr": 0.02,
}
WEIGHTS = np.linspace(-0.5, 0.5, 24).reshape(4, 6)
GRADIENT = np.sin(np.arange(24.0) ** 1.5).reshape(4, 6)
BUFFER = np.cos(np.arange(24.0) * 1.7).reshape(4, 6)  # momentum from steps before: without it, it has no effect
COEFFICIENTS = {
    "simple": [(3.4445, -4.7750, 2.0315)],
    "quintic": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
}
SCALES = {"spectral": 6**0.5, "unit_rms_norm": (4 / 6) ** 0.5, "shape_scaling": 1.0}
DEFAULTS = {"momentum": 0.9, "nesterov": False, "coefficient_type": "quintic", "extra_scale_factor": 1.0}
# What differs from the above: two opposite corners of the weights after the step, and the norm of all.
GOLDEN: dict[str, tuple[dict[str, Any], tuple[float, float, float]]] = {
    "paper": ({}, (-0.4999269, 0.4941817, 1.4637928)),
    "momentum 0.9": ({"momentum": 0.9}, (-0.5005469, 0.4956911, 1.4656269)),
    "no Nesterov": ({"nesterov": False}, (-0.5003071, 0.4942861, 1.4639249)),
    "quintic": ({"coefficient_type": "quintic"}, (-0.5000003, 0.4948081, 1.4646926)),
    "three iterations": ({"num_ns_steps": 3}, (-0.5005254, 0.4948420, 1.4643216)),
    "unit_rms_norm": ({"scale_mode": "unit_rms_norm"}, (-0.4993090, 0.4973939, 1.4688809)),
    "shape_scaling": ({"scale_mode": "shape_scaling"}, (-0.4993784, 0.4970329, 1.4683031)),
    "extra scale 1": ({"extra_scale_factor": 1.0}, (-0.5036346, 0.4749083, 1.4358884)),
    "no decay": ({"weight_decay": 0.0}, (-0.5009269, 0.4951817, 1.4667413)),
    "rate 0.01": ({"lr": 0.01}, (-0.4999635, 0.4970908, 1.4690718)),
    "Megatron's defaults": (DEFAULTS, (-0.5040379, 0.4782234, 1.4403298)),
}


def literal(settings: dict[str, Any]) -> np.ndarray:
    """One step in fp64: momentum, Newton-Schulz, scale, decoupled decay."""
    beta = settings["momentum"]
    momentum = beta * BUFFER + (1 - beta) * GRADIENT
    direction = (1 - beta) * GRADIENT + beta * momentum if settings["nesterov"] else momentum
    x = direction / np.sqrt((direction**2).sum())
    for i in range(settings["num_ns_steps"]):
        triples = COEFFICIENTS[settings["coefficient_type"]]
        a, b, c = triples[i % len(triples)]
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    update = settings["extra_scale_factor"] * SCALES[settings["scale_mode"]] * x
    return WEIGHTS - settings["lr"] * settings["weight_decay"] * WEIGHTS - settings["lr"] * update


def megatrons(settings: dict[str, Any]) -> np.ndarray:
    x = torch.nn.Parameter(torch.tensor(WEIGHTS, dtype=torch.float32))
    optimizer = TensorParallelMuon([x], tp_mode="duplicated", **settings)
    optimizer.state[x]["momentum_buffer"] = torch.tensor(BUFFER, dtype=torch.float32)
    x.grad = torch.tensor(GRADIENT, dtype=torch.float32)
    optimizer.step()
    return x.detach().double().numpy()


def figures(weights: np.ndarray) -> tuple[float, float, float]:
    return weights[0, 0], weights[3, 5], np.sqrt((weights**2).sum())


@pytest.mark.parametrize("name", GOLDEN)
def test_one_step_of_a_fixed_matrix(name: str) -> None:
    changed, golden = GOLDEN[name]
    done, expected = megatrons(PAPER | changed), literal(PAPER | changed)
    # At weights of 0.5 half an ulp of fp32 is 3e-8; the update is at most 0.04, so what its iterations round is less.
    np.testing.assert_allclose(done, expected, rtol=0, atol=1e-7)
    assert figures(done) == pytest.approx(golden, abs=3e-7)
    others = [values for other, (_, values) in GOLDEN.items() if other != name]
    assert all(np.abs(np.subtract(golden, values)).max() > 1e-4 for values in others), "two settings look the same"


def test_the_default_precision_is_bf16_and_so_another_step() -> None:
    coarse, fine = megatrons(PAPER | {"fp32_matmul_prec": "medium"}), megatrons(PAPER)
    assert 1e-5 < np.abs(coarse - fine).max() < 1e-2


# The preset


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    """Megatron's own."""
    from megatron_asyncpp.integration import cpu

    cpu.install()
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(ArgumentParser(allow_abbrev=False))


def parsed(parser: ArgumentParser, preset: str, *argv: str) -> Namespace:
    args = parser.parse_args(list(argv))
    muon_preset.apply(args, preset, list(argv))
    return args


def test_the_papers_preset(parser: ArgumentParser) -> None:
    default, paper = vars(parsed(parser, "megatron")), vars(parsed(parser, "paper"))
    assert (default["muon_momentum"], default["muon_coefficient_type"]) == (0.9, "quintic")
    assert paper == default | {
        "muon_momentum": 0.95,
        "muon_nesterov": True,
        "muon_coefficient_type": "simple",
        "muon_num_ns_steps": 5,
        "muon_scale_mode": "spectral",
        "muon_extra_scale_factor": 0.2,
        "muon_tp_mode": "duplicated",
    }
    assert muon_preset.described("megatron", []) == "nothing"
    assert muon_preset.described("paper", []) == (
        "--muon-momentum 0.95 --muon-nesterov --muon-coefficient-type simple --muon-num-ns-steps 5 "
        "--muon-scale-mode spectral --muon-extra-scale-factor 0.2 --muon-tp-mode duplicated"
    )


@pytest.mark.parametrize("given", [["--muon-momentum", "0.9"], ["--muon-momentum=0.9"]])
def test_a_flag_that_is_given_wins_even_with_the_default_value(given: list[str], parser: ArgumentParser) -> None:
    argv = [*given, "--muon-num-ns-steps=3"]
    args = parsed(parser, "paper", *argv)
    assert (args.muon_momentum, args.muon_num_ns_steps, args.muon_coefficient_type) == (0.9, 3, "simple")
    described = muon_preset.described("paper", argv)
    assert "--muon-coefficient-type simple" in described
    assert "momentum" not in described
    assert "steps" not in described


def test_every_setting_in_force_is_described() -> None:
    x = torch.nn.Parameter(torch.zeros(4, 6))
    text = banner._describe(TensorParallelMuon([x], tp_mode="blockwise", split_qkv=True, **PAPER))
    expected = PAPER | {"tp_mode": "blockwise", "split_qkv": True, "weight_decay_method": "decoupled"}
    for name, value in expected.items():
        assert f" {name}={value}" in text, name
    adam = banner._describe(torch.optim.AdamW([x], lr=0.25))
    assert adam.startswith("AdamW (24 parameters on rank 0): amsgrad=False, betas=(0.9, 0.999), ")
    assert " lr=0.25, " in adam
    assert " _" not in adam


def test_a_run_with_the_preset_is_the_run_with_its_flags() -> None:
    tiny = tiny_flags(1, 4, iterations=4)

    def train(*extra: str) -> Any:
        return run([*tiny, *extra, *rows.TWO_BW], initial=rows.initial())

    done = train("--optimizer", "muon", "--asyncpp-muon-preset", "paper", "--muon-num-ns-steps=4")
    explicit = train(*rows.MUON, "--muon-num-ns-steps", "4")
    assert_bitwise(done, explicit)
    output = done.ranks[0].stdout
    assert "--asyncpp-muon-preset paper sets --muon-momentum 0.95 --muon-nesterov --muon-coefficient-type " in output
    (line,) = [line for line in output.splitlines() if "optimizer TensorParallelMuon" in line]
    for setting in ("coefficient_type=simple", "num_ns_steps=4", "extra_scale_factor=0.2", "nesterov=True"):
        assert f" {setting}" in line
    assert line in explicit.ranks[0].stdout
    assert "--asyncpp-muon-preset" not in explicit.ranks[0].stdout
