"""Muon's usual settings, which aren't Megatron's defaults.

Its author's coefficients and momentum (https://kellerjordan.github.io/posts/muon/), scaled as in arXiv:2502.16982, and
over whole matrices under tensor parallelism. arXiv:2606.30634 leaves coefficients and scale open.
"""

from __future__ import annotations

from argparse import Namespace

# True stands for a switch.
PRESETS: dict[str, dict[str, float | str | bool]] = {
    "megatron": {},
    "paper": {
        "--muon-momentum": 0.95,
        "--muon-nesterov": True,
        "--muon-coefficient-type": "simple",
        "--muon-num-ns-steps": 5,
        "--muon-scale-mode": "spectral",
        "--muon-extra-scale-factor": 0.2,
        "--muon-tp-mode": "duplicated",
    },
}


def apply(args: Namespace, preset: str, argv: list[str]) -> None:
    """Set what the preset sets, in Megatron's parsed arguments."""
    for flag, value in _not_given(preset, argv).items():
        setattr(args, flag.removeprefix("--").replace("-", "_"), value)


def described(preset: str, argv: list[str]) -> str:
    """The flags that a preset sets, as one would write them; a flag that the command line gives isn't one of them."""
    settings = _not_given(preset, argv).items()
    return " ".join(flag if value is True else f"{flag} {value}" for flag, value in settings) or "nothing"


def _not_given(preset: str, argv: list[str]) -> dict[str, float | str | bool]:
    given = {word.partition("=")[0] for word in argv}
    return {flag: value for flag, value in PRESETS[preset].items() if flag not in given}
