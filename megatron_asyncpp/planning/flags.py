"""Reads what a plan needs from Megatron's flags. The rest of a command line says nothing about sizes and is ignored."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from megatron_asyncpp import models
from megatron_asyncpp.arguments import add_arguments, config_from
from megatron_asyncpp.errors import AsyncPPError
from megatron_asyncpp.planning.architecture import (
    Architecture,
    Attention,
    DeltaNet,
    Experts,
    FullAttention,
    LatentAttention,
    Layer,
)
from megatron_asyncpp.planning.layout import Layout
from megatron_asyncpp.schedules import SCHEDULES, Schedule
from megatron_asyncpp.stage_layers import even_stages, stages_of

# Flags with a number, and Megatron's default.
_NUMBERS: dict[str, int | None] = {
    "num-layers": None,
    "hidden-size": None,
    "ffn-hidden-size": None,
    "num-attention-heads": None,
    "num-query-groups": 1,
    "kv-channels": None,
    "vocab-size": None,
    "padded-vocab-size": None,
    "make-vocab-size-divisible-by": 128,
    "max-position-embeddings": None,
    "seq-length": None,
    "q-lora-rank": None,
    "kv-lora-rank": 32,
    "qk-head-dim": 128,
    "qk-pos-emb-head-dim": 64,
    "v-head-dim": 128,
    "linear-conv-kernel-dim": 4,
    "linear-key-head-dim": 128,
    "linear-value-head-dim": 128,
    "linear-num-key-heads": 16,
    "linear-num-value-heads": 32,
    "num-experts": None,
    "moe-router-topk": 2,
    "moe-ffn-hidden-size": None,
    "moe-shared-expert-intermediate-size": None,
    "tensor-model-parallel-size": 1,
    "pipeline-model-parallel-size": 1,
    "context-parallel-size": 1,
    "expert-model-parallel-size": 1,
    "expert-tensor-parallel-size": None,
    "decoder-first-pipeline-num-layers": None,
    "decoder-last-pipeline-num-layers": None,
    "micro-batch-size": 1,
    "global-batch-size": None,
    "recompute-num-layers": 1,
}
_SWITCHES = (
    *("group-query-attention", "untie-embeddings-and-output-weights", "swiglu", "disable-bias-linear", "add-qkv-bias"),
    *("qk-layernorm", "attention-output-gate", "multi-latent-attention", "moe-shared-expert-gate", "bf16"),
    *("sequence-parallel", "use-distributed-optimizer", "grad-reduce-in-bf16"),
)
_TEXTS: dict[str, str | None] = {
    "position-embedding-type": "learned_absolute",
    "normalization": "LayerNorm",
    "experimental-attention-variant": None,
    "linear-attention-freq": None,
    "moe-layer-freq": "1",
    "pipeline-model-parallel-layout": None,
    "optimizer": "adam",
    "clip-grad": "1.0",
    "recompute-granularity": None,
    "recompute-method": None,
}
# What changes sizes and isn't in the formulas.
_UNKNOWN = (
    *("mtp-num-layers", "hybrid-layer-pattern", "hybrid-override-pattern", "heterogeneous-layers-config-path"),
    *("moe-latent-size", "spec", "num-layers-per-virtual-pipeline-stage", "account-for-embedding-in-pipeline-split"),
    *("account-for-loss-in-pipeline-split", "num-virtual-stages-per-pipeline-rank", "fp16"),
)


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise AsyncPPError(f"the Megatron flags can't be read: {message}")


@dataclass(frozen=True)
class Request:
    """What a command line asks for.

    Attributes:
        model: its shape.
        layout: over the ranks.
        args: the flags that say how it is trained, and the plugin's own.
        microbatches: M, of a batch.
    """

    model: Architecture
    layout: Layout
    args: Namespace
    microbatches: int


def read(flags: list[str], world_size: int, microbatches: int | None) -> Request:
    """Read Megatron's and the plugin's flags.

    Args:
        flags: as on a command line; ``--asyncpp-model`` counts.
        world_size: ranks.
        microbatches: M, where it doesn't come from ``--global-batch-size``.

    Raises:
        AsyncPPError: they make no sense, or a formula knows nothing of one of them.
    """
    args = _parse(models.expanded(flags))
    model = architecture(args)
    layout = _layout(args, world_size, len(model.layers))
    layout.check(model)
    return Request(model, layout, args, _microbatches(args, layout, microbatches))


def shape(flags: list[str]) -> Architecture:
    """The shape of the model that flags describe, whatever its layout.

    Raises:
        AsyncPPError: they make no sense, or a formula knows nothing of one of them.
    """
    return architecture(_parse(models.expanded(flags)))


def _parse(words: list[str]) -> Namespace:
    parser = _Parser(add_help=False, allow_abbrev=False, prog="plan")
    for name, number in _NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    for name, text in _TEXTS.items():
        parser.add_argument(f"--{name}", default=text)
    parser.add_argument("--num-layers-in-first-pipeline-stage", dest="decoder_first_pipeline_num_layers", type=int)
    parser.add_argument("--num-layers-in-last-pipeline-stage", dest="decoder_last_pipeline_num_layers", type=int)
    add_arguments(parser)
    args, rest = parser.parse_known_args(words)
    for word in rest:
        if word.partition("=")[0].removeprefix("--") in _UNKNOWN and word.startswith("--"):
            raise AsyncPPError(f"the formulas know nothing of {word.partition('=')[0]}: leave it out to get a plan")
    return args


def architecture(args: Namespace) -> Architecture:
    """The model's shape.

    Raises:
        AsyncPPError: a size is missing, or a layer's kind can't be read.
    """
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        value = getattr(args, name)
        if value is None or value < 1:
            raise AsyncPPError(
                f"a plan needs --{name.replace('_', '-')}, at least 1: give Megatron's flags after --, or a --model"
            )
    vocabulary, multiple = args.vocab_size, args.make_vocab_size_divisible_by
    if args.padded_vocab_size is not None:
        vocabulary, multiple = args.padded_vocab_size, 1
    if vocabulary is None:
        raise AsyncPPError("a plan needs --vocab-size, since it reads no tokenizer: give it")
    learned = args.position_embedding_type == "learned_absolute"
    if learned and args.max_position_embeddings is None:
        raise AsyncPPError("learned position embeddings need --max-position-embeddings: give it")
    ffn = args.ffn_hidden_size or (int(4 * args.hidden_size * 2 / 3 / 64) * 64 if args.swiglu else 4 * args.hidden_size)
    return Architecture(
        layers=_layers(args, ffn),
        hidden=args.hidden_size,
        ffn=ffn,
        vocabulary=vocabulary,
        vocabulary_multiple=multiple,
        positions=args.max_position_embeddings if learned else 0,
        sequence=args.seq_length,
        tied=not args.untie_embeddings_and_output_weights,
        gated=args.swiglu,
        bias=not args.disable_bias_linear,
        norm_vectors=1 if args.normalization == "RMSNorm" else 2,
        query_norms=args.qk_layernorm,
    )


def _layers(args: Namespace, ffn: int) -> tuple[Layer, ...]:
    count = args.num_layers
    full = _full_or_latent(args)
    attentions: list[Attention] = [full] * count
    if args.experimental_attention_variant == "gated_delta_net":
        if args.linear_attention_freq is None:
            raise AsyncPPError("gated delta nets need --linear-attention-freq: say which layers they are")
        delta = DeltaNet(
            key_heads=args.linear_num_key_heads,
            value_heads=args.linear_num_value_heads,
            key_size=args.linear_key_head_dim,
            value_size=args.linear_value_head_dim,
            taps=args.linear_conv_kernel_dim,
        )
        pattern = _pattern("--linear-attention-freq", args.linear_attention_freq, count, lambda i, n: (i + 1) % n != 0)
        attentions = [delta if linear else full for linear in pattern]
    elif args.experimental_attention_variant is not None:
        raise AsyncPPError(
            f"the formulas know nothing of --experimental-attention-variant {args.experimental_attention_variant}: "
            f"leave it out to get a plan"
        )
    mixtures: list[Experts | None] = [None] * count
    if args.num_experts is not None:
        if not 1 <= args.moe_router_topk <= args.num_experts:
            raise AsyncPPError(
                f"--moe-router-topk {args.moe_router_topk} of --num-experts {args.num_experts} can't be chosen: "
                f"give at least 1, and no more than there are"
            )
        experts = Experts(
            count=args.num_experts,
            topk=args.moe_router_topk,
            ffn=args.moe_ffn_hidden_size or ffn,
            shared_ffn=args.moe_shared_expert_intermediate_size or 0,
            shared_gate=args.moe_shared_expert_gate,
        )
        pattern = _pattern("--moe-layer-freq", args.moe_layer_freq, count, lambda i, n: i % n == 0)
        mixtures = [experts if has else None for has in pattern]
    return tuple(Layer(a, m) for a, m in zip(attentions, mixtures, strict=True))


def _full_or_latent(args: Namespace) -> Attention:
    heads = args.num_attention_heads
    if args.multi_latent_attention:
        return LatentAttention(
            heads=heads,
            query_rank=args.q_lora_rank,
            latent_rank=args.kv_lora_rank,
            query_size=args.qk_head_dim,
            rotated_size=args.qk_pos_emb_head_dim,
            value_size=args.v_head_dim,
        )
    return FullAttention(
        heads=heads,
        groups=args.num_query_groups if args.group_query_attention else heads,
        size=args.kv_channels or args.hidden_size // heads,
        qkv_bias=args.add_qkv_bias,
        output_gate=args.attention_output_gate,
    )


def _pattern(flag: str, text: str, count: int, every: Callable[[int, int], bool]) -> list[bool]:
    """Which layers are of the rarer kind: from a number n, or a list of 0 and 1 with ``+`` and ``*`` as in Python."""
    if re.fullmatch(r"\d+", text) and int(text) > 0:
        return [every(i, int(text)) for i in range(count)]
    found = _listed(text.replace(" ", ""))
    if found is None or len(found) != count:
        raise AsyncPPError(
            f"{flag} {text} doesn't say 0 or 1 for each of {count} layers: give a number, or such a list"
        )
    return found


def _listed(text: str) -> list[bool] | None:
    while True:
        shorter = re.sub(r"\[([01,]*)\]\*(\d+)", lambda m: f"[{','.join([m[1]] * int(m[2]))}]", text)
        shorter = re.sub(r"\[([01,]*)\]\+\[([01,]*)\]", r"[\1,\2]", shorter)
        shorter = re.sub(r"\((\[[01,]*\])\)", r"\1", shorter)
        if shorter == text:
            break
        text = shorter
    match = re.fullmatch(r"\[([01](?:,[01])*)\]", text)
    return None if match is None else [value == "1" for value in match[1].split(",")]


def _layout(args: Namespace, world_size: int, layers: int) -> Layout:
    pipeline = args.pipeline_model_parallel_size
    if args.pipeline_model_parallel_layout is not None:
        stages = stages_of(args.pipeline_model_parallel_layout, layers, pipeline)
    else:
        first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
        stages = even_stages(layers, pipeline, first, last)
    tensor = args.tensor_model_parallel_size
    return Layout(
        world=world_size,
        tensor=tensor,
        stages=stages,
        context=args.context_parallel_size,
        expert=args.expert_model_parallel_size,
        expert_tensor=tensor if args.expert_tensor_parallel_size is None else args.expert_tensor_parallel_size,
        sequence_parallel=args.sequence_parallel and tensor > 1,
    )


def _microbatches(args: Namespace, layout: Layout, given: int | None) -> int:
    if args.micro_batch_size < 1:
        raise AsyncPPError(f"--micro-batch-size {args.micro_batch_size} leaves nothing to train on: give at least 1")
    if given is not None:
        count = given
    elif args.global_batch_size is None:
        raise AsyncPPError("a plan needs --microbatches, or --global-batch-size: give one of them")
    else:
        at_once = args.micro_batch_size * layout.data
        if args.global_batch_size % at_once:
            raise AsyncPPError(
                f"--global-batch-size {args.global_batch_size} isn't a multiple of the {at_once} samples of one "
                f"microbatch on all {layout.data} replicas: change it, or --micro-batch-size"
            )
        count = args.global_batch_size // at_once
    if count < 1:
        raise AsyncPPError(f"--microbatches {count} leaves nothing to train on: give at least 1")
    least = schedule_of(args).least_microbatches(layout.pipeline)
    if count < least:
        wide = ", leave out --asyncpp-lead wide" if args.asyncpp_lead == "wide" else ""
        raise AsyncPPError(
            f"2BW needs at least {least} microbatches for {layout.pipeline} stages, and there are {count}: raise "
            f"--microbatches or --global-batch-size{wide}, or lower --pipeline-model-parallel-size"
        )
    return count


def schedule_of(args: Namespace) -> Schedule:
    """The schedule that the flags ask for; without one it is Megatron's."""
    config = config_from(args)
    return SCHEDULES["1f1b"] if config is None else config.schedule
