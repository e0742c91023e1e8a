"""A layer's cache: K and V, and beside them a running sum for every position.

Both Wiola families read a causal mean over time: of the queries (gated spiral) or of the layer
outputs (cross layer). The cache keeps the float32 sum *up to each position*, not only the last,
so that a cache of plain mlx-lm classes can be trimmed, padded, joined, filtered and saved, and
stays exact.

Layout of one layer's ``CacheList``:
    [0] KVCache: keys and values [B, Hkv, n, D], in the model's dtype
    [1] KVCache: keys and values [B, 1, n, W/2] float32, the two halves of the sums of width W
In a batch both are ``BatchKVCache``; their ``offset`` is an array, the tokens of each row without
its pads.
"""

import warnings
from functools import partial

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

QUANTIZED_GROUP_SIZES = (128, 64, 32)  # what mx.quantize offers


class CacheList(mlx_cache.CacheList):
    """mlx-lm's ``CacheList`` with what ``--kv-bits`` looks for: ``offset`` and ``to_quantized``.

    The name is mlx-lm's on purpose: a prompt cache stores class names, and stock
    ``load_prompt_cache`` finds classes only in its own module.
    """

    @property
    def offset(self):
        return self.caches[0].offset

    def extract(self, idx: int) -> "CacheList":
        return CacheList(*(c.extract(idx) for c in self.caches))

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> mlx_cache.CacheList:
        """K and V quantized; the sums stay float32. The result has no ``to_quantized``.

        Raises:
            ValueError: if no group size divides the head size.
        """
        kv, *sums = self.caches
        fitting = (
            group_size if kv.keys is None else fitting_group_size(kv.keys.shape[-1], group_size)
        )
        if fitting != group_size:
            warnings.warn(
                f"KV cache: group size {group_size} does not divide the head size "
                f"{kv.keys.shape[-1]}, using {fitting}",
                stacklevel=2,
            )
        return mlx_cache.CacheList(kv.to_quantized(group_size=fitting, bits=bits), *sums)


def fitting_group_size(head_dim: int, wanted: int) -> int:
    """The largest quantization group up to ``wanted`` that divides ``head_dim``."""
    for size in QUANTIZED_GROUP_SIZES:
        if size <= wanted and head_dim % size == 0:
            return size
    raise ValueError(
        f"the KV cache cannot be quantized: no group size up to {wanted} (of 32, 64, 128) "
        f"divides the head size {head_dim}"
    )


def make_layer_cache(sums: bool = True) -> CacheList:
    """A layer's empty cache; without the second part where nothing is summed."""
    return CacheList(*(mlx_cache.KVCache() for _ in range(1 + sums)))


def positions(offset, length: int) -> mx.array:
    """Positions of ``length`` tokens from ``offset`` on, an int or [B]: [B or 1, length].

    Pads on the left of a row are negative.
    """
    if isinstance(offset, mx.array):
        offset = offset[:, None]
    return offset + mx.arange(length)[None]


def previous_sums(cache) -> mx.array | None:
    """The sums at the last cached position, [B, 1, W] float32; None when nothing is cached."""
    sums = cache[1]
    if sums.empty() or sums.size() == 0:
        return None
    n = sums.size()
    last = mx.concatenate([sums.keys[:, 0, n - 1 : n], sums.values[:, 0, n - 1 : n]], axis=-1)
    if isinstance(sums.offset, mx.array):  # a row of pads only: what lies there is not a sum
        last = mx.where(sums.offset[:, None, None] > 0, last, 0.0)
    return last


def append_sums(cache, sums: mx.array):
    """Keep the sums [B, T, W] of T new positions."""
    low, high = mx.split(sums[:, None], 2, axis=-1)
    cache[1].update_and_fetch(low, high)


def accumulate(values: mx.array, cache=None) -> tuple[mx.array, mx.array]:
    """Causal sums and means of ``values`` over time, continued from and added to ``cache``.

    Args:
        values: [B, T, W], any dtype. Pads on the left never enter a sum.
        cache: a layer's ``CacheList``, or None. Whether its K and V were updated already does
            not matter.

    Returns:
        sums, means: [B, T, W] float32, however the sequence was cut into calls.
    """
    values = values.astype(mx.float32)
    offset = 0 if cache is None else cache[1].offset
    position = positions(offset, values.shape[1])[..., None]  # [B or 1, T, 1]
    if isinstance(offset, mx.array):
        values = mx.where(position >= 0, values, 0.0)  # not a product: NaN must not leak
    sums = mx.cumsum(values, axis=1)
    if cache is not None:
        previous = previous_sums(cache)
        if previous is not None:
            sums = sums + previous
        append_sums(cache, sums)
    return sums, means(sums, position)


@partial(mx.compile, shapeless=True)
def means(sums: mx.array, position: mx.array) -> mx.array:
    return sums / mx.maximum(position + 1, 1).astype(mx.float32)
