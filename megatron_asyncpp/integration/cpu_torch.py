"""CPU mode, torch's part: a ``torch.cuda`` with one device, whose memory, streams and RNG are the host's.

Importing this changes nothing; ``cpu.install()`` applies the records. ``torch.cuda.is_available()`` stays
False on purpose: what asks first gets the true answer, and only what never asks meets these stand-ins.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import time
import types
from collections.abc import Callable
from typing import Any

import torch

from megatron_asyncpp.integration.patching import Patch

_CPU = torch.device("cpu")

# The functions that make a tensor; torch.Tensor.new_* take their device from a tensor, which is right already.
_FACTORIES = (
    "tensor", "as_tensor", "empty", "zeros", "ones", "full", "rand", "randn", "randint", "randperm",
    "arange", "linspace", "eye", "empty_strided", "empty_like", "zeros_like", "ones_like",
    "full_like", "rand_like", "randn_like",
)  # fmt: skip


def _is_done(*args: Any) -> None:
    """Wait for what is done already."""


class Stream:
    """A stream that is the calling thread: whatever was issued is done."""

    device = _CPU
    device_index = stream_id = cuda_stream = 0
    wait_stream = wait_event = synchronize = _is_done

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def query(self) -> bool:
        """Whether all work is done."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Record this moment, in a new event if none is given."""
        event = event or Event()
        event.record()
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """One priority."""
        return (0, 0)


class Event:
    """An event that has happened as soon as it is recorded; Megatron's timers read real time from it."""

    wait = synchronize = _is_done

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = 0.0

    def record(self, stream: Any = None) -> None:
        """Record this moment."""
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        """Whether all work before it is done."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to another."""
        return 1000.0 * (end.seconds - self.seconds)


def _stands_for(value: Any) -> Callable[[Any], Any]:
    """A replacement that is ``value`` itself, whatever was there."""
    return lambda original: value


def _returns(value: Any) -> Callable[[Any], Any]:
    """A replacement function that always returns ``value``; a new one each time, so no two names share it."""
    return lambda original: lambda *args, **kwargs: value


def _returns_self(original: Any) -> Any:
    return lambda self, *args, **kwargs: self


def _names_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int)  # a bare index means a CUDA device


def _makes_on_cpu(factory: Any) -> Any:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and _names_cuda(kwargs["device"]):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return make


def _names_type_as_cuda(tensor_type: Any) -> Any:
    @functools.wraps(tensor_type)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = tensor_type(self, *args, **kwargs)
        if isinstance(result, str) and not result.startswith("torch.cuda."):
            return "torch.cuda." + result.removeprefix("torch.")
        return result

    return type_


def _calls_now(lazy_call: Any) -> Any:
    return lambda function, **kwargs: function()


def _host_rng(name: str) -> Callable[[Any], Any]:
    """The function ``name`` of ``torch.cuda``, on the host's generator."""
    functions: dict[str, Callable[..., Any]] = {
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        # not torch.manual_seed, which calls torch.cuda.manual_seed_all, that is, this
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "manual_seed_all": lambda seed: torch.default_generator.manual_seed(seed),
    }
    return _stands_for(functions[name])


def _gives_loader_its_own_generator(init: Any) -> Any:
    @functools.wraps(init)
    def init_loader(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("generator") is None:
            # from the seed in force, so that a shuffle still follows --seed; initial_seed() draws nothing
            kwargs["generator"] = torch.Generator().manual_seed(torch.initial_seed())
        init(self, *args, **kwargs)

    return init_loader


class _Works:
    """Several asynchronous works that are waited for as one."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def wait(self, *args: Any) -> None:
        for work in self.works:
            work.wait()


def _gathers_uneven(all_gather: Any) -> Any:
    @functools.wraps(all_gather)
    def gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({out.numel() for out in tensor_list}) == 1:
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        ranks = torch.distributed.get_process_group_ranks(group)
        tensor_list[ranks.index(torch.distributed.get_rank())].copy_(tensor)
        works = _Works(
            [
                torch.distributed.broadcast(out, rank, group=group, async_op=True)
                for rank, out in zip(ranks, tensor_list, strict=True)
            ]
        )
        return works if async_op else works.wait()

    return gather


_FACTORY_PATCHES = tuple(
    Patch(f"torch:{name}", _makes_on_cpu, "Megatron writes device='cuda' in full: make such tensors on the host")
    for name in _FACTORIES
)

_TENSOR_PATCHES = (
    Patch("torch:Tensor.cuda", _returns_self, "a tensor is where it belongs already"),
    Patch("torch.nn:Module.cuda", _returns_self, "a module is where it belongs already"),
    Patch(
        "torch:Tensor.type",
        _names_type_as_cuda,
        "the optimizers sort parameters by type names such as 'torch.cuda.FloatTensor' and refuse all others",
    ),
)

_STREAM = Stream()
_ONE_DEVICE = "Megatron asks for the device without asking whether there is one: there is one, the host"
_ONE_STREAM = "work on the host is done in the order it was issued: streams and events have nothing to wait for"
_NO_MEMORY = "there is no device memory to report or to free"

_DEVICE_PATCHES = (
    Patch("torch.cuda:current_device", _returns(_CPU), _ONE_DEVICE),
    Patch("torch.cuda:device_count", _returns(1), "without a device Megatron sets up no model-parallel groups"),
    Patch("torch.cuda:set_device", _returns(None), _ONE_DEVICE),
    Patch("torch.cuda:device", _returns(contextlib.nullcontext()), _ONE_DEVICE),
    # The newest architecture, because for older ones Megatron insists on CUDA_DEVICE_MAX_CONNECTIONS=1.
    Patch("torch.cuda:get_device_capability", _returns((10, 0)), _ONE_DEVICE),
    Patch(
        "torch.cuda:get_device_properties",
        _returns(types.SimpleNamespace(name="cpu", major=10, minor=0, multi_processor_count=1, total_memory=0)),
        _ONE_DEVICE,
    ),
    Patch("torch.cuda:Stream", _stands_for(Stream), _ONE_STREAM),
    Patch("torch.cuda:Event", _stands_for(Event), _ONE_STREAM),
    Patch("torch.cuda:stream", _returns(contextlib.nullcontext()), _ONE_STREAM),
    Patch("torch.cuda:current_stream", _returns(_STREAM), _ONE_STREAM),
    Patch("torch.cuda:default_stream", _returns(_STREAM), _ONE_STREAM),
    Patch("torch.cuda:set_stream", _returns(None), _ONE_STREAM),
    Patch("torch.cuda:synchronize", _returns(None), _ONE_STREAM),
    Patch("torch.cuda:is_current_stream_capturing", _returns(False), _ONE_STREAM),
    Patch("torch.cuda.nvtx:range_push", _returns(None), "ranges are marks in a GPU profile"),
    Patch("torch.cuda.nvtx:range_pop", _returns(None), "ranges are marks in a GPU profile"),
    Patch("torch.cuda:empty_cache", _returns(None), _NO_MEMORY),
    Patch("torch.cuda:memory_allocated", _returns(0), _NO_MEMORY),
    Patch("torch.cuda:memory_reserved", _returns(0), _NO_MEMORY),
    Patch("torch.cuda:max_memory_allocated", _returns(0), _NO_MEMORY),
    Patch("torch.cuda:max_memory_reserved", _returns(0), _NO_MEMORY),
    Patch("torch.cuda:device_memory_used", _returns(0), _NO_MEMORY),
    Patch("torch.cuda:memory_stats", _returns(collections.defaultdict(int)), _NO_MEMORY),
)

_ONE_RNG = "dropout and initialisation draw from the host's generator, so that is what Megatron saves, seeds and forks"

_RNG_PATCHES = (
    Patch(
        "torch.cuda:_lazy_call",
        _calls_now,
        "Megatron's RNG tracker would queue its restores for a CUDA start that never comes: fork() then changes "
        "nothing, without an error, and replicated weights differ between ranks",
    ),
    Patch("torch.cuda:_lazy_init", _returns(None), "there is nothing to start"),
    Patch(
        "torch.cuda:default_generators",
        _stands_for(collections.defaultdict(lambda: torch.default_generator)),
        _ONE_RNG,
    ),
    *(
        Patch(f"{module}:{name}", _host_rng(name), _ONE_RNG)
        for module in ("torch.cuda", "torch.cuda.random")
        for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all")
    ),
    Patch(
        "torch.utils.data:DataLoader.__init__",
        _gives_loader_its_own_generator,
        "each new iterator draws a base seed from the host's generator, which is the model's here, so a resumed "
        "run would drop out other units: a loader gets a generator of its own",
    ),
)

_GLOO_PATCHES = (
    Patch(
        "torch.distributed:all_gather",
        _gathers_uneven,
        "NCCL gathers tensors of different sizes, gloo does not: broadcast each from its owner",
    ),
)

TORCH_PATCHES: tuple[Patch, ...] = (
    *_FACTORY_PATCHES, *_TENSOR_PATCHES, *_DEVICE_PATCHES, *_RNG_PATCHES, *_GLOO_PATCHES,
)  # fmt: skip
