"""Mixtures of experts under 2BW + Error Feedback + clipping, bitwise against Megatron's flushed loop on older weights:
losses, weights, biases of routers, and the auxiliary losses that are logged."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker

from megatron_asyncpp.integration.log import LaggingFigures
from megatron_asyncpp.runtime.batch_state import BatchState, TensorPlace
from megatron_asyncpp.runtime.moe_metrics import MoEMetrics
from megatron_asyncpp.state import declare_state
from tests import rows
from tests.harness.flags import tiny_flags
from tests.harness.results import Run, assert_bitwise
from tests.harness.run import RankError, run
from tests.test_topologies import DISTRIBUTED, Topology

CLIP = 0.2
MOE = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32")
EP2 = (*MOE, "--expert-model-parallel-size", "2")
ALLTOALL = ("--moe-token-dispatcher-type", "alltoall")
EXPERT_TP2 = ("--expert-tensor-parallel-size", "2")
SEQUENCE_PARALLEL = ("--sequence-parallel", "--expert-tensor-parallel-size", "1")
Z_LOSS = ("--moe-z-loss-coeff", "0.1")
PER_TOKEN = ("--calculate-per-token-loss",)
SHARED_GATE = ("--moe-shared-expert-intermediate-size", "32", "--moe-shared-expert-gate")
NO_LOSS = ("--moe-router-load-balancing-type", "none")
# The rate is large, so that a wrong bias changes the routing within a few iterations.
EXPERT_BIAS = (
    *(*NO_LOSS, "--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"),
    *("--moe-router-bias-update-rate", "1e-1"),
)
QUANTILES = ("--moe-router-load-balancing-type", "quantile_balancing", "--moe-router-quantile-balancing-ema", "0.5")
FULL_RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
RECOMPUTE_MOE = ("--recompute-granularity", "selective", "--recompute-modules", "moe")
DP2 = {"data_parallel": 2}
DP2_BF16 = {"data_parallel": 2, "bf16": True}


def losses(*types: str) -> tuple[str, ...]:
    return ("--moe-router-load-balancing-type", *types, "--moe-aux-loss-coeff", *("0.1" for _ in types))


# Each kind of parallelism, optimizer and precision, and each thing that a router gathers.
BIAS = "pp2 recompute full, expert bias"
QUANTILE_BALANCING = "pp2 muon, quantile balancing"
TWO_LOSSES = "pp2 shared expert with gate, one stage without experts, aux_loss, global_aux_loss"
ROWS: dict[str, Topology] = {
    "ep2 pp2 alltoall, aux_loss": Topology(2, 4, (*EP2, *ALLTOALL, *losses("aux_loss")), flags=DP2),
    "ep2 pp2 allgather distributed bf16, global_aux_loss, z-loss": Topology(
        2, 4, (*EP2, *DISTRIBUTED, *losses("global_aux_loss"), *Z_LOSS), flags=DP2_BF16
    ),
    "ep2 pp2 alltoall distributed muon bf16, expert bias": Topology(
        2, 4, (*EP2, *ALLTOALL, *DISTRIBUTED, *rows.MUON, *EXPERT_BIAS), flags=DP2_BF16
    ),
    "ep2 tp2 pp2, seq_aux_loss, z-loss, per-token loss": Topology(
        2, 4, (*EP2, *SEQUENCE_PARALLEL, *losses("seq_aux_loss"), *Z_LOSS, *PER_TOKEN), flags={"tensor": 2}
    ),
    "pp4, expert bias": Topology(4, 4, (*MOE, *EXPERT_BIAS)),
    BIAS: Topology(2, 2, (*MOE, *FULL_RECOMPUTE, *EXPERT_BIAS)),
    QUANTILE_BALANCING: Topology(2, 2, (*MOE, *rows.MUON, *QUANTILES)),
    TWO_LOSSES: Topology(
        2, 2, (*MOE, *SHARED_GATE, "--moe-layer-freq", "[1,1,0,0]", *losses("aux_loss", "global_aux_loss"))
    ),
    "pp2 muon, sinkhorn": Topology(2, 2, (*MOE, *rows.MUON, "--moe-router-load-balancing-type", "sinkhorn")),
}
SLOW_ROWS: dict[str, Topology] = {
    "ep2 pp2 allgather, expert bias": Topology(2, 4, (*EP2, *EXPERT_BIAS), flags=DP2),
    "ep2 pp2 alltoall muon, aux_loss, z-loss": Topology(
        2, 4, (*EP2, *ALLTOALL, *rows.MUON, *losses("aux_loss"), *Z_LOSS), flags=DP2
    ),
    "ep2 pp2 alltoall distributed, seq_aux_loss": Topology(
        2, 4, (*EP2, *ALLTOALL, *DISTRIBUTED, *losses("seq_aux_loss")), flags=DP2
    ),
    "ep2 pp2 alltoall distributed overlaps, global_aux_loss": Topology(
        *(2, 4, (*EP2, *ALLTOALL, *DISTRIBUTED, "--overlap-grad-reduce", *losses("global_aux_loss"))),
        plugin_only=("--overlap-param-gather",),
        flags=DP2_BF16,
    ),
    "ep2 pp2 alltoall, quantile balancing, recompute full": Topology(
        2, 4, (*EP2, *ALLTOALL, *QUANTILES, *FULL_RECOMPUTE), flags=DP2
    ),
    "ep2 tp2 pp2 alltoall distributed bf16, expert bias": Topology(
        2, 4, (*EP2, *SEQUENCE_PARALLEL, *ALLTOALL, *DISTRIBUTED, *EXPERT_BIAS), flags={"tensor": 2, "bf16": True}
    ),
    "expert tp2 pp2, aux_loss": Topology(
        2,
        4,
        (*MOE, "--sequence-parallel", *EXPERT_TP2, *losses("aux_loss")),
        flags={"tensor": 2},
    ),
    "pp4 recompute full, global_aux_loss, z-loss": Topology(
        4, 4, (*MOE, *FULL_RECOMPUTE, *losses("global_aux_loss"), *Z_LOSS)
    ),
    "pp4 muon, quantile balancing": Topology(4, 4, (*MOE, *rows.MUON, *QUANTILES)),
    "pp2 recompute moe, bf16, expert bias": Topology(
        2,
        2,
        (*MOE, *RECOMPUTE_MOE, *EXPERT_BIAS),
        flags={"bf16": True},
    ),
    "pp2 shared expert overlapped, every other layer, capacity, seq_aux_loss": Topology(
        2,
        2,
        (
            *(*MOE, *ALLTOALL, *SHARED_GATE[:2], "--moe-shared-expert-overlap", "--moe-layer-freq", "2"),
            *(*losses("seq_aux_loss"), "--moe-expert-capacity-factor", "1"),
        ),
    ),
    "pp2, aux_loss, z-loss, router in fp64, jitter, dropout": Topology(
        2,
        2,
        (
            *(*MOE, *losses("aux_loss"), *Z_LOSS, "--moe-router-dtype", "fp64", "--moe-input-jitter-eps", "0.1"),
            *("--hidden-dropout", "0.1", "--attention-dropout", "0.1"),
        ),
    ),
}


def train(row: Topology, mode: str, *more: str, hook: str | None = None, **changed: Any) -> Run:
    extra = (*row.extra, *more)
    if mode == "plugin":
        extra += (*row.plugin_only, *rows.TWO_BW, *rows.feedback_flags(1.0))
    flags = tiny_flags(row.stages, 4, clip=CLIP, extra=extra, **row.flags | changed)
    reference = rows.Reference(delay=1, error_feedback=1.0)
    return run(flags, row.world, mode, reference=reference, hooks=hook and f"tests.{hook}", timeout=180)


@cache
def flushed(name: str) -> Run:
    return train((ROWS | SLOW_ROWS)[name], "fixture")


@pytest.mark.parametrize("name", [*ROWS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_ROWS)])
def test_experts_are_the_flushed_loop_on_older_weights(name: str) -> None:
    done, reference = train((ROWS | SLOW_ROWS)[name], "plugin"), flushed(name)
    rows.assert_delayed(done, 4)
    assert sum(norm > CLIP for norm in reference.grad_norms) > rows.ITERATIONS // 2, "clipping wasn't active"
    assert_bitwise(done, reference)
    assert done.grad_norms == reference.grad_norms
    for rank in done.ranks:
        assert rank.metrics == reference.last.metrics
    assert len(reference.last.metrics) == rows.ITERATIONS * ("aux_loss" in name)
    biases = [name for name in done.ranks[0].final if name.endswith(("expert_bias", "qb_beta"))]
    assert bool(biases) == ("bias" in name or "quantile" in name)
    assert not biases or any(done.ranks[0].final[name].any() for name in biases), "no bias was ever changed"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        (BIAS, "without_batch_state"),
        (BIAS, "without_switch_before_a_backward"),
        (BIAS, "without_versions_of_biases"),
        (BIAS, "without_copy_of_biases"),
        (QUANTILE_BALANCING, "without_batch_state"),
        (TWO_LOSSES, "without_batch_state"),
    ],
)
def test_leaving_out_one_switch_is_seen(name: str, fault: str) -> None:
    wrong = train(ROWS[name], "plugin", hook=f"state_faults:{fault}")
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise(wrong, flushed(name))


def test_a_bias_without_versions_is_seen_where_a_step_comes_early() -> None:
    """Without recomputation a step that comes as late as it can changes a bias that nobody reads any more."""
    row, hook = ROWS[QUANTILE_BALANCING], "state_faults:without_versions_of_biases"
    wrong = train(row, "plugin", "--asyncpp-blocking-step", hook=hook)
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise(wrong, flushed(QUANTILE_BALANCING))


@pytest.mark.parametrize("name", [BIAS, TWO_LOSSES])
def test_deferred_is_blocking(name: str) -> None:
    """With evaluations in between, and one stage late at every step."""
    evaluation = {"eval_interval": 3, "eval_iters": 1}
    deferred = train(ROWS[name], "plugin", hook="late_ranks:delay_one_stage", **evaluation)
    blocking = train(ROWS[name], "plugin", "--asyncpp-blocking-step", **evaluation)
    for done in (deferred, blocking):
        assert_bitwise(done, flushed(name))
        assert done.grad_norms == flushed(name).grad_norms
        assert done.last.metrics == flushed(name).last.metrics


@pytest.mark.parametrize("step", [(), ("--asyncpp-blocking-step",)], ids=["deferred", "blocking"])
def test_a_skipped_update_leaves_the_bias_as_it_was(step: tuple[str, ...]) -> None:
    skip = ("--asyncpp-skip-nonfinite", "--no-check-for-nan-in-loss-and-grad", *step)
    done = train(ROWS[BIAS], "plugin", *skip, hook="state_faults:poison_batch_three_and_watch_biases", iterations=7)
    assert [rank.skipped for rank in done.ranks] == [[3], [3]]
    for rank in done.ranks:
        biases = [bias for bias, _ in rank.extra["biases"]]
        changed = [bool((after != before).any()) for before, after in zip(biases, biases[1:], strict=False)]
        assert changed == [True, True, False, True, True, True]
        assert [left for _, left in rank.extra["biases"]] == [0] * 7, "counts are left of a batch that is over"


@pytest.mark.parametrize("per_token", [(), PER_TOKEN], ids=["per microbatch", "per token"])
def test_one_stage_and_two_are_the_same(per_token: tuple[str, ...]) -> None:
    """Auxiliary losses are scaled wrongly under pipeline parallelism (case 13)."""
    extra = (*MOE, *losses("aux_loss"), *Z_LOSS, *per_token)
    initial = run(tiny_flags(iterations=3, extra=extra), 1, "megatron").merged("initial")
    one, two = (
        run(tiny_flags(stages, 4, clip=CLIP, extra=(*extra, *rows.TWO_BW)), stages, initial=initial)
        for stages in (1, 2)
    )
    assert_bitwise(one, two)
    assert one.grad_norms == two.grad_norms
    assert one.last.metrics == two.last.metrics
    routers = [name for name in initial if name.endswith("router.weight")]
    assert len(routers) == 4
    final = one.merged("final")
    assert all((final[name] - initial[name]).abs().max() > 1e-3 for name in routers), "routers hardly moved"


def test_split_experts_have_the_norm_and_zeros_of_whole_ones() -> None:
    """Norm or zero count of experts is wrong with expert parallelism (case 12)."""
    iterations = 6
    extra = (*MOE, *losses("aux_loss"), "--log-num-zeros-in-grad")
    initial = run(tiny_flags(iterations=3, extra=extra), 1, "megatron").merged("initial")

    def split(experts: int) -> Run:
        shape = (*extra, *rows.TWO_BW, *rows.feedback_flags(1.0), "--expert-model-parallel-size", str(experts))
        return run(tiny_flags(2, 4, iterations, clip=CLIP, data_parallel=2, extra=shape), 4, initial=initial)

    whole, halves = split(1), split(2)
    zeros, same = ([int(n) for n in re.findall(r"num zeros: (\d+)", done.ranks[-1].stdout)] for done in (whole, halves))
    assert len(zeros) == iterations
    assert any(zeros)
    assert same == pytest.approx(zeros, rel=1e-6)
    assert halves.grad_norms == pytest.approx(whole.grad_norms, rel=1e-6)
    assert halves.losses == pytest.approx(whole.losses, rel=1e-6)
    assert min(whole.grad_norms) > CLIP
    final = halves.merged("final")
    for name, weight in whole.merged("final").items():
        torch.testing.assert_close(final[name], weight, rtol=0, atol=1e-5, msg=name)


# The log


def test_the_log_says_which_iteration_a_loss_is_of() -> None:
    done = train(ROWS[TWO_LOSSES], "plugin")
    lines = re.findall(r"iteration +\d+/ .*", done.ranks[-1].stdout)
    assert len(lines) == rows.ITERATIONS
    for metric in ("load_balancing_loss", "global_load_balancing_loss"):
        found = [
            (int(of), line, float(value))
            for line, text in enumerate(lines, start=1)
            for value, of in re.findall(rf" {metric}: (\S+) \(iteration (\d+)\) \|", text)
        ]
        # A step is finished in the iteration after its own; the last one, in its own.
        iterations = range(1, rows.ITERATIONS + 1)
        assert sorted((of, line) for of, line, _ in found) == [(of, min(of + 1, rows.ITERATIONS)) for of in iterations]
        values = [flushed(TWO_LOSSES).last.metrics[of][metric] for of in iterations]
        assert [value for *_, value in sorted(found)] == pytest.approx(values, rel=1e-6)  # 7 digits are printed
        assert sum(text.count(f" {metric}: ") for text in lines) == rows.ITERATIONS, "Megatron's own field is there too"


def test_losses_of_two_batches_in_one_figure_are_seen() -> None:
    """The weights are right without the switch: only the log would be wrong."""
    name = "ep2 pp2 alltoall, aux_loss"
    wrong = train(ROWS[name], "plugin", hook="state_faults:without_batch_state")
    assert_bitwise(wrong, flushed(name))
    assert wrong.last.metrics != flushed(name).last.metrics


def test_a_line_has_the_mean_of_the_iterations_since_the_last_one() -> None:
    lagging = LaggingFigures()
    for iteration, loss in ((10, 1.0), (11, 2.0), (12, 6.0)):
        lagging.add_means(iteration, {"z_loss": loss}, lagging=True)
    lagging.add_means(13, {"z_loss": 5.0}, lagging=False)
    assert lagging.text() == " z_loss: 3.000000E+00 (iterations 10 to 12) | z_loss: 5.000000E+00 (iteration 13) |"
    assert lagging.text() == ""


def test_figures_of_layers_are_written_as_megatron_does() -> None:
    def written(report: Any) -> list[tuple[str, float, int]]:
        class Writer(list):
            def add_scalar(self, name: str, value: Any, iteration: int) -> None:
                self.append((name, float(value), iteration))

        writer = Writer()
        report(iteration=7, writer=writer, per_layer_logging=True, num_layers=3, moe_layer_freq=[1, 0, 1])
        return writer

    values = [0.7, 0.0, 0.4]
    single = MoEMetricsTracker()
    single._sync_metrics = lambda *_: None
    for layer, value in enumerate(values):
        single.record("z_loss", torch.tensor(value), layer + 1, 3)
    expected = written(lambda **how: single.report(loss_scale=1 / 2, **how))
    metrics = MoEMetrics(("z_loss",), 3)
    sums = [float(torch.tensor(value)) for value in values]
    assert written(lambda **how: metrics.report(sums, 2, **how)) == expected
    assert [name for name, *_ in expected] == ["z_loss", *(f"moe/z_loss_layer_{i}" for i in range(3))]


# State of other modules


def test_an_undeclared_state_is_refused_and_a_declared_one_is_right() -> None:
    plain = Topology(2, 2)
    with pytest.raises(RankError, match=r"a forward changes the buffer .*layers\.0\.extra\.seen .*\.declare_state in"):
        train(plain, "plugin", hook="state_faults:add_stateful_module")
    bias = r"finalize_model_grads changes the buffer .*layers\.0\.extra\.user_bias .*\.declare_state in"
    with pytest.raises(RankError, match=bias):
        train(plain, "plugin", hook="state_faults:declare_only_the_sum")
    for recompute in ((), FULL_RECOMPUTE):
        reference = train(plain, "fixture", *recompute, hook="state_faults:add_stateful_module")
        assert reference.ranks[0].final["decoder.layers.0.extra.user_bias"].any()
        more = (*recompute, "--asyncpp-check-versions")
        done = train(plain, "plugin", *more, hook="state_faults:declare_stateful_module", eval_interval=5, eval_iters=1)
        assert_bitwise(done, reference)


def test_a_state_that_changes_only_in_a_recomputed_forward_is_refused() -> None:
    with pytest.raises(RankError, match=r"a backward changes the buffer .*layers\.0\.extra\.seen"):
        train(Topology(2, 2, FULL_RECOMPUTE), "plugin", hook="state_faults:add_stateful_module")


def test_a_declaration_must_name_what_is_there() -> None:
    module = torch.nn.Module()
    module.register_buffer("total", torch.zeros(1))
    for wrong, message in (
        ({"per_batch": ["sum"]}, "per_batch: Module has no tensor sum"),
        ({"per_version": ["bias"]}, "per_version: Module has no buffer bias"),
        ({"per_version": ["total"]}, "nothing is said to change total: give update as well"),
        ({"update": "end"}, "update: Module has no method end"),
    ):
        with pytest.raises(ValueError, match=message):
            declare_state(module, **wrong)


def test_each_batch_has_its_own_set_that_starts_empty() -> None:
    module = torch.nn.Module()
    module.register_buffer("total", torch.zeros(1, dtype=torch.bfloat16))
    state = BatchState([TensorPlace(module, "total")])

    def add(batch: int, value: float) -> None:
        state.lend(batch)
        module.total = module.total + value

    def seen(batch: int | None) -> float:
        state.lend(batch)
        return float(module.total)

    module.total.fill_(1000)  # as an evaluation may do
    add(0, 1)
    add(1, 10)
    add(0, 2)
    assert (seen(0), seen(1), seen(None)) == (3, 10, 0)
    assert module.total.dtype == torch.bfloat16
    state.clear(0)
    add(2, 100)
    assert (seen(1), seen(2), seen(None)) == (10, 100, 0)
    with state.of(1):
        assert float(module.total) == 10
    assert float(module.total) == 0
