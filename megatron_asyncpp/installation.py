"""What is installed here, what the plugin replaces in it, and what it refuses: for ``doctor`` without a folder."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from megatron_asyncpp.errors import AsyncPPError
from megatron_asyncpp.refusals import REFUSALS

_PACKAGES = ("megatron-core", "torch", "emerging-optimizers", "transformer-engine", "apex", "tensorboard", "psutil")


def examined() -> tuple[list[str], bool]:
    """What to print, and whether each symbol that the plugin replaces is there, in a version that it was read in."""
    lines = [f"Python {platform.python_version()}", *(f"{name} {_version(name)}" for name in _PACKAGES), _devices()]
    records = list(_records())
    lines.append(f"replaced in Megatron ({len(records)}), with a schedule only:")
    lines += [
        f"  {target}: {why}{'' if problem is None else f' - FAILS: {problem}'}" for target, why, problem in records
    ]
    lines.append(f"not replaced by a record, but on the objects of a run: {', '.join(_ON_OBJECTS)}")
    lines.append(f"refused with a schedule ({len(REFUSALS)}):")
    lines += [f"  {refusal.flag}: {refusal.why}; {refusal.instead}" for refusal in REFUSALS]
    return lines, all(problem is None for *_, problem in records)


_ON_OBJECTS = (
    "optimizer.step, opt_param_scheduler.step (the plan says when)",
    "step of each inner optimizer (in parts, for a correction's memory)",
    "init_state_fn, _init_optimizer_states_with_dummy_values of each optimizer (while a checkpoint is loaded)",
    "a method that a module declares as update (the step calls it)",
)


def _records() -> Iterator[tuple[str, str, str | None]]:
    """Each record's target and reason, and why it can't be applied, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is faster with other packages
        from megatron_asyncpp.integration import megatron, patching, repairs

        for patch in (*megatron.PATCHES, *repairs.PATCHES):
            try:
                patching.check(patch)
            except AsyncPPError as error:
                yield patch.target, patch.why, str(error)
            else:
                yield patch.target, patch.why, None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "is not installed"


def _devices() -> str:
    import torch

    if torch.cuda.is_available():
        names = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
        return f"{torch.cuda.device_count()} GPU(s): {', '.join(names)}"
    return "no GPU: runs need --cpu"
