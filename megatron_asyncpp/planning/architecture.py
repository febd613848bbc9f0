"""A GPT model's shape, as Megatron's flags give it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FullAttention:
    """Softmax attention, with as many key and value heads as there are groups.

    Attributes:
        heads: of queries.
        groups: of query heads; each has one head of keys and one of values.
        size: of a head.
        qkv_bias: whether queries, keys and values have one.
        output_gate: whether the output is multiplied by a gate, which is computed with the queries.
    """

    heads: int
    groups: int
    size: int
    qkv_bias: bool
    output_gate: bool


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (arXiv:2405.04434), sizes in elements.

    Attributes:
        heads: of everything.
        query_rank: of the latent queries, or None where they aren't compressed.
        latent_rank: of the latent keys and values.
        query_size: of a head of queries and keys, without what is rotated.
        rotated_size: of the rotated part of a head.
        value_size: of a head of values.
    """

    heads: int
    query_rank: int | None
    latent_rank: int
    query_size: int
    rotated_size: int
    value_size: int


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net (arXiv:2412.06464).

    Attributes:
        key_heads: of queries and keys.
        value_heads: of values; a multiple of ``key_heads``.
        key_size: of a head of queries or keys.
        value_size: of a head of values.
        taps: of the convolution.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int

    @property
    def keys(self) -> int:
        """Elements of all keys of a token."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Elements of all values of a token."""
        return self.value_heads * self.value_size


Attention = FullAttention | LatentAttention | DeltaNet


@dataclass(frozen=True)
class Experts:
    """A mixture of experts.

    Attributes:
        count: of experts.
        topk: experts for each token.
        ffn: inner width of each.
        shared_ffn: inner width of the expert that all tokens go through, 0 without one.
        shared_gate: whether that expert's output has a gate.
    """

    count: int
    topk: int
    ffn: int
    shared_ffn: int
    shared_gate: bool


@dataclass(frozen=True)
class Layer:
    """One layer: its attention, and its experts, or None for a dense MLP."""

    attention: Attention
    experts: Experts | None


@dataclass(frozen=True)
class Architecture:
    """A whole model.

    Attributes:
        layers: from the first to the last.
        hidden: width.
        ffn: inner width of a dense MLP.
        vocabulary: tokens, before padding.
        vocabulary_multiple: what Megatron pads their number to a multiple of, times the tensor-parallel size.
        positions: learned position embeddings, 0 for none.
        sequence: tokens in a sample.
        tied: whether the output weights are the embedding.
        gated: whether an MLP has a gate (SwiGLU).
        bias: whether linear layers have one.
        norm_vectors: weights of a norm, in vectors: 1 for RMSNorm, 2 for LayerNorm.
        query_norms: whether queries and keys (or, with latent attention, what they are made from) have norms.
    """

    layers: tuple[Layer, ...]
    hidden: int
    ffn: int
    vocabulary: int
    vocabulary_multiple: int
    positions: int
    sequence: int
    tied: bool
    gated: bool
    bias: bool
    norm_vectors: int
    query_norms: bool

    def padded_vocabulary(self, tensor: int) -> int:
        """Rows of the embedding under so much tensor parallelism."""
        multiple = self.vocabulary_multiple * tensor
        return -(-self.vocabulary // multiple) * multiple

    @property
    def experts(self) -> Experts | None:
        """Of the layers that have some; all have the same."""
        return next((layer.experts for layer in self.layers if layer.experts is not None), None)
