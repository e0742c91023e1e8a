"""GPU dispatches of one decoded token, counted on MLX's own graph of the step.

On a Mac a small model's speed is the number of dispatches. The step is built, not run, so this
counts on any machine. The rule: a view (reshape, transpose, slice, broadcast …) is none; a
concatenation is one for each part; a function of ``mx.compile``, a call of ``mx.fast`` and a kernel
are one; every other primitive is one. Writing into a cache is one, as it happens in place.
"""

import argparse
import contextlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from .console import HelpFormatter, run

DTYPES = ("float32", "float16", "bfloat16")
VIEWS = {
    *("Broadcast", "BroadcastAxes", "Reshape", "Flatten", "Unflatten", "ExpandDims", "Squeeze"),
    *("Transpose", "Slice", "Split", "AsStrided", "View", "Copy", "Depends", "StopGradient"),
}
FAST = ("rms_norm", "layer_norm", "rope", "scaled_dot_product_attention")
ROOM = 7  # tokens cached before the step: no cache grows in it
PATHS = {
    "plain": "wiola_mlx, plain operations",
    "fused": "wiola_mlx, Metal kernels",
    "llama": "mlx_lm's Llama of the same width, layers and heads",
}


class OneNode:
    """Makes each call of ``mx.fast`` and each kernel one node, as on a GPU, while it is patched in.

    Off the GPU MLX would spell them out in smaller primitives. A call's results are new leaves,
    so its inputs are kept: what leads to them belongs to the graph.
    """

    def __init__(self):
        self.names, self.inputs = Counter(), []

    def result(self, name: str, inputs, shape, dtype):
        import mlx.core as mx

        self.inputs += [x for x in inputs if isinstance(x, mx.array)]
        leaf = mx.zeros(shape, dtype)
        mx.eval(leaf)
        return leaf

    def function(self, name: str):
        def call(x, *rest, **options):
            self.names[name] += 1
            return self.result(name, [x, *rest, *options.values()], x.shape, x.dtype)

        return call

    def metal_kernel(self, name: str, **_):
        def call(inputs, output_shapes, output_dtypes, **_):
            self.names[name] += 1
            outputs = zip(output_shapes, output_dtypes, strict=True)
            return [self.result(name, inputs, *output) for output in outputs]

        return call

    @contextlib.contextmanager
    def patched(self, kernels: bool):
        import mlx.core as mx

        from .models import gated_attention, gated_attention_kernels

        changes = [mock.patch.object(mx.fast, name, self.function(name)) for name in FAST]
        changes += [
            mock.patch.object(mx.fast, "metal_kernel", self.metal_kernel),
            mock.patch.object(gated_attention_kernels, "on_metal", lambda: kernels),
            mock.patch.object(gated_attention, "_kernels", {}),
            mock.patch.object(gated_attention, "_runs", {}),
        ]
        with contextlib.ExitStack() as stack:
            for change in changes:
                stack.enter_context(change)
            yield


def count_step(step: Callable[[], list], kernels: bool = False) -> Counter:
    """Dispatches by name of what ``step`` builds and returns; it is called twice.

    Args:
        step: gives the arrays that a step must compute, its caches' buffers included.
        kernels: whether the Metal kernels are taken, here or not.
    """
    import mlx.core as mx

    nodes = OneNode()
    with nodes.patched(kernels):
        mx.eval(step())  # the first call also tries the kernels
        nodes.names.clear()
        nodes.inputs.clear()
        outputs = step()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "graph.dot"
            mx.export_to_dot(str(path), *outputs, *nodes.inputs)
            graph = path.read_text()
    return count_graph(graph) + nodes.names


def count_graph(dot: str) -> Counter:
    counts = Counter()
    for node, name in re.findall(r'{ (\d+) \[label ="(\w+)"', dot):
        if name == "Concatenate":
            counts[name] += len(re.findall(rf"-> {node}\b", dot))
        elif name not in VIEWS:
            counts[name] += 1
    return counts


def count_model(model, kernels: bool = False) -> Counter:
    """Dispatches of one decoded token of a model, by name."""
    import mlx.core as mx

    cache = model.make_cache()

    def step():
        logits = model(mx.array([[1]]), cache=cache)
        return [logits, *buffers_of(cache)]

    mx.eval(model(mx.ones((1, ROOM), mx.int32), cache=cache), buffers_of(cache))
    return count_step(step, kernels)


def buffers_of(cache) -> list:
    parts = [part for layer in cache for part in getattr(layer, "caches", [layer])]
    return [buffer for part in parts for buffer in (part.keys, part.values)]


def count_all(dtype: str = "float32", **changes) -> dict:
    """Counts of the Nano shape on each of ``PATHS``: {path: {"total": n, "by_name": {...}}}."""
    import mlx.core as mx
    from mlx_lm.models import llama

    from .models import gated_spiral

    args = gated_spiral.ModelArgs(**changes)
    ours = gated_spiral.Model(args).eval()
    sizes = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
    theirs = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            rms_norm_eps=args.rms_norm_eps,
            vocab_size=args.vocab_size,
            tie_word_embeddings=args.tie_word_embeddings,
            **{name: getattr(args, name) for name in sizes},
        )
    )
    for model in (ours, theirs):
        model.set_dtype(getattr(mx, dtype))
    counts = {
        "plain": count_model(ours),
        "fused": count_model(ours, kernels=True),
        "llama": count_model(theirs),
    }
    return {
        path: {"total": names.total(), "by_name": dict(names.most_common())}
        for path, names in counts.items()
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m wiola_mlx.dispatches", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights")
    parser.add_argument("--json", action="store_true", help="print JSON, with counts by name")
    args = parser.parse_args(argv)
    return run(lambda: show(args))


def show(args):
    counts = count_all(args.dtype)
    if args.json:
        print(json.dumps({"dtype": args.dtype, **counts}, indent=2))
        return
    print(f"GPU dispatches per decoded token, Nano shape (256/6/8/512), {args.dtype}")
    for path, text in PATHS.items():
        print(f"{counts[path]['total']:6}  {text}")


if __name__ == "__main__":
    raise SystemExit(main())
