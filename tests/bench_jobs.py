"""What ranks do in the tests of the bench, in place of training."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def prints(stdout: dict[int, str], stderr: dict[int, str], fails: int | None, seconds: float) -> None:
    """Print what is given for this rank; then the rank that fails exits, and the others first go on for a while."""
    rank = int(os.environ["RANK"])
    print(stdout.get(rank, ""), end="")
    print(stderr.get(rank, ""), end="", file=sys.stderr)
    if rank == fails:
        sys.exit("it failed")
    time.sleep(seconds)


def computes(line: str, seconds: float) -> None:
    """Print a line, be busy for so many seconds, and print at which moments it was: a list of ``time.monotonic``."""
    print(line, flush=True)
    moments: list[float] = []
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        moments.append(time.monotonic())
        while time.monotonic() < moments[-1] + 1e-3:
            pass
    print(json.dumps(moments))


def exchanges(message: float, folder: Path) -> None:
    """Three messages from rank 0 to rank 1, which prints for each when it was sent and when it could be seen."""
    import torch
    import torch.distributed as dist

    from scripts.bench import latency

    dist.init_process_group("gloo")
    latency.install(message, folder)
    for _ in range(3):
        tensor = torch.zeros(1, dtype=torch.int64)
        if dist.get_rank() == 0:
            tensor[0] = time.monotonic_ns()
            kind = dist.isend
        else:
            kind = dist.irecv
        (work,) = dist.batch_isend_irecv([dist.P2POp(kind, tensor, 1 - dist.get_rank())])
        work.wait()
        print(int(tensor), time.monotonic_ns())
