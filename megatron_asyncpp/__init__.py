"""An asynchronous pipeline for NVIDIA Megatron-LM: PipeDream-2BW without a flush, with Error Feedback.

``import megatron_asyncpp; megatron_asyncpp.install()`` as the first line of a Megatron entry script, or
``python -m megatron_asyncpp run SCRIPT ARGS...`` in its place, adds the ``--asyncpp-*`` flags. Without any of them
nothing of Megatron changes.
"""

from megatron_asyncpp.state import declare_state

__all__ = ["declare_state", "install"]

__version__ = "0.1.0"


def install() -> None:
    """Install the plugin in this process: replace the Megatron symbols that the patch records name.

    It may be called before or after Megatron was imported, and again. An unsupported Megatron ends the process with
    one sentence and exit code 2.
    """
    from megatron_asyncpp.errors import AsyncPPError, leave
    from megatron_asyncpp.integration import megatron, repairs
    from megatron_asyncpp.integration.patching import apply

    try:
        apply((*megatron.PATCHES, *repairs.PATCHES))
    except AsyncPPError as error:
        leave(error)
