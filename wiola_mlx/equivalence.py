"""Does cached decoding equal the full pass? Each check returns what the two gave.

A check is a function (model, ids, random) → [(found, expected), …], pairs of logits [B, T, V].
``ids`` is one sequence [1, N]; the full pass without any cache is always the expectation.
"""

import random as random_module
import tempfile
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, trim_prompt_cache

from .models.running_sums import CacheList

Random = random_module.Random
Pairs = list[tuple[mx.array, mx.array]]
CUTTINGS, TRIMS, ROWS = 4, 4, 3


def in_pieces(model, ids: mx.array, sizes: list[int], cache: list | None = None):
    """Logits [B, T, V] of ``ids`` fed in pieces of these sizes, and the cache."""
    cache = model.make_cache() if cache is None else cache
    logits, start = [], 0
    for size in sizes:
        logits.append(model(ids[:, start : start + size], cache=cache))
        mx.eval(logits[-1])
        start += size
    return mx.concatenate(logits, axis=1), cache


def random_sizes(total: int, random: Random) -> list[int]:
    """Pieces of 1 to total tokens, short ones as likely as long ones."""
    sizes = []
    while total:
        longest = random.choice([1, 2, 7, total])
        sizes.append(random.randint(1, min(longest, total)))
        total -= sizes[-1]
    return sizes


def step_by_step(model, ids: mx.array, random: Random) -> Pairs:
    found, _ = in_pieces(model, ids, [1] * ids.shape[1])
    return [(found, model(ids))]


def random_chunks(model, ids: mx.array, random: Random) -> Pairs:
    expected, n = model(ids), ids.shape[1]
    return [(in_pieces(model, ids, random_sizes(n, random))[0], expected) for _ in range(CUTTINGS)]


def trim_and_go_on(model, ids: mx.array, random: Random) -> Pairs:
    """Reads the text, takes back some of it, and goes on with other tokens."""
    pairs, n = [], ids.shape[1]
    others = ids[:, ::-1]
    for trimmed in {1, n - 1, *(random.randint(1, n - 1) for _ in range(TRIMS))}:
        _, cache = in_pieces(model, ids, random_sizes(n, random))
        trim_prompt_cache(cache, trimmed)
        kept, more = ids[:, : n - trimmed], others[:, : max(2, trimmed)]
        found, _ = in_pieces(model, more, random_sizes(more.shape[1], random), cache)
        whole = mx.concatenate([kept, more], axis=1)
        pairs.append((found, model(whole)[:, kept.shape[1] :]))
    return pairs


def rows_of(ids: mx.array, random: Random) -> list[mx.array]:
    """Rows of different lengths: the text, and parts of it."""
    n = ids.shape[1]
    lengths = [n, *(random.randint(1, n - 1) for _ in range(ROWS - 1))]
    return [ids[:, n - length :] for length in lengths]


def left_padded_batch(model, ids: mx.array, random: Random) -> Pairs:
    rows = rows_of(ids, random)
    longest = max(row.shape[1] for row in rows)
    padding = [longest - row.shape[1] for row in rows]
    batch = mx.concatenate(
        [mx.pad(row, [(0, 0), (p, 0)]) for row, p in zip(rows, padding, strict=True)]
    )
    cache = [CacheList(*(BatchKVCache(padding) for _ in c.caches)) for c in model.make_cache()]
    found, cache = in_pieces(model, batch, random_sizes(longest, random), cache)
    pairs = [
        (found[i : i + 1, p:], model(row))
        for i, (row, p) in enumerate(zip(rows, padding, strict=True))
    ]
    return pairs + next_tokens(model, rows, cache, ids)


def right_padded_batch(model, ids: mx.array, random: Random) -> Pairs:
    """A prompt padded on the right and rolled, as mlx-lm's batch generator does it."""
    rows = rows_of(ids, random)
    lengths = [row.shape[1] for row in rows]
    padding = [max(lengths) - length for length in lengths]
    batch = mx.concatenate(
        [mx.pad(row, [(0, 0), (0, p)]) for row, p in zip(rows, padding, strict=True)]
    )
    empty = zip(*(model.make_cache() for _ in rows), strict=True)
    cache = [type(layers[0]).merge(list(layers)) for layers in empty]
    for layer in cache:
        layer.prepare(lengths=lengths, right_padding=padding)
    found, cache = in_pieces(model, batch, random_sizes(max(lengths), random), cache)
    for layer in cache:
        layer.finalize()
    pairs = [(found[i : i + 1, : lengths[i]], model(row)) for i, row in enumerate(rows)]
    return pairs + next_tokens(model, rows, cache, ids)


def next_tokens(model, rows: list[mx.array], cache: list, ids: mx.array) -> Pairs:
    """What follows in every row of a batch, when all go on with the same two tokens."""
    following = mx.broadcast_to(ids[:, :2], (len(rows), 2))
    found, _ = in_pieces(model, following, [1, 1], cache)
    return [
        (found[i : i + 1], model(mx.concatenate([row, ids[:, :2]], axis=1))[:, -2:])
        for i, row in enumerate(rows)
    ]


def save_and_load(model, ids: mx.array, random: Random) -> Pairs:
    from .prompt_cache import load_prompt_cache, save_prompt_cache

    n = ids.shape[1]
    cut = random.randint(1, n - 1)
    _, cache = in_pieces(model, ids[:, :cut], random_sizes(cut, random))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.safetensors"
        save_prompt_cache(path, cache, model)
        cache = load_prompt_cache(path, model)
        found, _ = in_pieces(model, ids[:, cut:], random_sizes(n - cut, random), cache)
    return [(found, model(ids)[:, cut:])]


CHECKS: dict[str, Callable[..., Pairs]] = {
    "step by step": step_by_step,
    "random chunks": random_chunks,
    "trim and go on": trim_and_go_on,
    "left-padded batch": left_padded_batch,
    "right-padded batch": right_padded_batch,
    "save and load": save_and_load,
}


def differences(pairs: Pairs) -> dict[str, float]:
    """The largest differences: of logits, of logits as a share of the largest one, of
    probabilities. NaN and infinity count as infinitely far."""
    logits = relative = probabilities = 0.0
    for found, expected in pairs:
        found, expected = found.astype(mx.float32), expected.astype(mx.float32)
        distance = largest(found - expected)
        logits = max(logits, distance)
        share = distance / max(largest(expected), 1e-30)
        relative = max(relative, share if share == share else float("inf"))
        probabilities = max(
            probabilities, largest(mx.softmax(found, axis=-1) - mx.softmax(expected, axis=-1))
        )
    return {"logits": logits, "relative": relative, "probabilities": probabilities}


def largest(x: mx.array) -> float:
    x = mx.abs(x)
    return x.max().item() if mx.isfinite(x).all().item() else float("inf")
