"""The `flags` command: Megatron's flags of a model by name, for a shell's ``$(...)``."""

from __future__ import annotations

import argparse
import sys

from megatron_asyncpp import models
from megatron_asyncpp.planning import flags, parameters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", metavar="NAME", help=f"one of {', '.join(models.MODELS)}")


def main(args: argparse.Namespace) -> int:
    """Print a flag and its values on each line, and how large the model is on stderr.

    Raises:
        AsyncPPError: there is no model of that name.
    """
    model = models.model(args.model, "flags")
    for words in models.grouped(model.flags):
        print(" ".join(words))
    shape = flags.shape(list(model.flags))
    print(
        f"{args.model}: {parameters.total_parameters(shape) / 1e6:,.1f}M parameters, of which a token is multiplied "
        f"with {parameters.active_parameters(shape) / 1e6:,.1f}M (output weights included, the embedding that is "
        f"looked up not)",
        file=sys.stderr,
    )
    return 0
