"""The packages that a run uses: which version, from where, and whether it is a container's own build."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Local parts of versions that public indexes carry: torch's name the CUDA they are made for. NVIDIA's containers have
# others, such as 2.9.0a0+50eac811a6.nv25.09.
_PUBLIC_LOCAL = re.compile(r"(cu\d+|cpu|rocm[\d.]*|xpu)(\.with\..*)?")
_INSTALLED = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class Build:
    """One package as a run would import it.

    Attributes:
        name: as pip knows it.
        version: of the package's metadata, or None if there is none.
        folder: that it would be imported from, or None if there is none.
        note: why Megatron can't use it although it is there, with the way out, or None.
    """

    name: str
    version: str | None
    folder: Path | None
    note: str | None = None

    @property
    def is_own(self) -> bool:
        """Whether it was built where it is, as in a container, and is none that pip could install again."""
        if self.folder is None:
            return False
        local = (self.version or "").partition("+")[2]
        return bool(local and not _PUBLIC_LOCAL.fullmatch(local)) or not self.is_installed

    @property
    def is_installed(self) -> bool:
        """Whether it lies where pip installs, and not in a checkout on the path."""
        return self.folder is not None and not _INSTALLED.isdisjoint(self.folder.parts)

    def __str__(self) -> str:
        if self.folder is None:
            return f"{self.name} is not installed"
        text = f"{self.name} {self.version or '(no version)'}"
        if not self.is_installed:
            text += f" in {self.folder}"
        if self.is_own:
            text += ", a build of this machine's own"
        return text if self.note is None else f"{text}, {self.note}"


def found(name: str, module: str, needs: str | None = None, note: str | None = None) -> Build:
    """Find a package, without importing more of it than its parents.

    Args:
        name: as pip knows it.
        module: as one imports it.
        needs: a submodule without which it is another package of the same name.
        note: what to say of such a one.
    """
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # of a parent
        spec = None
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    folder = Path(folders[0]).resolve() if folders else None
    try:
        known: str | None = version(name)
    except PackageNotFoundError:
        known = None
    other = needs is not None and folder is not None and not list(folder.glob(f"{needs}*"))
    return Build(name, known, folder, note if other else None)
