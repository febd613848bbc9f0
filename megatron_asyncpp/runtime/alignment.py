"""How far this rank's clock is from that of rank 0: Cristian's algorithm (Distributed Computing 3, 1989), in two hops.

A rank asks another for its time, and takes the answer for what that clock said halfway between question and answer. Of
several answers the one that came fastest is the best: it is off by half of its round trip at most.
"""

from __future__ import annotations

import time

import torch
from megatron.core import parallel_state
from torch import distributed

_ROUNDS = 16


def seconds_behind(pipeline: distributed.ProcessGroup) -> float:
    """What to add to this rank's ``time.perf_counter`` to get that of rank 0. All ranks of the run must call it.

    The first stage's ranks ask rank 0, and then the others ask the first stage of their pipeline, so no rank needs a
    connection that only this is for. Clocks of two machines drift apart later, by some ms an hour.

    Args:
        pipeline: as ``agreement.pipeline_group`` makes it.
    """
    ranks = distributed.get_process_group_ranks(
        parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    )
    stage = parallel_state.create_group(
        ranks, backend="gloo", use_local_synchronization=True, group_desc="ASYNCPP_STAGE_CLOCKS"
    )
    own = _asked(stage, 0.0) if pipeline.rank() == 0 else 0.0
    return _asked(pipeline, own)


def _asked(group: distributed.ProcessGroup, own: float) -> float:
    """Ask the group's first rank, which knows how far it is behind: ``own``. It answers the others, one by one."""
    ranks = distributed.get_process_group_ranks(group)
    message = torch.zeros(1, dtype=torch.float64, device="cpu")
    if group.rank() == 0:
        for other in ranks[1:]:
            for _ in range(_ROUNDS):
                distributed.recv(message, src=other, group=group)
                message[0] = time.perf_counter() + own
                distributed.send(message, dst=other, group=group)
        return own
    answers = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        distributed.send(message, dst=ranks[0], group=group)
        distributed.recv(message, src=ranks[0], group=group)
        ended = time.perf_counter()
        answers.append((ended - began, float(message) - (began + ended) / 2))
    return min(answers)[1]
