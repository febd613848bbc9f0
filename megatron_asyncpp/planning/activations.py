"""Bytes of activations, counted as arXiv:2205.05198 counts them: what each operation keeps for its backward.

In 16 bits, without dropout, with attention that keeps no scores (flash attention; that paper's layer of 34 sbh has two
masks of dropout, sbh each, which ours hasn't, and its 5as²b of scores), and with a fused SwiGLU. Of a gated delta net
it is what fla's kernels keep. Experts are taken to get equal shares of the tokens. An estimate: what is alive for a
moment, and what an allocator loses, isn't in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_asyncpp.planning.architecture import (
    Architecture,
    DeltaNet,
    Experts,
    FullAttention,
    LatentAttention,
    Layer,
)
from megatron_asyncpp.planning.layout import Layout

_HALF, _FULL = 2, 4  # bytes
_CHUNK = 64  # of fla's delta rule


@dataclass(frozen=True)
class Activations:
    """What one microbatch leaves on one rank of a stage between its forward and its backward.

    Attributes:
        kept: bytes of all layers.
        recomputed: bytes that are there in a backward only, while layers are recomputed.
        loss: bytes of the logits, on the last stage, where each forward is followed by its backward.
    """

    kept: int
    recomputed: int
    loss: int


def stage_activations(
    model: Architecture, layout: Layout, micro_batch_size: int, recomputed_layers: int | None
) -> list[Activations]:
    """From the first stage to the last.

    Args:
        model: its shape.
        layout: over the ranks.
        micro_batch_size: samples of a microbatch.
        recomputed_layers: layers that are recomputed at a time, or None where nothing is.
    """
    tokens = model.sequence * micro_batch_size // layout.context
    layers = iter(model.layers)
    found = []
    for stage, count in enumerate(layout.stages):
        each = [_layer(model, next(layers), layout, tokens) for _ in range(count)]
        kept, again = sum(each), 0
        if recomputed_layers is not None:
            again = max((sum(each[i : i + recomputed_layers]) for i in range(0, count, recomputed_layers)), default=0)
            kept = -(-count // recomputed_layers) * _HALF * _sharded(tokens * model.hidden, layout)
        loss = _loss(model, layout, tokens) if stage == layout.pipeline - 1 else 0
        found.append(Activations(kept, again, loss))
    return found


def _sharded(elements: int, layout: Layout) -> int:
    """Elements per rank of what lies between tensor-parallel regions."""
    return elements // (layout.tensor if layout.sequence_parallel else 1)


def _loss(model: Architecture, layout: Layout, tokens: int) -> int:
    """The last norm's input and output, the logits, and their softmax in fp32."""
    ends = _HALF * 2 * _sharded(tokens * model.hidden, layout)
    return ends + (_HALF + _FULL) * tokens * model.padded_vocabulary(layout.tensor) // layout.tensor


def _layer(model: Architecture, layer: Layer, layout: Layout, tokens: int) -> int:
    """Both norms' inputs and outputs, and what the attention and the MLP keep between."""
    norms = _HALF * 4 * _sharded(tokens * model.hidden, layout)
    attention = layer.attention
    if isinstance(attention, FullAttention):
        inner = _full(model, attention, layout, tokens)
    elif isinstance(attention, LatentAttention):
        inner = _latent(attention, layout, tokens)
    else:
        inner = _delta(attention, layout, tokens)
    if layer.experts is None:
        return norms + inner + _mlp(model, model.ffn, tokens, layout.tensor)
    return norms + inner + _mixture(model, layer.experts, layout, tokens)


def _mlp(model: Architecture, ffn: int, tokens: int, tensor: int) -> int:
    """The activation function's input and output."""
    return _HALF * tokens * ffn * (3 if model.gated else 2) // tensor


def _mixture(model: Architecture, experts: Experts, layout: Layout, tokens: int) -> int:
    """The router's logits and scores in fp32 and its choice; a copy of each token for each expert it is sent to."""
    router = _sharded(tokens * experts.count, layout) * (2 * _FULL + 1)
    rows = tokens * experts.topk * layout.expert_tensor // layout.tensor
    sent = _HALF * rows * model.hidden + _mlp(model, experts.ffn, rows, layout.expert_tensor)
    return router + sent + (_mlp(model, experts.shared_ffn, tokens, layout.tensor) if experts.shared_ffn else 0)


def _full(model: Architecture, attention: FullAttention, layout: Layout, tokens: int) -> int:
    """Queries, keys, values, the output, the logarithm of each softmax's sum; the same before norms, and the gate."""
    queries, keys = attention.heads * attention.size, attention.groups * attention.size
    elements = 2 * queries + 2 * keys
    elements += (queries + keys) if model.query_norms else 0
    elements += 2 * queries if attention.output_gate else 0
    return tokens * (_HALF * elements + _FULL * attention.heads) // layout.tensor


def _latent(attention: LatentAttention, layout: Layout, tokens: int) -> int:
    """Latents before and after their norms on every rank; queries, keys, values and output of the rank's heads."""
    latents = 2 * ((attention.query_rank or 0) + attention.latent_rank)
    head = 2 * (attention.query_size + attention.rotated_size) + 2 * attention.value_size
    return tokens * (_HALF * latents + attention.heads * (_HALF * head + _FULL) // layout.tensor)


def _delta(attention: DeltaNet, layout: Layout, tokens: int) -> int:
    """What fla's kernels and the layer around them keep.

    The convolution's input; queries and keys of norm one, and once more for each head of values; values; the output
    before and after its norm and gate, and the gate; rates and decays in fp32; each chunk's triangle.
    """
    keys, values, heads = attention.keys, attention.values, attention.value_heads
    repeated = 2 * heads * attention.key_size if heads > attention.key_heads else 0
    elements = (2 * keys + values) + 2 * keys + repeated + 4 * values + heads * _CHUNK
    return tokens * (_HALF * elements + 2 * _FULL * heads) // layout.tensor
