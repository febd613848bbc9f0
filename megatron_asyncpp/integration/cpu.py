"""CPU mode: Megatron's own training loop on a machine without a GPU, over gloo, with nothing edited on disk.

Opt-in: nothing else in the package imports this module, and importing it changes nothing; ``install()`` does.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from dataclasses import dataclass

import torch

from megatron_asyncpp.errors import AsyncPPError
from megatron_asyncpp.integration import patching, repairs
from megatron_asyncpp.integration.cpu_delta_net import DELTA_NET_PATCHES
from megatron_asyncpp.integration.cpu_megatron import MEGATRON_PATCHES
from megatron_asyncpp.integration.cpu_torch import TORCH_PATCHES
from megatron_asyncpp.integration.patching import Patch

# torch's first, so that what importing Megatron's modules does meets them already
PATCHES: tuple[Patch, ...] = (*TORCH_PATCHES, *MEGATRON_PATCHES, *DELTA_NET_PATCHES, *repairs.PATCHES)


@dataclass(frozen=True)
class CPUFlag:
    """A Megatron flag that a machine without GPU needs, and why; ``value`` is None for a switch."""

    name: str
    value: str | None
    why: str


FLAGS: tuple[CPUFlag, ...] = (
    CPUFlag("--distributed-backend", "gloo", "NCCL, the default, needs GPUs"),
    CPUFlag("--transformer-impl", "local", "the default is TransformerEngine, whose kernels are CUDA"),
    CPUFlag("--no-persist-layer-norm", None, "the persistent norm is a CUDA kernel; the local one refuses the setting"),
    CPUFlag("--no-gradient-accumulation-fusion", None, "the fused weight gradient is a CUDA kernel of Apex or TE"),
    CPUFlag("--no-rope-fusion", None, "the fused rotary embedding is a CUDA kernel of Apex or TE"),
    CPUFlag("--no-masked-softmax-fusion", None, "in 16 bits and some shapes, softmax would be a CUDA kernel of Apex"),
)

# A flag that would go wrong here without an error -> the reason.
_REFUSED = {
    "--async-save": "the writer would share the host's memory with the weights that training goes on changing",
}


def start() -> None:
    """Add the flags that CPU mode needs to this process's command line, and install it; a second call does nothing.

    Raises:
        AsyncPPError: a given flag asks for what only a GPU can do, or ``install`` refuses.
    """
    if _is_on():
        return
    sys.argv[1:], added = with_flags(sys.argv[1:])
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"megatron_asyncpp: CPU mode adds {' '.join(added) or 'nothing'}", flush=True)
    install()


def install() -> None:
    """Make torch and Megatron run on the host, in this process and until it ends; a second call does nothing.

    Megatron may have been imported before: names that were imported by value are rebound.

    Raises:
        AsyncPPError: CUDA is in use already, TransformerEngine or Apex is installed, or megatron-core is of a
            version that the records were not read in.
    """
    if _is_on():
        return
    _hide_gpus()
    _refuse_cuda_extensions()
    # Megatron compiles small functions with torch.compile. On a CPU that costs minutes and a C++ compiler, and
    # dynamo can't trace the replaced functions. Unlike TORCH_COMPILE_DISABLE, which is read once when dynamo is
    # imported, the stance also covers what is compiled already.
    torch.compiler.set_stance("force_eager")
    repairs.apply_always()
    patching.apply(PATCHES)
    patching.rebind_aliases(PATCHES)
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_is_not_rng_warning)


def with_flags(argv: list[str]) -> tuple[list[str], list[str]]:
    """Add the Megatron flags that a machine without GPU needs and that the user has not given.

    Args:
        argv: the script's arguments.

    Returns:
        The arguments with the missing flags appended, and what was appended.

    Raises:
        AsyncPPError: a given flag asks for what only a GPU can do.
    """
    for argument in argv:
        if argument.partition("=")[0] in _REFUSED:
            raise AsyncPPError(
                f"{argument} does not work in CPU mode ({_REFUSED[argument.partition('=')[0]]}): leave it out"
            )
    added: list[str] = []
    for flag in FLAGS:
        given = _values(argv, flag.name)
        if not given:
            added += [flag.name] if flag.value is None else [flag.name, flag.value]
        elif flag.value is not None and given[-1] != flag.value:  # argparse takes the last one
            raise AsyncPPError(
                f"{flag.name} {given[-1]} does not work in CPU mode, which needs {flag.value} ({flag.why}): "
                f"leave {flag.name} out, or run on a GPU without --cpu"
            )
    return argv + added, added


def _values(argv: list[str], name: str) -> list[str]:
    """Each value that ``name`` is given in ``argv``; an empty string where none follows."""
    values = []
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        flag, equals, value = argument.partition("=")
        if flag == name:
            values.append(value if equals else following)
    return values


def _is_on() -> bool:
    return all(patching.is_applied(patch) for patch in PATCHES)


def _hide_gpus() -> None:
    """Hide the GPUs of a machine that has some: half a run on the GPU would be worse than none."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # both read what CUDA made of the variable when it started, if it has started
    if torch.cuda.is_initialized() or torch.cuda.is_available():
        raise AsyncPPError(
            "CPU mode was asked for after CUDA had started in this process: set CUDA_VISIBLE_DEVICES to an empty "
            "string before starting Python, or run without --cpu"
        )


def _refuse_cuda_extensions() -> None:
    for package in ("transformer_engine", "apex"):
        if importlib.util.find_spec(package) is not None:
            raise AsyncPPError(
                f"{package} is installed, and Megatron would take its CUDA optimizer and norms whatever the flags "
                "say: run CPU mode in an environment without it"
            )


def _is_not_rng_warning(record: logging.LogRecord) -> bool:
    """Drop the warning that a fork of the CUDA generator moved the host's: here they are one, and it is put back."""
    return "CPU RNG state changed" not in record.getMessage()
