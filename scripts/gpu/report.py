"""Checks, and the report of how they went."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TextIO


class Failed(Exception):
    """A check found something wrong; the message says what."""


class NotHere(Exception):
    """A check can't be made on this machine; the message says why."""


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: what is checked.
        run: makes the check and returns what it found, or raises Failed or NotHere.
    """

    name: str
    run: Callable[[], str]


@dataclass(frozen=True)
class Outcome:
    """How a check went: "pass", "FAIL" or "none", which is neither."""

    name: str
    state: str
    detail: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.state}  {self.name}: {self.detail} ({self.seconds:.0f} s)"


def outcome(check: Check) -> Outcome:
    """Make a check. Whatever it raises besides NotHere is a failure, and no reason not to make the others."""
    began = time.monotonic()
    try:
        state, detail = "pass", check.run()
    except NotHere as error:
        state, detail = "none", str(error)
    except Failed as error:
        state, detail = "FAIL", str(error)
    except Exception as error:
        state, detail = "FAIL", f"{type(error).__name__}: {error}"
    return Outcome(check.name, state, " ".join(detail.split()), time.monotonic() - began)


def report(title: str, checks: Iterable[Check], outputs: Iterable[TextIO]) -> int:
    """Make all checks and write each line as soon as it is known.

    Returns:
        The exit code: 0 if no check failed and at least one passed, else 1.
    """
    outputs = list(outputs)

    def lines() -> Iterator[str | Outcome]:
        yield title
        for check in checks:
            yield outcome(check)

    counts = dict.fromkeys(("pass", "FAIL", "none"), 0)
    for line in lines():
        if isinstance(line, Outcome):
            counts[line.state] += 1
        for output in outputs:
            print(line, file=output, flush=True)
    for output in outputs:
        print(
            f"{counts['pass']} passed, {counts['FAIL']} failed, {counts['none']} can't be made here",
            file=output,
            flush=True,
        )
    return int(counts["FAIL"] > 0 or counts["pass"] == 0)
