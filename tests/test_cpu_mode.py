"""CPU mode: two faults that once stayed silent while the loss fell, the flags, and that it is opt-in.

install() changes torch for the whole process, so what needs it runs after the `cpu_mode` fixture, and what needs an
untouched torch runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import megatron_asyncpp
from megatron_asyncpp.errors import AsyncPPError
from megatron_asyncpp.integration import cpu, cpu_megatron, megatron, patching
from megatron_asyncpp.integration.patching import Patch
from tests.harness.flags import tiny_flags
from tests.harness.results import compare_weights
from tests.harness.run import run

ROOT = Path(__file__).resolve().parents[1]
SEED = 1234


@pytest.fixture(scope="module")
def cpu_mode() -> None:
    cpu.install()


# ---- silent error 1: RNG restores queued for a CUDA start that never comes ----


def weights_drawn_by(expert_rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An expert's weight, a TP-split weight and a replicated one, as a rank draws them one after the other."""
    from megatron.core.tensor_parallel import random as rng

    rng.model_parallel_cuda_manual_seed(SEED, tp_rank=0, ep_rank=expert_rank, etp_rank=0)
    with rng.get_cuda_rng_tracker().fork(rng.get_expert_parallel_rng_tracker_name()):
        expert = torch.randn(8)
    with rng.get_cuda_rng_tracker().fork():
        split = torch.randn(8)
    return expert, split, torch.randn(8)


def test_replicated_weights_are_equal_on_expert_ranks_and_experts_are_not(cpu_mode: None) -> None:
    (expert_0, split_0, replicated_0), (expert_1, split_1, replicated_1) = weights_drawn_by(0), weights_drawn_by(1)
    assert torch.equal(replicated_0, replicated_1)
    assert torch.equal(split_0, split_1)
    assert not torch.equal(expert_0, expert_1)
    assert not torch.equal(split_0, replicated_0)


def test_fork_draws_from_its_own_state_and_puts_the_old_one_back(cpu_mode: None) -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    before = torch.get_rng_state()
    tracker.add("mine", SEED)
    with tracker.fork("mine"):
        first = torch.randn(4)
    with tracker.fork("mine"):
        second = torch.randn(4)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.cat([first, second]), torch.randn(8, generator=torch.Generator().manual_seed(SEED)))


# ---- silent error 2: a data loader draws its seed from the one RNG ----


@pytest.mark.parametrize("given", [{}, {"generator": None}, {"shuffle": True}], ids=str)
def test_data_loader_leaves_the_rng_alone(cpu_mode: None, given: dict[str, Any]) -> None:
    before = torch.get_rng_state()
    assert len(list(DataLoader(list(range(8)), **given))) == 8
    assert torch.equal(torch.get_rng_state(), before)


def test_shuffling_follows_the_seed_and_a_given_generator(cpu_mode: None) -> None:
    def order(seed: int, **given: Any) -> list[int]:
        torch.manual_seed(seed)
        return [int(item) for item in DataLoader(list(range(64)), shuffle=True, **given)]

    assert order(1) == order(1) != order(2)
    mine = [order(seed, generator=torch.Generator().manual_seed(7)) for seed in (1, 2)]
    assert mine[0] == mine[1]


def test_resume_is_bitwise_with_dropout_and_distributed_optimizer(tmp_path: Path) -> None:
    """Errors 2 and 3 at once, in Megatron's own loop."""

    flags = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--use-distributed-optimizer"]
    flags += ["--save", str(tmp_path), "--save-interval", "3", "--ckpt-format", "torch_dist"]
    whole, resumed = (
        run(tiny_flags(1, iterations=6, bf16=True, extra=flags + more), 1, "megatron")
        for more in ([], ["--load", str(tmp_path), "--ckpt-step", "3"])
    )
    assert resumed.losses == whole.losses[3:]
    for left, right in zip(whole.ranks, resumed.ranks, strict=True):
        compare_weights(left.final, right.final, "weights")
        compare_weights(left.masters, right.masters, "fp32 masters")


# ---- the rest of what CPU mode replaces ----


def gather_sizes(rank: int, store: str, results: Any) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(store, 2), rank=rank, world_size=2)
    for asynchronous in (False, True):
        out = [torch.zeros(2), torch.zeros(3)]
        work = torch.distributed.all_gather(out, torch.full((2 + rank,), 1.0 + rank), async_op=asynchronous)
        if asynchronous:
            work.wait()
        results.put((rank, [tensor.tolist() for tensor in out]))
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_uneven_all_gather(cpu_mode: None, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # the children find torch and CPU mode in memory
    results = context.SimpleQueue()
    ranks = [
        context.Process(target=gather_sizes, args=(rank, str(tmp_path / "store"), results), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(30)
    assert [process.exitcode for process in ranks] == [0, 0]
    for _ in range(4):
        assert results.get()[1] == [[1.0, 1.0], [2.0, 2.0, 2.0]]


def test_expert_split_sizes_are_numpy_and_the_norm_is_marked(cpu_mode: None) -> None:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    sizes = token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([1, 2]), as_numpy=True)
    assert type(sizes).__module__ == "numpy"
    assert token_dispatcher.maybe_move_tensor_to_cpu(None, as_numpy=True) is None

    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, tensor_model_parallel_size=2, sequence_parallel=True
    )
    config.persist_layer_norm = False
    norm = WrappedTorchNorm(config, 8)
    assert [parameter.sequence_parallel for parameter in norm.parameters()] == [True, True]
    assert config.sequence_parallel


def test_one_device_but_no_cuda(cpu_mode: None) -> None:
    assert torch.cuda.device_count() == 1
    assert not torch.cuda.is_available()
    for device in ("cuda", "cuda:0", torch.device("cuda"), 0, torch.cuda.current_device()):
        assert torch.empty(2, device=device).device.type == "cpu"
    assert torch.empty(2, device="meta").device.type == "meta"
    assert torch.ones(1).cuda().type() == "torch.cuda.FloatTensor"
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.current_stream().record_event()
    start.record()
    assert start.query() and start.elapsed_time(end) <= 0


# ---- with_flags ----


NEEDED = [
    "--distributed-backend", "gloo", "--transformer-impl", "local", "--no-persist-layer-norm",
    "--no-gradient-accumulation-fusion", "--no-rope-fusion", "--no-masked-softmax-fusion",
]  # fmt: skip


def test_with_flags_adds_what_is_missing() -> None:
    assert cpu.with_flags(["--lr", "1"]) == (["--lr", "1", *NEEDED], NEEDED)
    assert cpu.with_flags(NEEDED) == (NEEDED, [])


@pytest.mark.parametrize("given", [["--distributed-backend", "gloo"], ["--distributed-backend=gloo"]], ids=" ".join)
def test_with_flags_keeps_what_is_given(given: list[str]) -> None:
    given = [*given, "--no-rope-fusion"]
    argv, added = cpu.with_flags(given)
    assert argv == given + added
    assert not {"--distributed-backend", "gloo", "--no-rope-fusion"} & set(added)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--distributed-backend", "nccl"], "--distributed-backend nccl"),
        (["--distributed-backend=nccl"], "--distributed-backend nccl"),
        (["--distributed-backend", "gloo", "--distributed-backend", "nccl"], "--distributed-backend nccl"),
        (["--transformer-impl", "transformer_engine"], "--transformer-impl transformer_engine"),
        (["--async-save"], "--async-save"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_with_flags_refuses_what_needs_a_gpu(given: list[str], named: str) -> None:
    with pytest.raises(AsyncPPError, match=f"^{named} .*leave (it|--[a-z-]+) out"):
        cpu.with_flags(given)


# ---- install() ----


def test_records_have_reasons_and_versions() -> None:
    assert len({patch.target for patch in cpu.PATCHES}) == len(cpu.PATCHES)
    for patch in cpu.PATCHES:
        assert patch.why
        assert patch.versions == (">=0.19,<0.20" if patch.target.startswith("megatron.") else "")


def test_install_twice_is_install_once(cpu_mode: None) -> None:
    def current() -> list[Any]:
        return [patching._resolve(patch)[0].__dict__.get(patching._resolve(patch)[1]) for patch in cpu.PATCHES]

    before = current()
    cpu.install()
    assert all(left is right for left, right in zip(before, current(), strict=True))


def test_the_environment_switches_it_on_for_scripts_that_call_install_themselves(
    cpu_mode: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[None] = []
    monkeypatch.setattr(cpu, "install", lambda: started.append(None))
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--lr", "1"])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(megatron_asyncpp.CPU_VARIABLE, "1")
    try:
        megatron_asyncpp.install()
        assert (sys.argv[1:], started) == (["--lr", "1"], []), "it was on already"
        monkeypatch.setattr(cpu, "_is_on", lambda: False)
        megatron_asyncpp.install()
        assert (sys.argv[1:], started) == (["--lr", "1", *NEEDED], [None])
        assert capsys.readouterr().out == f"megatron_asyncpp: CPU mode adds {' '.join(NEEDED)}\n"
        monkeypatch.delenv(megatron_asyncpp.CPU_VARIABLE)
        megatron_asyncpp.install()
        assert started == [None]
    finally:
        patching.undo(megatron.PATCHES)


def test_dataset_helpers_are_compiled_only_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[None] = []
    compile_helpers = cpu_megatron._compiles_what_is_missing(lambda: compiled.append(None))
    compile_helpers()
    assert not compiled, "the wheel's are there"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # as in a checkout
    compile_helpers()
    assert compiled == [None]


def test_without_megatron_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.package_info", None)
    with pytest.raises(AsyncPPError, match="Megatron is neither installed nor on the path: run pip install"):
        patching.megatron_version()


@pytest.mark.parametrize("package", ["transformer_engine", "apex"])
def test_install_refuses_cuda_packages(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setattr(patching, "_applied", {})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == package else None)
    with pytest.raises(AsyncPPError, match=f"{package} is installed"):
        cpu.install()


@pytest.mark.parametrize("question", ["is_available", "is_initialized"])
def test_install_refuses_a_process_that_uses_a_gpu(monkeypatch: pytest.MonkeyPatch, question: str) -> None:
    monkeypatch.setattr(patching, "_applied", {})
    monkeypatch.setattr(torch.cuda, question, lambda: True)
    with pytest.raises(AsyncPPError, match="CUDA_VISIBLE_DEVICES"):
        cpu.install()


def test_install_refuses_another_megatron(cpu_mode: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "_applied", {})
    monkeypatch.setattr(patching, "megatron_version", lambda: "0.20.0")
    with pytest.raises(AsyncPPError, match="this is Megatron 0.20.0, but "):
        patching.apply(cpu.MEGATRON_PATCHES)
    monkeypatch.undo()
    assert patching.megatron_version().startswith("0.19.")


def test_aliases_are_rebound_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def original() -> str:
        return "original"

    owner, user = types.ModuleType("owner_of_a_name"), types.ModuleType("user_of_a_name")
    owner.name = user.alias = original  # type: ignore[attr-defined]
    for module in (owner, user):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    patch = Patch("owner_of_a_name:name", lambda before: lambda: f"not {before()}", "a test")
    patching.apply([patch])
    patching.rebind_aliases([patch])
    assert (owner.name(), user.alias()) == ("not original", "not original")
    patching.undo([patch])
    assert owner.name is user.alias is original


def in_a_process_of_its_own(code: Callable[[], None]) -> None:
    """Run a function of this module where nothing is imported yet. It must import what it uses."""
    import inspect
    import textwrap

    body = inspect.getsource(code).partition("\n")[2]
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)], check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def test_without_cpu_mode_torch_is_untouched() -> None:
    def code() -> None:
        import sys

        import torch

        before = {id(torch.empty), id(torch.cuda.device_count), id(torch.cuda._lazy_call), id(torch.Tensor.type)}
        import megatron_asyncpp

        assert megatron_asyncpp.install
        assert "megatron_asyncpp.integration.cpu" not in sys.modules
        from megatron_asyncpp.integration import cpu, patching

        assert not any(patching.is_applied(patch) for patch in cpu.PATCHES)
        assert before == {
            id(torch.empty),
            id(torch.cuda.device_count),
            id(torch.cuda._lazy_call),
            id(torch.Tensor.type),
        }
        assert torch.cuda.device_count() == 0

    in_a_process_of_its_own(code)


def test_install_after_megatron_was_imported() -> None:
    def code() -> None:
        import functools

        import torch
        from megatron.core.fusions.fused_bias_gelu import bias_gelu
        from megatron.core.tensor_parallel import random
        from megatron.training import initialize_megatron, training

        from megatron_asyncpp.integration import cpu

        assert random._lazy_call is torch.cuda._lazy_call
        cpu.install()
        assert random._lazy_call is torch.cuda._lazy_call
        assert isinstance(training.initialize_megatron, functools.partial)
        assert isinstance(initialize_megatron, functools.partial), "names of the script itself are rebound too"
        bias_gelu(torch.ones(2), torch.ones(2))
        from torch._dynamo.utils import counters

        assert not counters["frames"], "torch.compile has compiled something"

    in_a_process_of_its_own(code)
