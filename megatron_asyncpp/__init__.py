"""An asynchronous pipeline for NVIDIA Megatron-LM: PipeDream-2BW without a flush, with Error Feedback.

``import megatron_asyncpp; megatron_asyncpp.install()`` as the first line of a Megatron entry script, or
``python -m megatron_asyncpp run SCRIPT ARGS...`` in its place, adds the ``--asyncpp-*`` flags. Without any of them
nothing of Megatron changes.
"""

import os

from megatron_asyncpp.state import declare_state

__all__ = ["declare_state", "install"]

__version__ = "0.1.0"

# With the value 1 install() switches CPU mode on, for scripts that call it without the launcher and its --cpu.
CPU_VARIABLE = "MEGATRON_ASYNCPP_CPU"


def install() -> None:
    """Install the plugin in this process: replace the Megatron symbols that the patch records name.

    It may be called before or after Megatron was imported, and again. An unsupported Megatron ends the process with
    one sentence and exit code 2. With MEGATRON_ASYNCPP_CPU=1 in the environment CPU mode comes first, and adds the
    flags that it needs to ``sys.argv``.
    """
    from megatron_asyncpp.errors import AsyncPPError, leave

    try:
        if os.environ.get(CPU_VARIABLE) == "1":
            from megatron_asyncpp.integration import cpu

            cpu.start()
        from megatron_asyncpp.integration import megatron, repairs
        from megatron_asyncpp.integration.patching import apply

        apply((*megatron.PATCHES, *repairs.PATCHES))
    except AsyncPPError as error:
        leave(error)
