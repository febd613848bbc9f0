"""``python -m megatron_asyncpp run [--cpu] SCRIPT ARGS...``: any Megatron entry script, with the plugin installed."""

from __future__ import annotations

import os
import runpy
import sys

import megatron_asyncpp
from megatron_asyncpp.errors import AsyncPPError

OWN_ENTRY = "pretrain_gpt"

USAGE = f"""usage: python -m megatron_asyncpp run [--cpu] SCRIPT ARGS...

Run a Megatron entry script with the plugin installed, as torchrun would run the script itself.

  --cpu    train on the CPU, over gloo, with the flags that a machine without a GPU needs
  SCRIPT   a path, or {OWN_ENTRY} for the entry that comes with this package
  ARGS     the script's own: Megatron's flags, and the --asyncpp-* flags that the README lists
"""


def main(argv: list[str]) -> int:
    """Run the script that a command line names, in this process and as ``__main__``.

    Raises:
        AsyncPPError: the command line makes no sense, or names a script that isn't there.
    """
    cpu = argv[:1] == ["--cpu"]
    words = argv[1:] if cpu else argv
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if words else 2
    script, arguments = words[0], words[1:]
    if script.startswith("-"):
        raise AsyncPPError(f"run takes the script before its arguments, but found {script}: see run --help")
    if script != OWN_ENTRY and not os.path.isfile(script):
        raise AsyncPPError(f"there is no script {script}: give its path, or {OWN_ENTRY} for the package's own")

    sys.argv = [script, *arguments]
    if script != OWN_ENTRY:
        # As ``python SCRIPT`` has it, and before anything of Megatron is imported: a checkout's script needs its own.
        sys.path[0] = os.path.dirname(os.path.abspath(script))
    if cpu:
        os.environ[megatron_asyncpp.CPU_VARIABLE] = "1"
    megatron_asyncpp.install()
    if script == OWN_ENTRY:
        from megatron_asyncpp import pretrain_gpt

        pretrain_gpt.main()
    else:
        runpy.run_path(script, run_name="__main__")
    return 0
