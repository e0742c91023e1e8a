"""``python -m wiola_mlx.gates``: what the gates of a model do on a text."""

import argparse
import json
import sys
from functools import partial

from .console import HelpFormatter, note, run
from .errors import WiolaError

SHUT = 0.1
DESCRIPTION = """\
What the gates of a model do on a text.

Gated spiral: the gate scales a head's attention scores; near 0 the head looks at all tokens alike.
Cross layer: the gate scales what a head hands on, entry by entry (its mean is shown); near 0 the
head is silent. There, the share that each layer takes from the layers below is listed, too.
"""
EXAMPLES = """\
examples:
  python -m wiola_mlx.gates builtin --prompt "Once upon a time there was a dog."
  python -m wiola_mlx.gates path/to/wiola13m --prompt "The end." --plot gates.png --json
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m wiola_mlx.gates",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("model", help="a model folder or Hub id, or builtin")
    add("--prompt", required=True, help="the text whose tokens the gates see")
    add("--shut-below", type=float, default=SHUT, help="a head whose mean gate is less is shut")
    add("--plot", metavar="FILE", help="draw a heat map (needs matplotlib)")
    add("--json", action="store_true", help="write one JSON object with every gate")
    return parser


def gate_values(model, ids):
    """The gate of each layer, head and token, [L, H, T] float32.

    Args:
        model: of either family; a gated spiral one without gates is a WiolaError.
        ids: token ids [1, T], read in one pass.
    """
    import mlx.core as mx

    from .budget import is_gated_spiral

    if not is_gated_spiral(model.args):
        inputs = model.model.hidden_states(ids)[:-1]
        return mx.stack([output_gate(*pair) for pair in zip(model.layers, inputs, strict=True)])
    if not model.args.use_attention_gate:
        raise WiolaError("this model has no gates: its config says use_attention_gate false")
    h, gates = model.model.embed_tokens(ids), []
    for layer in model.layers:
        gates.append(score_gate(layer, h))
        h = layer(h, "causal")
    return mx.stack(gates)


def score_gate(layer, h):
    """Gated spiral: the factor of each head's scores [H, T], given the layer's input [1, T, d]."""
    from .models.gated_attention import attention_gate

    attention = layer.self_attn
    queries = attention.q_proj(layer.input_layernorm(h))
    queries = queries.reshape(1, h.shape[1], attention.n_heads, -1).swapaxes(1, 2)  # [1, H, T, D]
    if not attention.gate_pre_rope:
        queries = attention.rope(queries, 0)
    return attention_gate(queries, attention.gate_fc1, attention.gate_fc2)[0, :, :, 0]


def output_gate(layer, h):
    """Cross layer: the mean factor of each head's output [H, T], given the layer's input."""
    import mlx.core as mx

    attention = layer.attn
    gate = mx.sigmoid(attention.gate_proj(layer.input_norm(h)).astype(mx.float32))
    return gate.reshape(h.shape[1], attention.n_heads, -1).mean(axis=-1).T


def blends(model) -> list[float] | None:
    """Cross layer: the share of each layer's attention that comes from the layers below."""
    import mlx.core as mx

    from .budget import is_gated_spiral

    if is_gated_spiral(model.args):
        return None
    shares = [mx.sigmoid(layer.attn.blend_logit).item() for layer in model.layers]
    return [0.0, *shares[1:]]  # the first layer has none below


def describe(name: str, prompt: str, shut_below: float = SHUT) -> dict:
    """Everything that the command writes, as one object.

    Returns:
        "tokens" (texts), "gates" [L][H][T], "mean" [L][H], "lowest" and "highest" [L][H], "shut":
        a list of {"layer", "head", "mean"}, and "blend" [L] of the cross-layer family or None.

    Raises:
        WiolaError: for a model that does not load or has no gates, or an empty prompt.
    """
    import mlx.core as mx

    from .loading import load

    model, tokenizer = load(name)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    if not ids:
        raise WiolaError("the prompt is empty")
    gates = gate_values(model, mx.array([ids]))
    mean = gates.mean(axis=-1).tolist()
    shut = [
        {"layer": layer, "head": head, "mean": value}
        for layer, row in enumerate(mean)
        for head, value in enumerate(row)
        if value < shut_below
    ]
    return {
        "model": name,
        "tokens": [tokenizer.decode([i]) for i in ids],
        "gates": gates.tolist(),
        "mean": mean,
        "lowest": gates.min(axis=-1).tolist(),
        "highest": gates.max(axis=-1).tolist(),
        "shut_below": shut_below,
        "shut": shut,
        "blend": blends(model),
    }


def draw(facts: dict, path: str):
    """A heat map: a row for each layer and head, a column for each token."""
    from .plotting import new_figure, save_figure

    rows = [head for layer in facts["gates"] for head in layer]
    heads = len(facts["gates"][0])
    figure = new_figure(path, 2.5 + 0.25 * len(facts["tokens"]), 1.5 + 0.14 * len(rows))
    axes = figure.subplots()
    image = axes.imshow(rows, aspect="auto", vmin=0, vmax=1, interpolation="nearest")
    for layer in range(1, len(facts["gates"])):
        axes.axhline(layer * heads - 0.5, color="white", linewidth=1)
    axes.set_yticks([heads * layer for layer in range(len(facts["gates"]))])
    axes.set_yticklabels([f"layer {layer}, head 0" for layer in range(len(facts["gates"]))])
    labels = [escape(token) for token in facts["tokens"]]
    axes.set_xticks(range(len(labels)), labels, rotation=90)
    figure.colorbar(image, label="gate")
    save_figure(figure, path)


def escape(token: str) -> str:
    return repr(token)[1:-1].replace("$", r"\$")


def write(facts: dict):
    heads = len(facts["mean"][0])
    print("mean gate   " + " ".join(f"head {head:<2}" for head in range(heads)))
    for layer, row in enumerate(facts["mean"]):
        blend = "" if facts["blend"] is None else f"   from below {facts['blend'][layer]:.3f}"
        print(f"layer {layer:<5} " + " ".join(f"{value:7.3f}" for value in row) + blend)
    names = [f"{s['layer']}.{s['head']} ({s['mean']:.3f})" for s in facts["shut"]]
    print(f"shut (layer.head, mean below {facts['shut_below']:g}): {', '.join(names) or 'none'}")


def gates(args: argparse.Namespace):
    if args.plot:
        from .plotting import new_figure

        new_figure(args.plot)  # a wrong name is told before a model is loaded
    facts = describe(args.model, args.prompt, args.shut_below)
    if args.plot:
        draw(facts, args.plot)
        note(f"written: {args.plot}")
    show = partial(json.dumps, ensure_ascii=False)
    print(show(facts)) if args.json else write(facts)


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return run(lambda: gates(args))


if __name__ == "__main__":
    sys.exit(main())
