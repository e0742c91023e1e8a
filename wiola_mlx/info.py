"""``python -m wiola_mlx.info``: what a model consists of, and what a token costs."""

import argparse
import json
import sys
from pathlib import Path

from .console import HelpFormatter, run
from .errors import WiolaError

DESCRIPTION = """\
Parameters, FLOPs and bytes of a model: counted on its arrays, and by formula.
"""
EXAMPLES = """\
examples:
  python -m wiola_mlx.info builtin
  python -m wiola_mlx.info path/to/wiola13m --context 512 --json
  python -m wiola_mlx.info 1.5b
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m wiola_mlx.info",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add(
        "model",
        help="a model folder or Hub id, builtin, or a preset without weights: "
        "nano, micro, small, 120m, 360m, 700m, 1.5b",
    )
    add("--context", type=int, help="tokens in the context (by default the trained length)")
    add("--json", action="store_true", help="write one JSON object")
    return parser


def describe(name: str, context: int | None = None) -> dict:
    """Everything that the command writes, as one object.

    Args:
        name: what ``load_model`` takes, or the name of a preset.
        context: tokens that a token attends over; None means the length of training.

    Raises:
        WiolaError: for a model that does not load or a context below 1.
    """
    import mlx.core as mx

    from . import budget

    if context is not None and context < 1:
        raise WiolaError(f"the context must be 1 or more, not {context}")
    model, path = open_model(name)
    args = model.args
    context = context or args.max_position_embeddings
    counted, formula = budget.count_arrays(model), budget.parameter_formula(args)
    kv = kv_dtype(model)
    cache = budget.cache_bytes(args, kv.size)
    flops = budget.forward_flops(args, context)
    weights = weight_bytes(model)
    return {
        "model": name,
        "family": "gated spiral" if budget.is_gated_spiral(args) else "cross layer",
        "preset": budget.preset_of(args),
        "shape": shape_of(args),
        "parameters": {"total": sum(counted.values()), **counted},
        "formula": {"total": sum(formula.values()), **formula},
        "formula_agrees": counted == {k: v for k, v in formula.items() if v},
        "remark": budget.label_remark(args),
        "weight_bytes": weights,
        "bits_per_weight": round(8 * weights / sum(counted.values()), 3),
        "context": context,
        "flops_per_token": {"total": sum(flops.values()), **flops},
        "cache_dtype": str(kv).removeprefix("mlx.core."),
        "cache_bytes_per_token": {"total": sum(cache.values()), **cache},
        "cache_bytes": context * sum(cache.values()),
        "dtypes": dtypes_of(model),
        "quantization": quantization_of(model),
        "tokenizer": tokenizer_facts(path, args) if path else None,
        "device": str(mx.default_device()),
    }


def open_model(name: str):
    """(model, what ``load_tokenizer`` takes); presets have no weights and no tokenizer."""
    from . import budget
    from .loading import load_model

    if name.lower() in budget.PRESETS and not Path(name).exists():
        args = budget.PRESETS[name.lower()]
        # Nothing of it is evaluated: the arrays have shapes and no memory.
        return sys.modules[type(args).__module__].Model(args), None
    model, _ = load_model(name)
    return model, name


def shape_of(args) -> dict:
    from dataclasses import asdict

    hidden = ("model_type", "initializer_range", "rms_norm_eps")
    return {key: value for key, value in asdict(args).items() if key not in hidden}


def weight_bytes(model) -> int:
    from mlx.utils import tree_flatten

    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def kv_dtype(model):
    """The dtype that K and V have: that of the embedding's output."""
    embedding = model.model.embed_tokens
    return embedding.scales.dtype if hasattr(embedding, "scales") else embedding.weight.dtype


def dtypes_of(model) -> dict[str, int]:
    from mlx.utils import tree_flatten

    counts: dict[str, int] = {}
    for _, array in tree_flatten(model.parameters()):
        dtype = str(array.dtype).removeprefix("mlx.core.")
        counts[dtype] = counts.get(dtype, 0) + 1
    return counts


def quantization_of(model) -> list[dict]:
    """Each quantized layer with its bits; empty if there is none."""
    return [
        {"layer": path, "bits": module.bits, "group_size": module.group_size, "mode": module.mode}
        for path, module in sorted(model.named_modules())
        if hasattr(module, "bits")
    ]


def tokenizer_facts(path: str, args) -> dict | None:
    """What the tokenizer has; None for weights without one."""
    from .loading import load_tokenizer

    try:
        tokenizer = load_tokenizer(path)
    except WiolaError as error:
        return {"error": str(error)}
    entries = len(tokenizer.get_vocab())
    return {
        "entries": entries,
        "rows_without_entry": args.vocab_size - entries,
        "stop_ids": sorted(tokenizer.eos_token_ids),
        "special": {
            str(token): i
            for token, i in zip(
                tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True
            )
        },
        "adds_bos": tokenizer.encode("a")[:1] == [tokenizer.bos_token_id],
        "chat_template": bool(tokenizer.has_chat_template),
    }


def write(facts: dict):
    shape = facts["shape"]
    print(f"{facts['model']}: {facts['family']} family, preset {facts['preset'] or 'none'}")
    print("  " + ", ".join(f"{key} {value}" for key, value in shape.items()))
    table("parameters", facts["parameters"], facts["formula"])
    print("  formula and count " + ("agree" if facts["formula_agrees"] else "DIFFER"))
    if facts["remark"]:
        print(f"  remark: {facts['remark']}")
    table(f"forward FLOPs a token, {facts['context']} in context", facts["flops_per_token"])
    print(f"weights: {facts['weight_bytes']:,} bytes, {facts['bits_per_weight']} bits a weight")
    table(f"cache bytes a token, K and V {facts['cache_dtype']}", facts["cache_bytes_per_token"])
    print(f"  at {facts['context']} tokens: {facts['cache_bytes']:,}")
    write_quantization(facts["quantization"])
    if facts["tokenizer"]:
        print("tokenizer: " + ", ".join(f"{k} {v}" for k, v in facts["tokenizer"].items()))


def table(title: str, rows: dict, beside: dict | None = None):
    print(title)
    for name, value in rows.items():
        other = "" if beside is None else f"   formula {beside.get(name, 0):>15,}"
        print(f"  {name:28} {value:>15,}{other}")


def write_quantization(layers: list[dict]):
    if not layers:
        print("quantization: none")
        return
    groups: dict[tuple, list[str]] = {}
    for row in layers:
        groups.setdefault((row["bits"], row["group_size"]), []).append(row["layer"])
    for (bits, group_size), names in sorted(groups.items()):
        print(f"quantization: {bits} bits in groups of {group_size}, {len(names)} layers")
        print("  " + ", ".join(names))


def info(args: argparse.Namespace):
    facts = describe(args.model, args.context)
    if args.json:
        print(json.dumps(facts, ensure_ascii=False))
    else:
        write(facts)


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return run(lambda: info(args))


if __name__ == "__main__":
    sys.exit(main())
