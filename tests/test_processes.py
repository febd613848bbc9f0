"""What is started is gone at the end, with all that it started itself."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from megatron_asyncpp.processes import started

# The grandchild ignores SIGTERM and is in a session of its own, as torchrun's workers are.
IGNORE = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
CHILD = (
    "import subprocess, sys, time; "
    f"p = subprocess.Popen([sys.executable, '-c', {IGNORE!r}], start_new_session=True); time.sleep(60)"
)


def wait_until_gone(family: list[psutil.Process]) -> None:
    deadline = time.monotonic() + 5
    while any(member.is_running() and member.status() != psutil.STATUS_ZOMBIE for member in family):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def family_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The child and the grandchild, once the latter is up."""
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert len(family) == 2
    return family


@pytest.fixture
def interruptible() -> Iterator[None]:
    """What runs in the background ignores Ctrl-C; here it counts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_children_and_grandchildren() -> None:
    with pytest.raises(KeyboardInterrupt), started([sys.executable, "-c", CHILD], subprocess.PIPE) as process:
        family = family_of(process)
        raise KeyboardInterrupt
    wait_until_gone(family)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_grandchildren_are_found_when_the_child_was_killed() -> None:
    with started([sys.executable, "-c", CHILD], subprocess.PIPE) as process:
        family = family_of(process)
        process.kill()
        process.wait()
    wait_until_gone(family)
    assert process.returncode == -signal.SIGKILL


def test_environment_and_exit_code_of_the_child() -> None:
    program = "import os, sys; print(os.environ['OMP_NUM_THREADS'], os.environ['EXTRA']); sys.exit(3)"
    with started([sys.executable, "-c", program], subprocess.PIPE, {"EXTRA": "x"}) as process:
        assert process.stdout is not None and process.stdout.read() == b"1 x\n"
        process.wait()
    assert process.returncode == 3
