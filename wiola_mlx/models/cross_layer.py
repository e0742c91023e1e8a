"""The cross-layer family (Wiola 120M to 1.5B), arXiv 2607.01394.

What differs from a textbook Llama:
- Beside self-attention (grouped queries), each head attends over *depth*: to summaries of the up to
  Λ layers below, one summary a layer and position, and blends the two results by a learned scalar.
- A summary is the causal mean of a layer's outputs over time. The cache holds the running sums
  beside K and V (running_sums.py), in every layer whose output a later layer reads.
- The attention's result is gated, entry by entry, by a sigmoid of the layer's input.
- SRPE: RoPE at 1 + 1/k_s times its frequencies, with a radius that swings with the position.
- Dual-stream feed-forward: a narrow gated unit and a wide GELU one, mixed by a learned gate.
- RMSNorm adds a learned offset to its input. Tied embedding and head by default, no biases.
- In training, if asked for, similar neighbours are merged before attention (token_merging.py).

Shapes: B batch, T new tokens, d hidden size, H heads, G key/value heads, D = d/H head size,
Λ layers looked back on (fewer in the first layers), V vocabulary.
Formulas follow the published package ``wiola`` 0.1.1.
"""

import sys
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs, create_attention_mask, scaled_dot_product_attention

from .running_sums import accumulate, make_layer_cache, positions
from .tied_head import drop_tied_head
from .token_merging import at_last, find_pairs, merge, merge_ratio, unmerge

LEAK = (
    "Token merging is on: in training, a token sees its right neighbour in layers {}. "
    "The training loss leaks the future and is too low; evaluation is not affected."
)


@dataclass
class ModelArgs(BaseModelArgs):
    model_type: str = "wiola"
    vocab_size: int = 32000
    hidden_size: int = 1024
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 4  # None: as many as there are heads
    max_position_embeddings: int = 2048  # the trained length; nothing breaks past it
    dsff_narrow_size: int = 1024
    dsff_wide_size: int = 4096
    srpe_theta: float = 10000.0
    srpe_spiral_divisor: float = 8
    srpe_radial_amplitude: float = 0.1
    srpe_radial_frequency: float = 0.01
    atm_threshold: float = 0.92
    atm_enabled: bool = True  # only kept: merging is off until Model.set_token_merging
    gcla_lookback: int = 2
    gcla_gate_init: float = -3.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True

    def __post_init__(self):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        for name in (
            "num_attention_heads",
            "num_key_value_heads",
            "gcla_lookback",
            "srpe_theta",
            "srpe_spiral_divisor",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, which is not above 0")
        if self.rms_norm_eps < 0:
            raise ValueError(f"rms_norm_eps is {self.rms_norm_eps}, which is below 0")
        if self.srpe_theta < 1:
            raise ValueError(f"srpe_theta is {self.srpe_theta}, which is below 1")
        if self.hidden_size % self.num_attention_heads or self.head_dim % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be num_attention_heads "
                f"{self.num_attention_heads} times an even head size"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


PRESETS = {
    "120m": ModelArgs(
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        dsff_narrow_size=768,
        dsff_wide_size=3072,
    ),
    "360m": ModelArgs(),
    "700m": ModelArgs(
        hidden_size=1536,
        num_hidden_layers=24,
        num_key_value_heads=8,
        dsff_narrow_size=1536,
        dsff_wide_size=6144,
    ),
    "1.5b": ModelArgs(
        hidden_size=2048,
        num_hidden_layers=28,
        num_key_value_heads=8,
        dsff_narrow_size=2048,
        dsff_wide_size=8192,
    ),
}


class OffsetRMSNorm(nn.Module):
    """weight · z / √(mean(z²) + eps) with z = x + offset, in float32 inside."""

    def __init__(self, dims: int, eps: float):
        super().__init__()
        self.weight = mx.ones((dims,))
        self.offset = mx.zeros((dims,))
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        z = x.astype(mx.float32) + self.offset.astype(mx.float32)
        return mx.fast.rms_norm(z, self.weight.astype(mx.float32), self.eps).astype(x.dtype)


class SRPE(nn.Module):
    """RoPE at ω_j · (1 + 1/k_s), pairs (j, j + D/2), times the radius 1 + a_s · sin(p · f_s · ω_j).

    ω_j = theta^(−2j/D). The rotation is linear, so the radius can be multiplied in after it.
    """

    def __init__(self, args: ModelArgs):
        super().__init__()
        D = args.head_dim
        omega = [args.srpe_theta ** (-2 * j / D) for j in range(D // 2)]
        winding = 1 + 1 / args.srpe_spiral_divisor
        # mx.fast.rope takes periods. Lists, so that no unevaluated graph outlives this thread.
        self._freqs = mx.array([1 / (w * winding) for w in omega])
        self._radial_freqs = mx.array([w * args.srpe_radial_frequency for w in omega] * 2)
        self._amplitude = args.srpe_radial_amplitude

    def radius(self, offset, length: int) -> mx.array:
        """[B or 1, 1, length, D] float32, of the positions from ``offset`` on, an int or [B]."""
        angle = positions(offset, length)[:, None, :, None] * self._radial_freqs
        return 1 + self._amplitude * mx.sin(angle)

    def __call__(self, x: mx.array, offset, radius: mx.array) -> mx.array:
        """x [B, H, T, D] at the positions from ``offset``; ``radius`` is that of the same ones."""
        rotated = mx.fast.rope(
            x.astype(mx.float32),
            x.shape[-1],
            traditional=False,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=self._freqs,
        )
        return (rotated * radius).astype(x.dtype)


class Attention(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.n_heads, self.n_kv_heads = args.num_attention_heads, args.num_key_value_heads
        self.scale = args.head_dim**-0.5
        dim = args.hidden_size
        kv_dim = self.n_kv_heads * args.head_dim
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.gate_proj = nn.Linear(dim, dim, bias=False)
        # Layer 0 has no context and never uses these three; checkpoints hold them all the same.
        self.k_ctx_proj = nn.Linear(dim, kv_dim, bias=False)
        self.v_ctx_proj = nn.Linear(dim, kv_dim, bias=False)
        self.blend_logit = mx.array(float(args.gcla_gate_init))  # 0-d
        self.srpe = SRPE(args)

    def __call__(self, x: mx.array, mask=None, cache=None, context=None, radius=None) -> mx.array:
        """Attention of x [B, T, d] to the sequence and, blended in, to the context.

        Args:
            mask: "causal", None, or a boolean array [B, 1, T, n + T].
            cache: the layer's ``CacheList``; None for a whole sequence.
            context: summaries of the layers below, [B, T, Λ, d]; None in layer 0.
            radius: ``SRPE.radius`` of the new positions, the same in every layer.
        """
        B, T, _ = x.shape
        q = self.q_proj(x).reshape(B, T, self.n_heads, -1).swapaxes(1, 2)  # [B, H, T, D]
        k, v = (
            proj(x).reshape(B, T, self.n_kv_heads, -1).swapaxes(1, 2)  # [B, G, T, D]
            for proj in (self.k_proj, self.v_proj)
        )
        kv = None if cache is None else cache[0]
        offset = 0 if kv is None else kv.offset
        if radius is None:
            radius = self.srpe.radius(offset, T)
        q, k = self.srpe(q, offset, radius), self.srpe(k, offset, radius)
        if kv is not None:
            k, v = kv.update_and_fetch(k, v)
        # First: mlx-lm's attention over a quantized cache scales its queries in place.
        from_context = None if context is None else self.attend_to_context(q, context)
        out = scaled_dot_product_attention(q, k, v, cache=kv, scale=self.scale, mask=mask)
        out = out.swapaxes(1, 2)  # [B, T, H, D]
        if from_context is not None:
            blend = mx.sigmoid(self.blend_logit.astype(mx.float32))
            out = (1 - blend) * out + blend * from_context
        gate = mx.sigmoid(self.gate_proj(x))
        return self.o_proj(gate * out.astype(x.dtype).reshape(B, T, -1))

    def attend_to_context(self, queries: mx.array, context: mx.array) -> mx.array:
        """Attention of each position's heads to its own Λ summaries: [B, T, H, D].

        Args:
            queries: [B, H, T, D], rotated; the keys of summaries have no position.
            context: [B, T, Λ, d].
        """
        B, H, T, D = queries.shape
        q = queries.swapaxes(1, 2).reshape(B, T, self.n_kv_heads, -1, D)  # [B, T, G, H/G, D]
        k, v = (
            proj(context).reshape(B, T, -1, self.n_kv_heads, D).swapaxes(2, 3)  # [B, T, G, Λ, D]
            for proj in (self.k_ctx_proj, self.v_ctx_proj)
        )
        scores = (self.scale * q) @ k.swapaxes(-1, -2)  # [B, T, G, H/G, Λ]
        return (mx.softmax(scores, axis=-1, precise=True) @ v).reshape(B, T, H, D)


class DualStreamFeedForward(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        dim, narrow, wide = args.hidden_size, args.dsff_narrow_size, args.dsff_wide_size
        self.gate_a = nn.Linear(dim, narrow, bias=False)
        self.up_a = nn.Linear(dim, narrow, bias=False)
        self.down_a = nn.Linear(narrow, dim, bias=False)
        self.up_b = nn.Linear(dim, wide, bias=False)
        self.down_b = nn.Linear(wide, dim, bias=False)
        self.fusion = nn.Linear(2 * dim, dim, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        a = self.down_a(nn.silu(self.gate_a(x)) * self.up_a(x))
        b = self.down_b(nn.gelu(self.up_b(x)))
        mix = mx.sigmoid(self.fusion(mx.concatenate([a, b], axis=-1)))
        return mix * a + (1 - mix) * b


class DecoderLayer(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.input_norm = OffsetRMSNorm(args.hidden_size, args.rms_norm_eps)
        self.attn = Attention(args)
        self.post_attn_norm = OffsetRMSNorm(args.hidden_size, args.rms_norm_eps)
        self.ffn = DualStreamFeedForward(args)
        self.merge_threshold = args.atm_threshold
        self.token_merging = False

    def __call__(self, x: mx.array, mask=None, cache=None, context=None, radius=None) -> mx.array:
        attend = self.merged_attention if self.merges(x, cache) else self.attn
        h = x + attend(self.input_norm(x), mask, cache, context, radius)
        return h + self.ffn(self.post_attn_norm(h))

    def merges(self, x: mx.array, cache=None) -> bool:
        return self.token_merging and self.training and cache is None and x.shape[1] > 1

    def merged_attention(self, x: mx.array, mask, cache, context, radius) -> mx.array:
        pairs = find_pairs(x, self.merge_threshold)
        if context is not None:
            context = at_last(context, pairs)
        # Merged tokens are at the front: the causal mask keeps them from what follows the last one.
        return unmerge(self.attn(merge(x, pairs), mask, cache, context, radius), pairs)


class WiolaModel(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.lookback = args.gcla_lookback
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [DecoderLayer(args) for _ in range(args.num_hidden_layers)]
        self.final_norm = OffsetRMSNorm(args.hidden_size, args.rms_norm_eps)

    def __call__(self, inputs: mx.array, cache=None, input_embeddings=None) -> mx.array:
        return self.final_norm(self.hidden_states(inputs, cache, input_embeddings)[-1])

    def hidden_states(self, inputs: mx.array, cache=None, input_embeddings=None) -> list[mx.array]:
        """The embeddings and then each layer's output, all [B, T, d]."""
        h = self.embed_tokens(inputs) if input_embeddings is None else input_embeddings
        if cache is None:
            cache = [None] * len(self.layers)
        kv = cache[0] and cache[0][0]
        mask = create_attention_mask(h, kv)
        radius = self.layers[0].attn.srpe.radius(0 if kv is None else kv.offset, h.shape[1])
        states, summaries = [h], []
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            context = mx.stack(summaries[-self.lookback :], axis=2) if summaries else None
            h = layer(h, mask, layer_cache, context, radius)
            states.append(h)
            if layer is not self.layers[-1]:
                _, mean = accumulate(h, layer_cache)
                summaries.append(mean.astype(h.dtype))
        return states


class Model(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.model = WiolaModel(args)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def __call__(self, inputs: mx.array, cache=None, input_embeddings=None) -> mx.array:
        """Logits [B, T, V] of token ids [B, T].

        Args:
            cache: what ``make_cache`` returned, one entry a layer, updated in place; None for a
                whole sequence. Left- and right-padded batches are told by the cache.
            input_embeddings: [B, T, d] in place of the ids' rows.
        """
        h = self.model(inputs, cache, input_embeddings)
        if self.args.tie_word_embeddings:
            return self.model.embed_tokens.as_linear(h)
        return self.lm_head(h)

    def set_token_merging(self, enabled: bool = True):
        """Token merging in the middle third of the layers; it acts in training mode only.

        It leaks the future into the training loss, and says so on stderr. The config's
        ``atm_enabled`` does not turn it on.
        """
        L = len(self.layers)
        middle = range(L // 3, 2 * L // 3)
        for i in middle:
            self.layers[i].token_merging = enabled
        if enabled:
            print(LEAK.format(list(middle)), file=sys.stderr)

    def merge_ratios(self, inputs: mx.array) -> mx.array:
        """The share of the tokens [B, T] that merging takes away in each layer now, [L] float32."""
        states = self.model.hidden_states(inputs)
        return mx.stack(
            [
                merge_ratio(find_pairs(layer.input_norm(x), layer.merge_threshold))
                if layer.merges(x)
                else mx.array(0.0)
                for layer, x in zip(self.layers, states[:-1], strict=True)
            ]
        )

    def sanitize(self, weights: dict) -> dict:
        return drop_tied_head(weights) if self.args.tie_word_embeddings else weights

    @property
    def layers(self) -> list:
        return self.model.layers

    @property
    def cast_predicate(self):
        return lambda path: not path.endswith((".blend_logit", ".offset"))  # these stay float32

    def make_cache(self) -> list:
        last = len(self.layers) - 1  # no layer reads its output
        return [make_layer_cache(sums=i < last) for i in range(len(self.layers))]
