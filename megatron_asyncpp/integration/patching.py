"""Patch records: whatever is replaced in Megatron or torch is one record that says what, why, and for which versions.

A record can be listed before it is applied, is applied at most once, and can be undone.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet

from megatron_asyncpp.errors import AsyncPPError

# The versions of megatron-core that the plugin's records were read in.
VERSIONS = ">=0.19,<0.20"

_ABSENT = object()


@dataclass(frozen=True)
class Patch:
    """One replaced symbol.

    Attributes:
        target: ``"package.module:attribute"``, or ``"package.module:Class.attribute"``.
        replace: takes the original object, returns the one to put in its place.
        why: one sentence.
        versions: the megatron-core versions in which the target was read, as a PEP 440 specifier; a record
            is refused under any other version. Empty for what doesn't depend on Megatron.
    """

    target: str
    replace: Callable[[Any], Any]
    why: str
    versions: str = ""


# target -> (owner, attribute, what the owner's own namespace held before, or _ABSENT if it was inherited)
_applied: dict[str, tuple[Any, str, Any]] = {}

# target -> the module names that rebind_aliases() pointed at the replacement
_rebound: dict[str, list[tuple[ModuleType, str]]] = {}


def is_applied(patch: Patch) -> bool:
    """Whether this record's target is replaced in this process."""
    return patch.target in _applied


def apply(patches: Iterable[Patch]) -> None:
    """Apply the records in order, each at most once.

    Raises:
        AsyncPPError: the installed megatron-core isn't one that a record was read in, or lacks its target.
    """
    for patch in patches:
        if is_applied(patch):
            continue
        _check_version(patch)
        owner, attribute = _resolve(patch)
        before = vars(owner).get(attribute, _ABSENT)
        setattr(owner, attribute, patch.replace(getattr(owner, attribute)))
        _applied[patch.target] = (owner, attribute, before)


def check(patch: Patch) -> None:
    """Check that a record could be applied here.

    Raises:
        AsyncPPError: the installed megatron-core isn't one that it was read in, or lacks its target.
    """
    _check_version(patch)
    _resolve(patch)


def rebind_aliases(patches: Iterable[Patch]) -> None:
    """Point names that hold a replaced function or class of a module by value at its replacement.

    ``from megatron.training.initialize import initialize_megatron`` keeps the original if it ran before the
    patch. Only names in modules are found, not default arguments or class attributes. torch's own modules are
    left alone: what torch does inside is not Megatron's business.
    """
    replaced: dict[int, tuple[str, Any, Any]] = {}
    for patch in patches:
        if is_applied(patch):
            owner, attribute, before = _applied[patch.target]
            if isinstance(owner, ModuleType) and callable(before):
                replaced[id(before)] = (patch.target, before, getattr(owner, attribute))
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or name.partition(".")[0] == "torch":
            continue
        for attribute, value in list(vars(module).items()):
            target, before, after = replaced.get(id(value), ("", None, None))
            if before is not None and value is before:
                setattr(module, attribute, after)
                _rebound.setdefault(target, []).append((module, attribute))


def undo(patches: Iterable[Patch]) -> None:
    """Put back what the applied ones among these records replaced, last first."""
    for patch in reversed(list(patches)):
        if is_applied(patch):
            owner, attribute, before = _applied.pop(patch.target)
            for module, alias in _rebound.pop(patch.target, []):
                setattr(module, alias, before)
            if before is _ABSENT:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, before)


def megatron_version() -> str:
    """What ``megatron.core`` says of itself, whether it comes from a package or from a checkout on the path.

    A package's metadata would do for neither: a checkout has none, and hides an installed package's code.

    Raises:
        AsyncPPError: there is no Megatron.
    """
    try:
        found: str = importlib.import_module("megatron.core.package_info").__version__
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.core", "megatron.core.package_info"):
            raise
        raise AsyncPPError(
            f"Megatron is neither installed nor on the path: run pip install 'megatron-core{VERSIONS}', or start in a "
            f"Megatron-LM checkout"
        ) from None
    return found


def _check_version(patch: Patch) -> None:
    if patch.versions and not SpecifierSet(patch.versions).contains(megatron_version(), prereleases=True):
        raise AsyncPPError(
            f"this is Megatron {megatron_version()}, but {patch.target} was only read in {patch.versions}: install "
            f"one of those versions"
        )


def _resolve(patch: Patch) -> tuple[Any, str]:
    module, _, path = patch.target.partition(":")
    *parents, attribute = path.split(".")
    owner: Any = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent, _ABSENT)
    if not hasattr(owner, attribute):
        raise AsyncPPError(
            f"{patch.target} does not exist in the installed version, although megatron_asyncpp replaces it "
            f"({patch.why}): install a supported megatron-core"
        )
    return owner, attribute
