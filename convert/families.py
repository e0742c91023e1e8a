"""What differs between the two families, as tables: GGUF names, GGUF metadata, recipes.

Architecture strings and names are final from the first file on.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from wiola_mlx.errors import WiolaError
from wiola_mlx.models.wiola import family_of

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
BLOCK = re.compile(r"blk\.(\d+)\.(.+)")

# The config's key, the GGUF key behind the architecture's prefix, and the kind of its value.
COMMON_METADATA = (
    ("vocab_size", "vocab_size", "u32"),
    ("max_position_embeddings", "context_length", "u32"),
    ("hidden_size", "embedding_length", "u32"),
    ("num_hidden_layers", "block_count", "u32"),
    ("num_attention_heads", "attention.head_count", "u32"),
    ("rms_norm_eps", "attention.layer_norm_rms_epsilon", "f32"),
    ("initializer_range", "initializer_range", "f32"),
    ("tie_word_embeddings", "tie_word_embeddings", "bool"),
)


@dataclass(frozen=True)
class Family:
    """One family's tables.

    Attributes:
        architecture: the GGUF's ``general.architecture``.
        outer, inner: checkpoint name to GGUF name, outside and inside a layer.
        metadata: rows as in ``COMMON_METADATA``.
        derived: GGUF keys that llama.cpp's tools expect and that follow from the config.
        float32: endings of tensors that stay float32 in every layout but the source's own.
        recipe_names: parts of a layer's path that mlx-lm's recipes know under another name.
        rope_factors: the values of ``rope_freqs.weight`` for a config, or None.
    """

    name: str
    architecture: str
    outer: dict[str, str]
    inner: dict[str, str]
    metadata: tuple[tuple[str, str, str], ...]
    derived: Callable[[dict], dict[str, int]]
    float32: tuple[str, ...]
    recipe_names: dict[str, str]
    rope_factors: Callable[[dict], np.ndarray] | None = None

    def to_gguf_name(self, name: str) -> str | None:
        """The GGUF name of a checkpoint's tensor; None if the table has none."""
        if match := LAYER.fullmatch(name):
            inner = self.inner.get(match[2])
            return inner and f"blk.{match[1]}.{inner}"
        return self.outer.get(name)

    def from_gguf_name(self, name: str) -> str | None:
        if match := BLOCK.fullmatch(name):
            inner = {v: k for k, v in self.inner.items()}.get(match[2])
            return inner and f"model.layers.{match[1]}.{inner}"
        return {v: k for k, v in self.outer.items()}.get(name)

    def keeps_float32(self, name: str) -> bool:
        return name.endswith(self.float32)


def spiral_factors(config: dict) -> np.ndarray:
    """What ggml's rope divides its frequencies by, [D/2] float32."""
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    i = np.arange(half, dtype=np.float64)
    return (1 / (1 + config["spiral_alpha"] * np.sqrt((i + 1) / half))).astype(np.float32)


def head_dim(config: dict) -> int:
    return config["hidden_size"] // config["num_attention_heads"]


GATED_SPIRAL = Family(
    name="gated_spiral",
    architecture="wiolagsa",
    outer={
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    },
    inner={
        "input_layernorm.weight": "attn_norm.weight",
        "self_attn.q_proj.weight": "attn_q.weight",
        "self_attn.k_proj.weight": "attn_k.weight",
        "self_attn.v_proj.weight": "attn_v.weight",
        "self_attn.o_proj.weight": "attn_output.weight",
        "self_attn.gate_fc1.weight": "attn_gate_fc1.weight",
        "self_attn.gate_fc2.weight": "attn_gate_fc2.weight",
        "self_attn.gate_fc2.bias": "attn_gate_fc2.bias",
        "post_attention_layernorm.weight": "ffn_norm.weight",
        "mlp.up_proj.weight": "ffn_up.weight",
        "mlp.bypass_proj.weight": "ffn_bypass.weight",
        "mlp.down_proj.weight": "ffn_down.weight",
    },
    metadata=(
        *COMMON_METADATA,
        ("intermediate_size", "feed_forward_length", "u32"),
        ("rope_theta", "rope.freq_base", "f32"),
        ("spiral_alpha", "rope.spiral_alpha", "f32"),
        ("use_attention_gate", "attention.gate", "bool"),
        ("gate_pre_rope", "attention.gate_pre_rope", "bool"),
    ),
    derived=lambda config: {
        "attention.head_count_kv": config["num_attention_heads"],
        "rope.dimension_count": head_dim(config),
    },
    float32=("gate_fc1.weight", "gate_fc2.weight", "gate_fc2.bias"),
    recipe_names={},
    rope_factors=spiral_factors,
)

CROSS_LAYER = Family(
    name="cross_layer",
    architecture="wiolagcla",
    outer={
        "model.embed_tokens.weight": "token_embd.weight",
        "model.final_norm.weight": "output_norm.weight",
        "model.final_norm.offset": "output_norm_offset.weight",
        "lm_head.weight": "output.weight",
    },
    inner={
        "input_norm.weight": "attn_norm.weight",
        "input_norm.offset": "attn_norm_offset.weight",
        "attn.q_proj.weight": "attn_q.weight",
        "attn.k_proj.weight": "attn_k.weight",
        "attn.v_proj.weight": "attn_v.weight",
        "attn.o_proj.weight": "attn_output.weight",
        "attn.gate_proj.weight": "attn_gate.weight",
        "attn.k_ctx_proj.weight": "attn_k_ctx.weight",
        "attn.v_ctx_proj.weight": "attn_v_ctx.weight",
        "attn.blend_logit": "attn_ctx_blend.weight",
        "post_attn_norm.weight": "ffn_norm.weight",
        "post_attn_norm.offset": "ffn_norm_offset.weight",
        "ffn.gate_a.weight": "ffn_gate.weight",
        "ffn.up_a.weight": "ffn_up.weight",
        "ffn.down_a.weight": "ffn_down.weight",
        "ffn.up_b.weight": "ffn_up_wide.weight",
        "ffn.down_b.weight": "ffn_down_wide.weight",
        "ffn.fusion.weight": "ffn_fusion.weight",
    },
    metadata=(
        *COMMON_METADATA,
        ("num_key_value_heads", "attention.head_count_kv", "u32"),
        ("dsff_narrow_size", "feed_forward_length", "u32"),
        ("dsff_wide_size", "feed_forward_length_wide", "u32"),
        ("srpe_theta", "rope.freq_base", "f32"),
        ("srpe_spiral_divisor", "rope.spiral_divisor", "f32"),
        ("srpe_radial_amplitude", "rope.radial_amplitude", "f32"),
        ("srpe_radial_frequency", "rope.radial_frequency", "f32"),
        ("gcla_lookback", "attention.context_lookback", "u32"),
        ("gcla_gate_init", "attention.context_gate_init", "f32"),
        ("atm_enabled", "token_merging.enabled", "bool"),
        ("atm_threshold", "token_merging.threshold", "f32"),
    ),
    derived=lambda config: {"rope.dimension_count": head_dim(config)},
    float32=(".blend_logit", ".offset"),
    recipe_names={"down_a": "down_proj", "down_b": "down_proj", "v_ctx_proj": "v_proj"},
)

FAMILIES = (GATED_SPIRAL, CROSS_LAYER)


def family_for(config: dict) -> Family:
    try:
        name = family_of(config)
    except ValueError as error:
        raise WiolaError(str(error)) from error
    return next(family for family in FAMILIES if family.name == name)


def family_of_architecture(architecture) -> Family:
    for family in FAMILIES:
        if family.architecture == architecture:
            return family
    known = " and ".join(family.architecture for family in FAMILIES)
    raise WiolaError(f"the GGUF's architecture is {architecture!r}; Wiola's are {known}")


def complete_config(config: dict) -> dict:
    """The config with every key that the model reads: its own, else the model's default."""
    from dataclasses import fields

    from wiola_mlx.models import wiola

    args = wiola.ModelArgs.from_dict(config)
    return {**config, **{field.name: getattr(args, field.name) for field in fields(args)}}
