"""Packaging of megatron_asyncpp. setuptools reads everything from here; there is no other build file."""

import re
from pathlib import Path

from setuptools import find_packages, setup

# The version is read as text: importing the package would need what is about to be installed.
_init = (Path(__file__).parent / "megatron_asyncpp" / "__init__.py").read_text(encoding="utf-8")
_version = re.search(r"^__version__\s*=\s*[\"']([^\"']+)[\"']", _init, re.MULTILINE)
if _version is None:
    raise SystemExit("setup.py: megatron_asyncpp/__init__.py has no line __version__ = '...'")

_plots = ["matplotlib"]

setup(
    name="megatron_asyncpp",
    version=_version[1],
    description="Trains Megatron-LM models with an asynchronous pipeline (PipeDream-2BW) and Error Feedback",
    author="The megatron_asyncpp authors",
    license="Apache-2.0",
    packages=find_packages(include=["megatron_asyncpp", "megatron_asyncpp.*"]),
    # Megatron 0.19 has wheels for these two only.
    python_requires=">=3.12,<3.14",
    install_requires=[
        "megatron-core>=0.19,<0.20",
        "torch",
        # Importing megatron.training fails without it.
        "emerging-optimizers>=0.3,<0.4",
        "numpy",
        "packaging",
        # Megatron needs it to save torch_dist checkpoints, and doesn't declare it.
        "psutil",
        # Importing megatron.training fails without it, and Megatron doesn't declare it.
        "tqdm",
    ],
    extras_require={
        # torch's own wheels are built for CUDA 13.
        "gpu": ["transformer-engine[core_cu13,pytorch]"],
        "plots": _plots,
        "tensorboard": ["tensorboard"],
        "test": [*_plots, "pytest", "ruff", "mypy"],
    },
)
