"""Calls collectives in every way that there is, each in a function of its own, for the test of the recorder."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import torch
from torch import distributed
from torch.distributed import ReduceOp, all_reduce
from torch.distributed import _functional_collectives as functional

from tests.harness.collectives import Recorder
from tests.harness.results import RankResult

WAYS: dict[str, tuple[str, ...]] = {}  # name of a function below -> the operations of gloo that it ends in
_recorder = Recorder()
_extra: list[dict[str, object]] = []


def record(result: RankResult) -> None:
    """Hook: record what ``main`` below does."""
    _recorder.install()
    _extra.append(result.extra)


def record_without_monitored_barriers(result: RankResult) -> None:
    """Hook: the same, but blind for them, as it would be for something that a newer torch adds."""
    _recorder._monitored_barrier = lambda method, *args, **kwargs: method(*args, **kwargs)
    record(result)


def main() -> None:
    """Entry: call them all, on a group of both ranks that isn't the default one."""
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo")
    group = distributed.new_group([0, 1], group_desc="BOTH")
    for name in WAYS:
        globals()[name](group, torch.ones(4))
    _extra[0]["recording"] = _recorder.recording()


def _ends_in(*ops: str) -> Callable[[Callable], Callable]:
    def register(function: Callable) -> Callable:
        WAYS[function.__name__] = ops
        return function

    return register


@_ends_in("all_reduce")
def imported_by_value(group, tensor):
    all_reduce(tensor, ReduceOp.MAX, group)


@_ends_in("all_reduce")
def asked_first(group, tensor):
    work = distributed.all_reduce(tensor, group=group, async_op=True)
    while not work.is_completed():
        pass
    work.wait()


@_ends_in("all_reduce")
def never(group, tensor):
    distributed.all_reduce(tensor, group=group, async_op=True)


@_ends_in("all_reduce")
def functional_one(group, tensor):
    functional.wait_tensor(functional.all_reduce(tensor, "sum", group))


@_ends_in("all_reduce")
def coalesced(group, tensor):
    with distributed._coalescing_manager(group):
        distributed.all_reduce(tensor, group=group)


@_ends_in("all_reduce")
def several_at_once(group, tensor):
    distributed.all_reduce_coalesced([tensor, tensor], group=group)


@_ends_in("all_reduce")
def method_of_the_group(group, tensor):
    group.allreduce([tensor]).wait()


@_ends_in("all_reduce")
def method_of_the_backend(group, tensor):
    group._get_backend(torch.device("cpu")).allreduce([tensor]).wait()


@_ends_in("broadcast")
def operator(group, tensor):
    torch.ops.c10d.broadcast_([tensor], group.boxed(), 0, 0, False, -1)


@_ends_in("all_reduce")
def another_thread(group, tensor):
    def another_thread():
        distributed.all_reduce(tensor, group=group)

    thread = threading.Thread(target=another_thread)
    thread.start()
    thread.join()


@_ends_in("all_gather", "all_gather")
def gather_objects(group, tensor):
    distributed.all_gather_object([None, None], "an object", group=group)


@_ends_in("broadcast", "broadcast")
def broadcast_objects(group, tensor):
    distributed.broadcast_object_list(["an object"], 0, group=group)


@_ends_in("all_gather")
def gather(group, tensor):
    distributed.all_gather_into_tensor(torch.empty(8), tensor, group=group)


@_ends_in("all_gather")
def gather_base(group, tensor):
    distributed._all_gather_base(torch.empty(8), tensor, group=group)


@_ends_in("all_reduce")  # which is how gloo does it
def scatter_sums(group, tensor):
    distributed.reduce_scatter_tensor(torch.empty(2), tensor, group=group)


@_ends_in("reduce")
def reduce_to_one(group, tensor):
    distributed.reduce(tensor, 0, group=group)


@_ends_in("gather")
def gather_to_one(group, tensor):
    distributed.gather(tensor, [torch.empty(4)] * 2 if distributed.get_rank() == 0 else None, 0, group=group)


@_ends_in("scatter")
def scatter_from_one(group, tensor):
    distributed.scatter(tensor, [tensor, tensor] if distributed.get_rank() == 0 else None, 0, group=group)


@_ends_in("all_to_all")
def all_to_all(group, tensor):
    distributed.all_to_all_single(torch.empty(4), tensor, group=group)


@_ends_in("broadcast")
def buckets(group, tensor):
    distributed._broadcast_coalesced(group, [tensor], 1000, 0)


@_ends_in("barrier")
def barrier(group, tensor):
    distributed.barrier(group)


@_ends_in("monitored_barrier")
def monitored_barrier(group, tensor):
    distributed.monitored_barrier(group)


@_ends_in()
def messages(group, tensor):
    if distributed.get_rank() == 0:
        distributed.send(tensor, 1, group=group)
    else:
        distributed.recv(tensor, 0, group=group)
    other = 1 - distributed.get_rank()
    pair = [distributed.P2POp(distributed.isend, tensor, other), distributed.P2POp(distributed.irecv, tensor, other)]
    for work in distributed.batch_isend_irecv(pair):
        work.wait()


@_ends_in("all_reduce")
def group_of_its_own(group, tensor):
    store = distributed.PrefixStore("own", distributed.distributed_c10d._get_default_store())
    distributed.ProcessGroupGloo(store, distributed.get_rank(), 2).allreduce([tensor]).wait()
