"""The one exception that a user is meant to read, and how a rank leaves with it."""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

# Seconds that rank 0 gets to print and leave first: a launcher kills all ranks as soon as one has left.
HEAD_START = 5.0


class AsyncPPError(Exception):
    """A request that the plugin can't honour, in one sentence: what is wrong, and the way out.

    Raised before any process group or long work starts. A fault of the plugin itself is never reported this way.
    """


def leave(error: AsyncPPError) -> NoReturn:
    """End this process with exit code 2; rank 0 prints the sentence, without a traceback."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"megatron_asyncpp: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(HEAD_START)
    sys.exit(2)
