"""Adaptive token merging: attention over a sequence whose similar neighbours are averaged.

Tokens t and t + 1 are similar if their cosine is above a threshold. Pairs are taken greedily from
the left and never overlap. Attention runs over the merged tokens, with positions of their own;
its result goes back to both tokens of a pair. So the first of a pair has seen the second: merging
**leaks the future**, and is for training only.

All arrays keep the length T, so that nothing depends on how many pairs there are: the merged
tokens stand at the front, and what follows them is never read.
"""

from typing import NamedTuple

import mlx.core as mx

EPSILON = 1e-8  # the smallest norm in a cosine


class Pairs(NamedTuple):
    """Which tokens become one. Positions are [B, T] integers."""

    first: mx.array  # of merged token k: its first source token
    last: mx.array  # its last one: the same, or the next
    merged: mx.array  # of source token t: the merged token that it is part of


def find_pairs(x: mx.array, threshold: float) -> Pairs:
    """The greedy pairs of similar neighbours in x [B, T, d], T ≥ 2."""
    T = x.shape[1]
    starts = pair_starts(neighbour_cosine(x) > threshold)
    opens = mx.pad(starts, [(0, 0), (0, 1)])  # [B, T]: is the left one of a pair
    closes = mx.pad(starts, [(0, 0), (1, 0)])  # [B, T]: is the right one
    source = mx.arange(T)[None]
    first = mx.sort(mx.where(closes, T, source), axis=1)  # T fills up behind the merged tokens
    first = mx.minimum(first, T - 1)
    last = first + mx.take_along_axis(opens, first, axis=1)
    merged = mx.cumsum(1 - closes.astype(mx.int32), axis=1) - 1
    return Pairs(first, last, merged)


def neighbour_cosine(x: mx.array) -> mx.array:
    """The cosine between each token and the next, [B, T − 1] float32, without gradient."""
    x = mx.stop_gradient(x).astype(mx.float32)
    unit = x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), EPSILON)
    return mx.sum(unit[:, :-1] * unit[:, 1:], axis=-1)


def pair_starts(similar: mx.array) -> mx.array:
    """Where a pair begins, [B, T − 1], given which tokens are similar to the next.

    In a run of similar tokens the scan takes every second one, counted from the run's start.
    """
    position = mx.arange(similar.shape[1])[None]
    gap = mx.cummax(mx.where(similar, -1, position), axis=1)  # the last one that is not similar
    return similar & ((position - gap) % 2 == 1)


def merge(x: mx.array, pairs: Pairs) -> mx.array:
    """The mean of each merged token's source tokens, [B, T, d]."""
    first, last = (mx.take_along_axis(x, i[..., None], axis=1) for i in (pairs.first, pairs.last))
    return 0.5 * (first + last)


def at_last(context: mx.array, pairs: Pairs) -> mx.array:
    """The context [B, T, Λ, d] of each merged token's last source token."""
    return mx.take_along_axis(context, pairs.last[..., None, None], axis=1)


def unmerge(x: mx.array, pairs: Pairs) -> mx.array:
    """Each merged token's row [B, T, d], given back to all of its source tokens."""
    return mx.take_along_axis(x, pairs.merged[..., None], axis=1)


def merge_ratio(pairs: Pairs) -> mx.array:
    """The share of tokens that merging takes away, a mean over the rows: float32, 0-d."""
    T = pairs.merged.shape[1]
    return mx.mean(1 - (pairs.merged[:, -1] + 1) / T)
