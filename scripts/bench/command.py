"""What the command lines of the benches have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from scripts.bench.run import RunError


class Parser(argparse.ArgumentParser):
    """Refuses in one sentence, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Leave with a sentence."""
        self.exit(2, f"{self.prog}: {message}\n")


def exit_code(prog: str, measure: Callable[[], None]) -> int:
    """Measure: 0, or 1 if a run failed, or 130 after a Ctrl-C, each with what there is to say about it."""
    try:
        measure()
    except RunError as error:
        print(f"{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{prog}: interrupted; the run is stopped.", file=sys.stderr)
        return 130
    return 0
