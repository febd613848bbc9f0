"""How many parameters a model has, in all and on one rank, in closed form: as Megatron's modules make them."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Count:
    """Parameters, by what optimizers and data parallelism do with them.

    Attributes:
        matrices: of linear layers outside of experts, which Muon steps.
        others: embeddings, output weights, norms, biases and all that isn't a matrix.
        experts: of experts, whose replicas are others than those of the rest.
    """

    matrices: int = 0
    others: int = 0
    experts: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.matrices + other.matrices, self.others + other.others, self.experts + other.experts)

    @property
    def dense(self) -> int:
        """All but experts."""
        return self.matrices + self.others

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts


@dataclass(frozen=True)
class _Share:
    """Ranks that a layer's weights are divided over."""

    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1


_WHOLE = _Share()


def stage_parameters(model: Architecture, layout: Layout) -> list[Count]:
    """What one rank of each stage holds, from the first stage to the last.

    With tied embeddings the last of several stages holds a copy of its own.
    """
    share = _Share(layout.tensor, layout.expert, layout.expert_tensor)
    layers = iter(model.layers)
    counts = []
    for stage, count in enumerate(layout.stages):
        total = sum((_layer(model, next(layers), share) for _ in range(count)), Count())
        if stage == 0:
            total += _embedding(model, layout.tensor)
        if stage == layout.pipeline - 1:
            total += _norm(model, model.hidden)
            if not model.tied or layout.pipeline > 1:
                total += _vocabulary(model, layout.tensor)
        counts.append(total)
    return counts


def total_parameters(model: Architecture) -> int:
    """Of the whole model; a tied embedding counts once."""
    layers = sum((_layer(model, layer, _WHOLE) for layer in model.layers), Count())
    ends = _embedding(model, 1) + _norm(model, model.hidden) + (Count() if model.tied else _vocabulary(model, 1))
    return (layers + ends).total


def active_parameters(model: Architecture) -> int:
    """What a token is multiplied with: all but the experts it isn't sent to, and but the embedding's looked-up rows.

    Output weights count, so a tied embedding does.
    """
    idle = sum(_idle(model, layer.experts) for layer in model.layers if layer.experts is not None)
    looked_up = _embedding(model, 1).total - (_vocabulary(model, 1).total if model.tied else 0)
    return total_parameters(model) - idle - looked_up


def _idle(model: Architecture, experts: Experts) -> int:
    return _mlp(model, experts.ffn, 1).total * (experts.count - experts.topk)


def _embedding(model: Architecture, tensor: int) -> Count:
    return _vocabulary(model, tensor) + Count(others=model.positions * model.hidden)


def _vocabulary(model: Architecture, tensor: int) -> Count:
    return Count(others=model.padded_vocabulary(tensor) // tensor * model.hidden)


def _norm(model: Architecture, size: int) -> Count:
    return Count(others=model.norm_vectors * size)


def _layer(model: Architecture, layer: Layer, share: _Share) -> Count:
    norms = _norm(model, model.hidden) + _norm(model, model.hidden)
    attention = _attention(model, layer.attention, share.tensor)
    if layer.experts is None:
        return norms + attention + _mlp(model, model.ffn, share.tensor)
    return norms + attention + _mixture(model, layer.experts, share)


def _mlp(model: Architecture, ffn: int, tensor: int) -> Count:
    inner = ffn * (2 if model.gated else 1) // tensor
    biases = inner + model.hidden if model.bias else 0
    return Count(matrices=model.hidden * inner + ffn // tensor * model.hidden, others=biases)


def _mixture(model: Architecture, experts: Experts, share: _Share) -> Count:
    router = Count(matrices=model.hidden * experts.count, others=experts.count if model.bias else 0)
    local = Count(experts=_mlp(model, experts.ffn, share.expert_tensor).total * (experts.count // share.expert))
    shared = _mlp(model, experts.shared_ffn, share.tensor) if experts.shared_ffn else Count()
    return router + local + shared + Count(matrices=model.hidden if experts.shared_gate else 0)


def _attention(model: Architecture, attention: Attention, tensor: int) -> Count:
    if isinstance(attention, FullAttention):
        return _full(model, attention, tensor)
    return (
        _latent(model, attention, tensor)
        if isinstance(attention, LatentAttention)
        else _delta(model, attention, tensor)
    )


def _full(model: Architecture, attention: FullAttention, tensor: int) -> Count:
    queries = attention.heads * attention.size
    made = (queries * (2 if attention.output_gate else 1) + 2 * attention.groups * attention.size) // tensor
    norms = _norm(model, 2 * attention.size) if model.query_norms else Count()
    biases = (made if model.bias or attention.qkv_bias else 0) + (model.hidden if model.bias else 0)
    return norms + Count(matrices=model.hidden * (made + queries // tensor), others=biases)


def _latent(model: Architecture, attention: LatentAttention, tensor: int) -> Count:
    """The projections to latents are whole on every rank, as with TransformerEngine's layers."""
    heads, latent = attention.heads // tensor, attention.latent_rank
    query = attention.query_size + attention.rotated_size
    matrices = model.hidden * (latent + attention.rotated_size)
    matrices += latent * heads * (attention.query_size + attention.value_size)
    matrices += heads * attention.value_size * model.hidden
    norms = latent
    if attention.query_rank is None:
        matrices += model.hidden * heads * query
    else:
        matrices += attention.query_rank * (model.hidden + heads * query)
        norms += attention.query_rank
    biases = model.hidden if model.bias else 0
    return Count(matrices, biases) + (_norm(model, norms) if model.query_norms else Count())


def _delta(model: Architecture, attention: DeltaNet, tensor: int) -> Count:
    keys, values, heads = (n // tensor for n in (attention.keys, attention.values, attention.value_heads))
    convolution = (2 * keys + values) * attention.taps
    decays = 2 * heads  # A_log and dt_bias
    matrices = model.hidden * (2 * keys + 2 * values + 2 * heads) + values * model.hidden
    return Count(matrices, convolution + decays) + _norm(model, attention.value_size)
