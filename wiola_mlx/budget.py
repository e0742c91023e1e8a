"""What a model costs, from its config alone: parameters, FLOPs a token, bytes of cache a token.

Symbols: L layers, d hidden size, H heads, D = d/H, V vocabulary, i the butterfly's inner size, G·D
the width of K and V, Λ layers looked back on, dA and dB the inner sizes of the two streams.
"""

from dataclasses import replace

from mlx.utils import tree_flatten

from .models import cross_layer, gated_spiral

SUM_BYTES = 4  # running sums are float32 always
PUBLISHED = {  # label, as its publisher gives it
    "nano": "13M",
    "micro": "~40M",
    "small": "~90M",
    "120m": "120M",
    "360m": "360M",
    "700m": "700M",
    "1.5b": "1.5B",
}
PRESETS = {**gated_spiral.PRESETS, **cross_layer.PRESETS}
COMPONENTS = (  # the first that a tensor's name contains
    ("embedding", ("embed_tokens",)),
    ("head", ("lm_head",)),
    ("gate", ("gate_fc",)),
    ("context attention", ("_ctx_proj", "blend_logit")),
    ("attention", ("self_attn.", ".attn.")),
    ("feed-forward", (".mlp.", ".ffn.")),
    ("norms", ("norm",)),
)


def is_gated_spiral(args) -> bool:
    return isinstance(args, gated_spiral.ModelArgs)


def kv_width(args) -> int:
    heads = args.num_attention_heads if is_gated_spiral(args) else args.num_key_value_heads
    return heads * args.head_dim


def parameter_formula(args) -> dict[str, int]:
    """Parameters of each component, in closed form; their sum is the model's count."""
    L, d, V = args.num_hidden_layers, args.hidden_size, args.vocab_size
    counts = {"embedding": V * d, "head": 0 if args.tie_word_embeddings else V * d}
    if is_gated_spiral(args):
        H, D, i = args.num_attention_heads, args.head_dim, args.intermediate_size
        gate = L * (H * D + H * H + H) if args.use_attention_gate else 0
        return counts | {
            "attention": L * 4 * d * d,
            "gate": gate,
            "feed-forward": L * 4 * d * i,
            "norms": L * 2 * d + d,
        }
    kv, narrow, wide = kv_width(args), args.dsff_narrow_size, args.dsff_wide_size
    return counts | {
        "attention": L * (3 * d * d + 2 * d * kv),
        "context attention": L * (2 * d * kv + 1),
        "feed-forward": L * (3 * d * narrow + 2 * d * wide + 2 * d * d),
        "norms": L * 4 * d + 2 * d,
    }


def component_of(name: str) -> str:
    return next(part for part, marks in COMPONENTS if any(mark in name for mark in marks))


def count_arrays(model) -> dict[str, int]:
    """Parameters of each component, counted on the model's arrays (packed ones unpacked)."""
    quantized = {path: module for path, module in model.named_modules() if hasattr(module, "bits")}
    counts: dict[str, int] = {}
    for name, array in tree_flatten(model.parameters()):
        path, _, leaf = name.rpartition(".")
        size = array.size
        if path in quantized:
            size = size * 32 // quantized[path].bits if leaf == "weight" else 0
        part = component_of(name)
        counts[part] = counts.get(part, 0) + size
    return counts


def forward_flops(args, context: int) -> dict[str, int]:
    """FLOPs of one token's forward pass that attends over ``context`` tokens, by component.

    A multiplication and an addition are two; norms, activations and softmax are not counted.
    """
    L, d, V, T = args.num_hidden_layers, args.hidden_size, args.vocab_size, context
    flops = {"head": 2 * V * d, "attention over the context": L * 4 * d * T}
    if is_gated_spiral(args):
        H, D, i = args.num_attention_heads, args.head_dim, args.intermediate_size
        gate = L * 2 * (H * D + H * H) if args.use_attention_gate else 0
        return flops | {
            "attention projections": L * 8 * d * d,
            "gate": gate,
            "feed-forward": L * 8 * d * i,
        }
    kv, narrow, wide = kv_width(args), args.dsff_narrow_size, args.dsff_wide_size
    summaries = sum(min(layer, args.gcla_lookback) for layer in range(L))
    return flops | {
        "attention projections": L * (6 * d * d + 4 * d * kv),
        "context attention": summaries * (4 * d * kv + 4 * d),
        "feed-forward": L * (6 * d * narrow + 4 * d * wide + 4 * d * d),
    }


def cache_bytes(args, kv_itemsize: int) -> dict[str, int]:
    """Bytes that each token adds to the cache of one sequence."""
    L = args.num_hidden_layers
    if is_gated_spiral(args):
        sums = L * args.head_dim if args.use_attention_gate else 0
    else:
        sums = (L - 1) * args.hidden_size  # nothing reads the last layer's output
    return {
        "keys and values": L * 2 * kv_width(args) * kv_itemsize,
        "running sums": sums * SUM_BYTES,
    }


def preset_of(args) -> str | None:
    """The preset that ``args`` equals, trained at whatever length."""

    def equals(preset) -> bool:
        if type(preset) is not type(args):
            return False
        return replace(preset, max_position_embeddings=args.max_position_embeddings) == args

    return next((name for name, preset in PRESETS.items() if equals(preset)), None)


def label_remark(args) -> str | None:
    """How the published size of this model compares with the real one."""
    name = preset_of(args)
    if name is None:
        return None
    count = sum(parameter_formula(args).values())
    return f'published as "{PUBLISHED[name]}"; it has {count / 1e6:.1f}M parameters'
