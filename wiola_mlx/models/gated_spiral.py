"""The gated spiral family (Wiola 13M: Nano, Micro, Small), arXiv 2608.14604.

What differs from a textbook Llama:
- Attention scores are scaled by a gate per head and position, computed from the causal mean of the
  queries (gated_attention.py). The cache holds the running sums beside K and V (running_sums.py).
- Spiral RoPE: each frequency of RoPE is stretched by 1 + alpha · √(i+1) / √(D/2).
- Butterfly feed-forward: a gated unit with a linear bypass, down(silu(a)·b + bypass(x)).
- Plain multi-head attention, no biases but the gate's, tied embedding and head by default.

Shapes: B batch, T new tokens, d hidden size, H heads, D = d/H head size, V vocabulary.
Formulas follow the published package ``wiola13m`` 1.0.1.
"""

from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs, create_attention_mask

from .gated_attention import GateLinear, gated_attention
from .running_sums import make_layer_cache
from .tied_head import drop_tied_head


@dataclass
class ModelArgs(BaseModelArgs):
    model_type: str = "wiola"
    vocab_size: int = 32000
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    max_position_embeddings: int = 1024  # the trained length; nothing breaks past it
    rope_theta: float = 10000.0
    spiral_alpha: float = 0.05  # 0 is plain RoPE
    gate_pre_rope: bool = True
    use_attention_gate: bool = True
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True

    def __post_init__(self):
        if self.hidden_size % self.num_attention_heads or self.head_dim % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be num_attention_heads "
                f"{self.num_attention_heads} times an even head size"
            )
        if self.rms_norm_eps < 0:
            raise ValueError(f"rms_norm_eps is {self.rms_norm_eps}, which is below 0")
        if self.rope_theta < 1:
            raise ValueError(f"rope_theta is {self.rope_theta}, which is below 1")
        if not -1 < self.spiral_alpha < 1000:
            raise ValueError(f"spiral_alpha is {self.spiral_alpha}, not between -1 and 1000")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


PRESETS = {
    "nano": ModelArgs(),
    "micro": ModelArgs(
        hidden_size=384, num_hidden_layers=8, num_attention_heads=12, intermediate_size=768
    ),
    "small": ModelArgs(
        hidden_size=512, num_hidden_layers=12, num_attention_heads=16, intermediate_size=1024
    ),
}


class SpiralRoPE(nn.Module):
    """RoPE with inv_freq_i = theta^(−2i/D) · (1 + alpha · √(i+1) / √(D/2)), pairs (i, i + D/2)."""

    def __init__(self, head_dim: int, theta: float, alpha: float):
        super().__init__()
        half = head_dim // 2
        # mx.fast.rope takes periods. A list, so that no unevaluated graph outlives this thread.
        self._freqs = mx.array(
            [
                theta ** (2 * i / head_dim) / (1 + alpha * ((i + 1) / half) ** 0.5)
                for i in range(half)
            ]
        )

    @property
    def periods(self) -> mx.array:  # [D/2], over 2π
        return self._freqs

    def __call__(self, x: mx.array, offset) -> mx.array:
        return mx.fast.rope(
            x,
            x.shape[-1],
            traditional=False,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=self.periods,
        )


class Attention(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        dim, self.n_heads = args.hidden_size, args.num_attention_heads
        self.gate_pre_rope = args.gate_pre_rope

        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        if args.use_attention_gate:
            self.gate_fc1 = GateLinear(args.head_dim, self.n_heads)
            self.gate_fc2 = GateLinear(self.n_heads, self.n_heads, bias=True)
        self.rope = SpiralRoPE(args.head_dim, args.rope_theta, args.spiral_alpha)

    def __call__(self, x: mx.array, mask=None, cache=None) -> mx.array:
        B, T, _ = x.shape
        q, k, v = (
            proj(x).reshape(B, T, self.n_heads, -1)  # [B, T, H, D]
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        gate = (self.gate_fc1, self.gate_fc2) if "gate_fc1" in self else None
        out = gated_attention(
            q,
            k,
            v,
            self.rope,
            gate,
            self.gate_pre_rope,
            cache,
            mask,
            use_kernel=not self.training,
        )
        return self.o_proj(out.reshape(B, T, -1))


@partial(mx.compile, shapeless=True)
def butterfly(a: mx.array, b: mx.array, bypass: mx.array) -> mx.array:
    return nn.silu(a) * b + bypass


class ButterflyMLP(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        dim, inner = args.hidden_size, args.intermediate_size
        self.up_proj = nn.Linear(dim, 2 * inner, bias=False)
        self.bypass_proj = nn.Linear(dim, inner, bias=False)
        self.down_proj = nn.Linear(inner, dim, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        a, b = mx.split(self.up_proj(x), 2, axis=-1)
        return self.down_proj(butterfly(a, b, self.bypass_proj(x)))


class DecoderLayer(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.self_attn = Attention(args)
        self.mlp = ButterflyMLP(args)
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, x: mx.array, mask=None, cache=None) -> mx.array:
        h = x + self.self_attn(self.input_layernorm(x), mask, cache)
        return h + self.mlp(self.post_attention_layernorm(h))


class WiolaModel(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [DecoderLayer(args) for _ in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, inputs: mx.array, cache=None, input_embeddings=None) -> mx.array:
        h = self.embed_tokens(inputs) if input_embeddings is None else input_embeddings
        if cache is None:
            cache = [None] * len(self.layers)
        mask = create_attention_mask(h, cache[0] and cache[0][0])
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            h = layer(h, mask, layer_cache)
        return self.norm(h)


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

    def sanitize(self, weights: dict) -> dict:
        return drop_tied_head(weights) if self.args.tie_word_embeddings else weights

    @property
    def layers(self) -> list:
        return self.model.layers

    @property
    def cast_predicate(self):
        return lambda path: ".gate_fc" not in path  # the gate network stays float32

    def make_cache(self) -> list:
        return [make_layer_cache(sums=self.args.use_attention_gate) for _ in self.layers]
