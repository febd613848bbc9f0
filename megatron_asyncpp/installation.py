"""What is installed here, what the plugin replaces in it, and what it refuses: for ``doctor`` without a folder."""

from __future__ import annotations

import platform
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import replace

from packaging.specifiers import SpecifierSet

from megatron_asyncpp.builds import Build, found
from megatron_asyncpp.errors import AsyncPPError
from megatron_asyncpp.refusals import REFUSALS, Refusal

# As pip knows it, and as one imports it.
_PACKAGES = {
    "torch": "torch",
    "emerging-optimizers": "emerging_optimizers",
    "transformer-engine": "transformer_engine",
    "tensorboard": "tensorboard",
    "psutil": "psutil",
    "tqdm": "tqdm",
}
_OTHER_APEX = "not NVIDIA's but PyPI's package of that name, which Megatron can't use: pip uninstall apex"
# What importing megatron.training takes, beside torch.
_NEEDED = {"emerging-optimizers": ">=0.3,<0.4", "tqdm": ""}


def examined() -> tuple[list[str], bool]:
    """What to print, and whether a run could start: nothing is missing, and each replaced symbol is as it was read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is faster with other packages
        return _examined()


def _examined() -> tuple[list[str], bool]:
    builds = {name: found(name, module) for name, module in _PACKAGES.items()}
    builds["apex"] = found("apex", "apex", needs="optimizers", note=_OTHER_APEX)
    megatron, problems = _megatron()
    lines = [f"Python {platform.python_version()}", *map(str, (megatron, *builds.values()))]
    problems += _missing(builds)
    devices, unusable = _devices(builds)
    lines += devices
    problems += unusable
    if own := [build.name for build in (megatron, *builds.values()) if build.is_own]:
        lines.append(
            f"builds of this machine's own, as in a container: {', '.join(own)}; so that pip replaces none of them, "
            f"install this package with pip install --no-deps"
        )

    records = list(_records())
    problems += [problem for *_, problem in records if problem is not None]
    lines.append(f"replaced in Megatron ({len(records)}), with a schedule only:")
    lines += [
        f"  {target}: {why} - {'is there' if problem is None else f'FAILS: {problem}'}"
        for target, why, problem in records
    ]
    lines.append(f"not replaced by a record, but on the objects of a run: {', '.join(_ON_OBJECTS)}")
    lines.append(f"refused with a schedule ({len(REFUSALS)}):")
    lines += [f"  {row.flag}: {row.why}; {row.instead} - {state}" for row, state in _refusals()]
    lines += [f"a run would be refused or fail: {problem}" for problem in dict.fromkeys(problems)]
    if not problems:
        lines.append("nothing that was looked at stands in the way of a run")
    return lines, not problems


_ON_OBJECTS = (
    "optimizer.step, opt_param_scheduler.step (the plan says when)",
    "step of each inner optimizer (in parts, for a correction's memory)",
    "init_state_fn, _init_optimizer_states_with_dummy_values of each optimizer (while a checkpoint is loaded)",
    "a method that a module declares as update (the step calls it)",
)


def _megatron() -> tuple[Build, list[str]]:
    """Megatron as it would be imported, and what is wrong with its version."""
    from megatron_asyncpp.integration.patching import VERSIONS, megatron_version

    build = found("megatron-core", "megatron.core")
    try:
        told = megatron_version()
    except AsyncPPError as error:
        return build, [str(error)]
    if not build.is_installed:
        # A checkout has no metadata of its own, and that of an installed package speaks of the code that it hides.
        build = replace(build, version=told)
    if not SpecifierSet(VERSIONS).contains(told, prereleases=True):
        return build, [f"Megatron {told} is none of {VERSIONS}, which the plugin was written for"]
    return build, []


def _missing(builds: dict[str, Build]) -> list[str]:
    problems = []
    for name, versions in _NEEDED.items():
        build = builds[name]
        wanted = f"{name}{versions}"
        if build.folder is None:
            problems.append(f"importing megatron.training fails without {name}: pip install '{wanted}'")
        elif build.version is not None and not SpecifierSet(versions).contains(build.version, prereleases=True):
            problems.append(f"{name} {build.version} is none that Megatron 0.19 works with: pip install '{wanted}'")
    return problems


def _devices(builds: dict[str, Build]) -> tuple[list[str], list[str]]:
    """Lines about NCCL and the GPUs, and why a run can't use them."""
    import torch

    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    lines = [f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if nccl else "NCCL: torch was built without it"]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            lines.append(
                f"GPU {index}: {device.name}, {device.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
            )
        return lines, [] if nccl else ["Megatron's default --distributed-backend nccl needs a torch with NCCL"]
    lines.append("no GPU: runs need --cpu")
    return lines, [
        f"{name} is installed, and Megatron would take its CUDA kernels, which --cpu refuses: use an environment "
        f"without it"
        for name in ("transformer-engine", "apex")
        if builds[name].folder is not None
    ]


def _records() -> Iterator[tuple[str, str, str | None]]:
    """Each record's target and reason, and why it can't be applied, or None."""
    try:
        from megatron_asyncpp.integration import megatron, patching, repairs
    except ImportError as error:
        yield "all of them", "they were read in Megatron", f"Megatron can't be imported: {error}"
        return
    for patch in (*megatron.PATCHES, *repairs.PATCHES):
        try:
            patching.check(patch)
        except AsyncPPError as error:
            yield patch.target, patch.why, str(error)
        except ImportError as error:
            yield patch.target, patch.why, f"it can't be imported: {error}"
        else:
            yield patch.target, patch.why, None


def _refusals() -> Iterator[tuple[Refusal, str]]:
    """Each refusal, and how it stands with the flags of this Megatron."""
    try:
        from megatron.training.arguments import add_megatron_arguments
    except ImportError:
        yield from ((row, "unknown: Megatron can't be imported") for row in REFUSALS)
        return
    parser: ArgumentParser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    defaults = parser.parse_args([])
    for row in REFUSALS:
        flag = row.flag.partition(" ")[0]
        if flag.startswith("--") and flag not in parser._option_string_actions:
            yield row, "this Megatron has no such flag"
        elif _applies(row, defaults):
            yield row, "Megatron's default asks for it"
        else:
            yield row, "not asked for by default"


def _applies(row: Refusal, defaults: Namespace) -> bool:
    try:
        return row.applies(defaults)
    except AttributeError:  # what only Megatron's validation sets
        return False
