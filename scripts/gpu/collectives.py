"""For torchrun: sums over all ranks and messages between neighbours, over NCCL and gloo side by side, as in a run.

python -m torch.distributed.run --nproc-per-node 8 scripts/gpu/collectives.py nccl
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

_ELEMENTS = 2**22


def main(backend: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    # The sums of the optimizer step go over a gloo group beside NCCL, so that no kernel waits for other stages.
    for group, where in ((None, device), (dist.new_group(backend="gloo"), torch.device("cpu"))):
        figures = torch.full((_ELEMENTS,), float(rank + 1), device=where)
        work = dist.all_reduce(figures, group=group, async_op=True)
        work.wait()
        wanted = size * (size + 1) / 2
        assert bool((figures == wanted).all()), f"a sum over {size} ranks is {figures[0].item()}, not {wanted}"
    if size > 1:
        sent, received = torch.full((_ELEMENTS,), float(rank), device=device), torch.empty(_ELEMENTS, device=device)
        after, before = (rank + 1) % size, (rank - 1) % size
        operations = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert bool((received == before).all()), f"rank {rank} received {received[0].item()} of rank {before}"
    dist.barrier()
    if rank == 0:
        print(f"{size} ranks are connected")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
