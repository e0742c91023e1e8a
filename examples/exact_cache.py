"""Cuts a text into pieces, rewinds, compares with the full pass: python examples/exact_cache.py"""

import mlx.core as mx
from mlx_lm.models.cache import trim_prompt_cache

import wiola_mlx


def main():
    model, tokenizer = wiola_mlx.load("builtin", dtype=mx.float32)
    ids = mx.array(
        [tokenizer.encode("Tom had a red ball. He threw it high, and it fell into a tree.")]
    )
    full = model(ids)

    cache = model.make_cache()
    for piece in mx.split(ids, [3, 4, 11], axis=1):
        logits = model(piece, cache=cache)
    print(f"in four pieces:   {difference(logits[:, -1], full[:, -1]):.1e}")

    trim_prompt_cache(cache, 5)
    logits = model(ids[:, -5:], cache=cache)
    print(f"after a rewind:   {difference(logits, full[:, -5:]):.1e}")


def difference(a: mx.array, b: mx.array) -> float:
    """The largest difference, as a share of the largest logit."""
    return (mx.abs(a - b).max() / mx.abs(b).max()).item()


if __name__ == "__main__":
    main()
