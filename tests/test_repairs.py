"""Repairs of Megatron's distributed optimizer: what goes wrong without, and that they wait until they are asked for."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_asyncpp import arguments
from megatron_asyncpp.integration import cpu, repairs

ROOT = Path(__file__).resolve().parents[1]
SEED = 1234


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """Megatron's groups in this one process, in CPU mode."""
    cpu.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(SEED)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def optimizer_over(model: torch.nn.Module, bf16: bool) -> tuple[Any, Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, bf16=bf16)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    settings = OptimizerConfig(optimizer="adam", lr=0.1, clip_grad=0.0, bf16=bf16, use_distributed_optimizer=True)
    if bf16:
        settings.params_dtype = torch.bfloat16
    chained = get_megatron_optimizer(settings, [wrapped])
    return wrapped, chained


def tiny_model(bf16: bool) -> torch.nn.Module:
    torch.manual_seed(SEED)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 8))
    return model.to(torch.bfloat16) if bf16 else model


def step(wrapped: Any, optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in wrapped.parameters():
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    assert optimizer.step()[0]


def inner_of(optimizer: Any) -> torch.optim.Optimizer:
    (distributed,) = optimizer.chained_optimizers
    return distributed.optimizer


@pytest.fixture(params=["CPU mode", "a schedule"])
def wanted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two reasons for which the repairs are done; elsewhere in this process CPU mode is one always."""
    if request.param == "a schedule":
        ask_for("1f1b", monkeypatch)


def ask_for(schedule: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this weren't CPU mode, and the command line had named this schedule."""
    from megatron.training import global_vars

    parser = arguments.add_arguments(argparse.ArgumentParser())
    given = [] if schedule is None else ["--asyncpp-schedule", schedule]
    monkeypatch.setattr(repairs, "_always", False)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", parser.parse_args(given))


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sharding", ["dp_reshardable", "fully_reshardable"])
def test_loaded_distributed_optimizer_goes_on_bitwise(
    world_of_one: None, wanted: None, tmp_path: Path, bf16: bool, sharding: str
) -> None:
    from megatron.core import dist_checkpointing

    def sharded(wrapped: Any, optimizer: Any, is_loading: bool) -> dict[str, Any]:
        model = {
            name: dist_checkpointing.ShardedTensor.from_rank_offsets(name, parameter)
            for name, parameter in wrapped.module.named_parameters()
        }
        metadata = {"distrib_optim_sharding_type": sharding, "distrib_optim_fully_reshardable_mem_efficient": False}
        return {"optimizer": optimizer.sharded_state_dict(dict(model), is_loading, metadata=metadata), "model": model}

    straight, optimizer = optimizer_over(tiny_model(bf16), bf16)
    step(straight, optimizer, 1)
    step(straight, optimizer, 2)
    dist_checkpointing.save(sharded(straight, optimizer, is_loading=False), str(tmp_path))

    resumed, fresh = optimizer_over(tiny_model(bf16), bf16)
    loaded = dist_checkpointing.load(sharded(resumed, fresh, is_loading=True), str(tmp_path))
    resumed.module.load_state_dict(loaded["model"])
    fresh.load_state_dict(loaded["optimizer"])

    steps = [state["step"] for state in inner_of(fresh).state.values()]
    assert [float(count) for count in steps] == [2.0] * 4
    assert len({id(count) for count in steps}) == 4, "one step tensor for several parameters counts once for each"
    for wrapped, its_optimizer in ((straight, optimizer), (resumed, fresh)):
        step(wrapped, its_optimizer, 3)
    assert [float(state["step"]) for state in inner_of(fresh).state.values()] == [3.0] * 4
    for left, right in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(left, right)


def test_distributed_optimizer_state_before_the_first_step_is_what_the_first_step_starts_from(
    world_of_one: None, wanted: None
) -> None:
    (asked, asked_optimizer), (plain, plain_optimizer) = (optimizer_over(tiny_model(False), False) for _ in range(2))
    asked_optimizer.state_dict()
    for wrapped, optimizer in ((asked, asked_optimizer), (plain, plain_optimizer)):
        step(wrapped, optimizer, 1)
    for left, right in zip(asked.parameters(), plain.parameters(), strict=True):
        assert torch.equal(left, right)


def test_without_a_schedule_megatron_is_as_it_was(world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import global_vars

    wrapped, optimizer = optimizer_over(tiny_model(False), False)
    step(wrapped, optimizer, 1)
    saved = optimizer.state_dict()
    _, fresh = optimizer_over(tiny_model(False), False)
    for args in ("no flag", "no loop"):
        ask_for(None, monkeypatch)
        if args == "no loop":
            monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", None)
        with pytest.raises(AssertionError):  # the first fault: no state to read a step from
            fresh.state_dict()
        assert not inner_of(fresh).state
    fresh.load_state_dict(saved)
    steps = [state["step"] for state in inner_of(fresh).state.values()]
    assert len({id(count) for count in steps}) == 1, "the second fault, one tensor for all, is gone: drop its repair"
    (distributed,) = fresh.chained_optimizers
    own = next(p for chunk in distributed.model_chunks for p in chunk.parameters())
    loaded = {name: torch.zeros(own.numel()) for name in ("param", "exp_avg", "exp_avg_sq")}
    with pytest.raises(KeyError, match="step"), torch.no_grad():  # the third
        distributed._set_main_param_and_optimizer_states(own, loaded)
    with pytest.raises(RuntimeError, match="a view of a leaf"):  # in fp32
        distributed._set_main_param_and_optimizer_states(own, loaded)


def test_with_another_adam_there_is_nothing_to_repair(world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerEngine's and Apex's optimizers keep one step for a whole group."""
    from megatron.core.optimizer import distrib_optimizer

    ask_for("2bw", monkeypatch)
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    _, optimizer = optimizer_over(tiny_model(False), False)
    optimizer.state_dict()
    assert not inner_of(optimizer).state, "it was given the state of torch's AdamW"


def test_the_plugin_installs_them_without_cpu_mode() -> None:
    code = """
import megatron_asyncpp
from megatron_asyncpp.integration import patching, repairs

megatron_asyncpp.install()
assert repairs.PATCHES and all(map(patching.is_applied, repairs.PATCHES))
assert not repairs._are_wanted(), "nobody asked for a schedule"
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=ROOT)
