"""The command line: `python -m megatron_asyncpp COMMAND ...`."""

import argparse
import importlib
import sys
from typing import NamedTuple

from megatron_asyncpp.errors import AsyncPPError, leave


class Command(NamedTuple):
    """Where a command lives, and its line in the help.

    The module has `add_arguments(parser)` and `main(args) -> int`. With `verbatim` it has `main(argv) -> int`
    instead, and gets all that follows the command's name unparsed.
    """

    module: str
    help: str
    verbatim: bool = False


# A module is imported only when its command is chosen: importing Megatron takes seconds.
COMMANDS = {
    "run": Command("megatron_asyncpp.launch", "run a Megatron entry script with the plugin installed", verbatim=True),
    "flags": Command("megatron_asyncpp.flags_command", "print Megatron's flags of a model, such as smollm2-135m"),
    "plan": Command("megatron_asyncpp.plan_command", "say what a run takes on each GPU, and how fast it should be"),
    "timeline": Command("megatron_asyncpp.timeline_command", "draw how the stages of a schedule spend their time"),
    "simulate": Command("megatron_asyncpp.simulate_command", "predict what a schedule costs, without running it"),
    "doctor": Command("megatron_asyncpp.doctor", "say what is in a checkpoint folder, and whether it is complete"),
    "corpus": Command("megatron_asyncpp.corpus", "make Megatron .bin/.idx files from text files"),
    "study": Command("megatron_asyncpp.study", "train synchronously and asynchronously on a corpus, and compare"),
}


def main(argv: list[str]) -> int:
    """Run one command.

    Args:
        argv: The command's name and what follows it.

    Returns:
        The command's exit code. A command refused with an AsyncPPError ends the process, by `errors.leave`.
    """
    overview = "\n".join(f"  {name:<10}{command.help}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m megatron_asyncpp",
        usage="%(prog)s COMMAND ...",
        description=f"commands:\n{overview}\n\n%(prog)s COMMAND --help says more about one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS)
    # Only the name is parsed here: what follows `run` belongs to somebody else's parser.
    name = parser.parse_args(argv[:1]).command
    command = COMMANDS[name]
    try:
        module = importlib.import_module(command.module)
        if command.verbatim:
            return int(module.main(argv[1:]))
        own_parser = argparse.ArgumentParser(prog=f"{parser.prog} {name}", description=command.help)
        module.add_arguments(own_parser)
        return int(module.main(own_parser.parse_args(argv[1:])))
    except AsyncPPError as error:
        leave(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
