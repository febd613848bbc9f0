"""How fast a run should be: the work of a token, and what each schedule makes of it."""

from __future__ import annotations

from megatron_asyncpp.planning.architecture import Architecture, DeltaNet, LatentAttention
from megatron_asyncpp.planning.parameters import active_parameters
from megatron_asyncpp.schedules import SCHEDULES, slowdown

SECONDS_A_DAY = 86400
_BACKWARD_OVER_FORWARD, _CHUNKS = 2.0, 2


def flops_per_token(model: Architecture) -> int:
    """Floating-point operations of a token's forward and backward: 6 for each active parameter, and the attention.

    Full attention multiplies queries with keys and weights with values, of half the sequence on average. A gated delta
    net does four products of a key with a value on its state, as Megatron counts it
    (``num_floating_point_operations``). Each product is two operations, and a backward is two forwards.
    """
    attention = 0
    for layer in model.layers:
        kind = layer.attention
        if isinstance(kind, DeltaNet):
            attention += 4 * kind.value_heads * kind.key_size * kind.value_size
        elif isinstance(kind, LatentAttention):
            sizes = kind.query_size + kind.rotated_size + kind.value_size
            attention += kind.heads * sizes * model.sequence // 2
        else:
            attention += 2 * kind.heads * kind.size * model.sequence // 2
    return 6 * (active_parameters(model) + attention)


def slowdowns(stages: int, microbatches: int) -> dict[str, float]:
    """Against a pipeline without bubble, of each schedule that can run with these numbers, in closed form.

    If a backward takes twice a forward; interleaved with two chunks on each stage. The `simulate` command executes the
    plans of 1F1B and 2BW instead, which takes seconds for many microbatches, and comes to the same.
    """
    found = {"1f1b": slowdown.one_f_one_b(stages, microbatches)}
    for name, formula in slowdown.FORMULAS.items():
        if formula.holds(stages, microbatches):
            found[name] = formula.slowdown(stages, microbatches, _BACKWARD_OVER_FORWARD, _CHUNKS)
    if microbatches >= SCHEDULES["2bw"].least_microbatches(stages):
        found["2bw"] = 1.0
    return found


def tokens_a_day(model: Architecture, world: int, tflops: float, slower: float) -> float:
    """Tokens that a run trains on in a day.

    Args:
        model: its shape.
        world: GPUs.
        tflops: 1e12 operations per second of one GPU while it computes, communication within a stage included.
        slower: slowdown of the schedule, against a pipeline without bubble.
    """
    return world * tflops * 1e12 / (flops_per_token(model) * slower) * SECONDS_A_DAY
