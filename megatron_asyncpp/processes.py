"""Child processes that leave nothing behind: what the commands that start training runs share."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

# A variable of the environment, which a whole family of processes inherits: torchrun's workers are in sessions of
# their own, and if torchrun is killed they are nobody's children.
_MARK = "MEGATRON_ASYNCPP_FAMILY"


def exit_on_signals() -> None:
    """Let a plain `kill`, or a terminal that is closed, end this process as Ctrl-C does: with its clean-up."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's doing, and to be left so
            signal.signal(number, lambda number, frame: sys.exit(128 + number))


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def started(
    command: list[str], output: Any, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A child process, gone at the end with all that it started, whatever happens.

    Args:
        command: The command line.
        output: Where standard output and standard error go, as subprocess.Popen takes it.
        environment: Variables that it gets on top of this process's and of OMP_NUM_THREADS=1.
    """
    mark = uuid.uuid4().hex
    # A session of its own: a Ctrl-C in the terminal reaches only us, and the children are stopped in one way only.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {}), _MARK: mark},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        # A second Ctrl-C, from somebody impatient, must not cut this short.
        with contextlib.ExitStack() as shield:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                shield.callback(signal.signal, number, signal.signal(number, signal.SIG_IGN))
            _stop(process, mark)


def _stop(process: subprocess.Popen[bytes], mark: str) -> None:
    import psutil

    for stop in (psutil.Process.terminate, psutil.Process.kill, psutil.Process.kill):
        family = [member for member in psutil.process_iter() if _is_marked(member, mark)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                stop(member)
        psutil.wait_procs(family, timeout=5)
    process.wait()


def _is_marked(process: Any, mark: str) -> bool:
    import psutil

    try:
        return bool(process.environ().get(_MARK) == mark)
    except (psutil.Error, OSError):  # somebody else's, or gone
        return False
