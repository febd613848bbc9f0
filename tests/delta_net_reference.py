"""The gated delta net, literally: one token after the other, as its paper writes it (arXiv:2412.06464, equation 10)."""

from __future__ import annotations

import torch
from torch import Tensor


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """S_t = a_t S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T and o_t = S_t q_t / sqrt(key dimension), a_t = exp(g_t).

    Args:
        q: [batch, sequence, heads, key dimension], as are k and, with the value dimension, v.
        g: [batch, sequence, heads], as is beta.
    """
    batch, sequence, heads, size = q.shape
    state = q.new_zeros(batch, heads, v.shape[-1], size)
    outputs = []
    for t in range(sequence):
        key, value, rate = k[:, t], v[:, t], beta[:, t, :, None, None]
        kept = g[:, t].exp()[:, :, None, None] * state
        recalled = torch.einsum("bhvk,bhk->bhv", kept, key)
        state = kept + rate * torch.einsum("bhv,bhk->bhvk", value - recalled, key)
        outputs.append(torch.einsum("bhvk,bhk->bhv", state, q[:, t]) / size**0.5)
    return torch.stack(outputs, 1)


def layer(x: Tensor, weights: dict[str, Tensor], key_heads: int, value_heads: int, key: int, value: int) -> Tensor:
    """The whole layer, from its input [sequence, batch, hidden] to its output of the same shape.

    Args:
        x: the input.
        weights: named as Megatron names them.
        key_heads: heads of q and k; each serves value_heads / key_heads of v.
        value_heads: heads of v.
        key: size of a head of q and k.
        value: size of a head of v.
    """
    sequence, batch, _ = x.shape
    sizes = [key_heads * key, key_heads * key, value_heads * value, value_heads * value, value_heads, value_heads]
    *qkv, z, b, a = (x.transpose(0, 1) @ weights["in_proj.weight"].T).split(sizes, -1)
    taps = weights["conv1d.weight"][:, 0]  # the last one is the present token's
    mixed = torch.cat(qkv, -1)
    padded = torch.cat([mixed.new_zeros(batch, taps.shape[1] - 1, mixed.shape[2]), mixed], 1)
    convolved = sum(padded[:, i : i + sequence] * taps[:, i] for i in range(taps.shape[1]))
    q, k, v = (part.unflatten(-1, (-1, size)) for part, size in zip(
        torch.nn.functional.silu(convolved).split(sizes[:3], -1), (key, key, value), strict=True
    ))  # fmt: skip
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    q, k = (part.repeat_interleave(value_heads // key_heads, 2) for part in (q, k))
    g = -weights["A_log"].exp() * torch.nn.functional.softplus(a + weights["dt_bias"])
    o = recurrence(q, k, v, g, b.sigmoid())
    o = o * (o.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weights["out_norm.weight"]
    o = o * torch.nn.functional.silu(z.unflatten(-1, (-1, value)))
    return o.flatten(2).transpose(0, 1) @ weights["out_proj.weight"].T
