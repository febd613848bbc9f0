"""No stage waits for another one between two calls of the schedule: not by a clock, but by all that a rank does there.

One forgotten wait brings back most of the bubble, and training goes on as well as before, only slower.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from megatron_asyncpp.integration.waits import WAITS
from tests import put_back, rows
from tests.harness.collectives import record
from tests.harness.flags import tiny_flags
from tests.harness.results import Run
from tests.harness.run import run
from tests.waits import EMBEDDING, SCALAR_BYTES, SCALARS, recording, sums, waits

ITERATIONS = 8
STEADY = range(3, ITERATIONS - 1)  # the last call flushes, and what comes before the third is the start
CLIP = 0.2
FLAGS = (
    *(*rows.TWO_BW, *rows.feedback_flags(1.0)),
    *("--log-interval", "1", "--exit-signal-handler", "--exit-duration-in-mins", "60"),
)
DISTRIBUTED = ("--use-distributed-optimizer",)
EXPERTS = (
    *("--num-experts", "4", "--moe-ffn-hidden-size", "32", "--moe-aux-loss-coeff", "0.1", "--moe-z-loss-coeff", "0.1"),
    *("--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"),
)
# Each way of clipping and of summing a tied embedding that Megatron's optimizers have, in as few runs as that takes.
TOPOLOGIES: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "pp2 tied": (2, (), {"tied": True}),
    "pp4": (4, (), {"stages": 4}),
    "dp2 pp2 tied distributed": (4, DISTRIBUTED, {"data_parallel": 2, "tied": True}),
    "tp2 pp2 tied muon": (4, rows.MUON, {"tensor": 2, "tied": True}),
    "ep2 pp2 distributed": (
        *(4, (*EXPERTS, *DISTRIBUTED, "--expert-model-parallel-size", "2")),
        {"data_parallel": 2},
    ),
    "dp2 pp2 distributed muon bf16": (4, (*DISTRIBUTED, *rows.MUON), {"data_parallel": 2, "bf16": True}),
}


@cache
def trained(name: str) -> Run:
    world, extra, options = TOPOLOGIES[name]
    return train(world, extra, record, **options)


def train(
    world: int, extra: tuple[str, ...], hooks: Callable, iterations: int = ITERATIONS, stages: int = 2, **options: Any
) -> Run:
    # One layer a stage, M = P; with clipping, so that the step needs the norm of the whole model.
    flags = tiny_flags(stages, stages, iterations, layers=stages, clip=CLIP, extra=(*FLAGS, *extra), **options)
    return run(flags, world, hooks=hooks)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_no_stage_waits_for_another_one(name: str) -> None:
    found = waits(trained(name), STEADY)
    assert not found, "stages wait for each other:\n" + "\n".join(map(str, found))


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_what_is_summed_over_stages_is_small_and_once_an_iteration(name: str) -> None:
    done = trained(name)
    stages = 1 + max(rank.pipeline_rank for rank in done.ranks)
    for rank in done.ranks:
        pipeline = recording(rank).pipeline
        assert len(pipeline) == stages
        for scalars in sums(rank, SCALARS, STEADY).values():
            assert [one.ranks for one in scalars] == [tuple(sorted(pipeline))]
            assert 0 < scalars[0].bytes <= SCALAR_BYTES
        holds_embedding = "tied" in name and rank.pipeline_rank in (0, stages - 1)
        for gradients in sums(rank, EMBEDDING, STEADY).values():
            assert len(gradients) == holds_embedding


# What a run with one wait put back does: the two innermost functions of each. A record's name stands for the record.
PUT_BACK: dict[str, tuple[Callable, tuple[str, ...], set[tuple[str, ...]]]] = {
    name: (functools.partial(put_back.record_of, f"megatron.{name}"), (), found)
    for name, found in {
        "training.training:logical_and_across_model_parallel_group": {
            ("logical_and_across_model_parallel_group", "train_step"),
        },
        "training.training:reduce_max_stat_across_model_parallel_group": {
            ("reduce_max_stat_across_model_parallel_group", "train_step"),
            ("reduce_max_stat_across_model_parallel_group", "training_log"),
        },
        "core.timers:Timer.elapsed": {("stop", "elapsed"), ("start", "elapsed")},
        "training.training:checkpoint_and_decide_exit": {
            ("all_gather_item", "signals_received"),
            ("checkpoint_and_decide_exit", "train"),
        },
    }.items()
} | {
    "core.transformer.moe.moe_logging:MoEMetricsTracker.report": (
        functools.partial(put_back.record_of, "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker.report"),
        EXPERTS,
        {("_sync_metrics", "report")},
    ),
    "embedding sum": (put_back.embedding_sum, (), {("_allreduce_embedding_grad", "_allreduce_word_embedding_grads")}),
    "gradient norm": (put_back.gradient_norm, (), {("get_grad_norm_fp32", "get_grad_norm")}),
    "wait in begin": (put_back.wait_in_begin, (), {("start", "_agree"), ("total", "_agree")}),
    "blocking step": (record, ("--asyncpp-blocking-step",), {()}),
}
# Records that come with them, and without which nothing waits.
NO_WAIT = {
    f"megatron.training.training:{name}"
    for name in (
        *("get_canonical_lr_for_logging", "training_log", "print_rank_last"),  # what a log line says, and when
        *("evaluate_and_print_results", "save_checkpoint_and_time", "disable_forward_pre_hook"),  # finish a step first
    )
}


@pytest.mark.parametrize("name", PUT_BACK)
def test_a_wait_put_back_is_named(name: str) -> None:
    hooks, extra, expected = PUT_BACK[name]
    found = waits(train(2, extra, hooks, 6, tied=True), range(3, 5))
    assert {wait.functions[:2] for wait in found} == expected, "\n".join(map(str, found))
    if expected != {()}:
        lines = re.compile(r"stages 0, 1, at \S+\.py:\d+ \w+ < \S+\.py:\d+ \w+")
        assert all(lines.search(str(wait)) for wait in found)


def test_every_record_of_a_wait_is_put_back_once() -> None:
    assert {patch.target for patch in WAITS} - NO_WAIT == {f"megatron.{name}" for name in PUT_BACK if ":" in name}
