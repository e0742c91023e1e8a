"""Gated spiral attention: softmax(g · q kᵀ / √D) v, with one gate per head and position.

The gate scales a whole row of scores, so ``g * q`` followed by ordinary attention is the same
function. Its input is the causal mean of the head-averaged queries:

    m_t = mean over heads of q_t
    c_t = (1/t) Σ_{s≤t} m_s                       float32, continued from the cache
    g_t = sigmoid(W2 · silu(W1 c_t) + b2)         float32
"""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention

from .running_sums import accumulate


class GateLinear(nn.Module):
    """A linear layer that no quantizer wraps: not an ``nn.Linear``, no ``to_quantized``.

    Tensor names are those of a linear layer: ``weight`` [out, in] and ``bias`` [out].
    """

    def __init__(self, input_dims: int, output_dims: int, bias: bool = False):
        super().__init__()
        self.weight = mx.zeros((output_dims, input_dims))
        if bias:
            self.bias = mx.zeros((output_dims,))

    def __call__(self, x: mx.array) -> mx.array:
        y = x @ self.weight.astype(mx.float32).T
        return y + self.bias.astype(mx.float32) if "bias" in self else y


def attention_gate(queries: mx.array, fc1: GateLinear, fc2: GateLinear, cache=None) -> mx.array:
    """The gate of each head and position, [B, H, T, 1] float32.

    Args:
        queries: [B, H, T, D], before RoPE or after it, as the config says.
        fc1, fc2: the gate network, weights [H, D] and [H, H].
        cache: the layer's cache, before its K and V were updated; gets the new sums.
    """
    mean_query = mx.mean(queries.astype(mx.float32), axis=1)  # [B, T, D]
    _, context = accumulate(mean_query, cache)
    gate = mx.sigmoid(fc2(nn.silu(fc1(context))))  # [B, T, H]
    return gate.swapaxes(1, 2)[..., None]


def gated_attention_ops(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    rope,
    gate: tuple[GateLinear, GateLinear] | None,
    gate_pre_rope: bool,
    cache=None,
    mask=None,
) -> mx.array:
    """Gated attention in plain operations: the specification of every faster path.

    Args:
        queries, keys, values: [B, H, T, D] as projected, before RoPE.
        rope: a function (x, offset) that rotates x [B, H, T, D].
        gate: the two layers of the gate network, or None for no gate.
        gate_pre_rope: whether the gate reads the queries before the rotation.
        cache: the layer's ``CacheList``; None for a whole sequence.
        mask: "causal", None, or a boolean array [B, 1, T, n + T].

    Returns:
        [B, H, T, D] in the dtype of ``queries``.
    """
    kv = None if cache is None else cache[0]
    offset = 0 if cache is None else kv.offset
    rotated = rope(queries, offset)
    if gate is not None:
        g = attention_gate(queries if gate_pre_rope else rotated, *gate, cache)
        rotated = (g * rotated).astype(queries.dtype)
    keys = rope(keys, offset)
    if cache is not None:
        keys, values = kv.update_and_fetch(keys, values)
    scale = queries.shape[-1] ** -0.5
    return scaled_dot_product_attention(rotated, keys, values, cache=kv, scale=scale, mask=mask)


def gated_attention(
    queries, keys, values, rope, gate, gate_pre_rope, cache=None, mask=None
) -> mx.array:
    """Gated attention by the fastest path for the device; see ``gated_attention_ops``."""
    return gated_attention_ops(queries, keys, values, rope, gate, gate_pre_rope, cache, mask)
