"""One layer's attention by the kernels and in plain operations: for the emulator and for a Mac."""

import copy
import itertools
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import BatchKVCache, KVCache

from wiola_mlx.models import gated_attention as attention
from wiola_mlx.models.gated_spiral import SpiralRoPE
from wiola_mlx.models.running_sums import CacheList

BOUNDS = {mx.float32: 2e-6, mx.float16: 1e-3, mx.bfloat16: 1e-2}
HEADS, HEAD_SIZES = (1, 5, 8, 12), (16, 32, 64, 96, 128)
CACHED = (1, 2, 31, 32, 33, 77, 257, 513)
LENGTHS = (2, 31, 32, 33, 77, 257)


@dataclass(frozen=True)
class Case:
    B: int = 1
    H: int = 5
    D: int = 32
    T: int = 1
    cached: int = 0
    dtype: mx.Dtype = mx.float32
    gate: str | None = "before"  # RoPE, or "after", or None
    padding: tuple | None = None  # on the left, one number a row
    seed: int = 0

    def __str__(self):
        gate = f" gate-{self.gate}" if self.gate else " no-gate"
        padding = f" padding={list(self.padding)}" if self.padding else ""
        kind = str(self.dtype).removeprefix("mlx.core.")
        sizes = f"B{self.B} H{self.H} D{self.D} T{self.T} n{self.cached} "
        return sizes + kind + gate + padding


class Random:
    def __init__(self, seed: int):
        self.numpy = np.random.default_rng(seed)

    def normal(self, *shape, scale=1.0) -> mx.array:
        return mx.array(self.numpy.standard_normal(shape) * scale).astype(mx.float32)


def filled_cache(rng, case, heads, width, dtype, scale=1.0):
    """A cache with room: NaN fills what is unused."""
    n = case.cached
    room = -(-n // 256) * 256
    cache = KVCache() if case.padding is None else BatchKVCache(list(case.padding))
    if n:
        for name in ("keys", "values"):
            used = rng.normal(case.B, heads, n, width, scale=scale)
            unused = mx.full((case.B, heads, room - n, width), float("nan"))
            setattr(cache, name, mx.concatenate([used, unused], axis=2).astype(dtype))
        if case.padding is None:
            cache.offset = n
        else:
            cache._idx, cache.offset = n, cache.offset + n
    return cache


def arguments(case: Case) -> dict:
    """The arguments of ``gated_attention`` but the mask."""
    rng = Random(case.seed)
    q, k, v = (rng.normal(case.B, case.T, case.H, case.D).astype(case.dtype) for _ in "qkv")
    gate, parts = None, [filled_cache(rng, case, case.H, case.D, case.dtype)]
    if case.gate:
        gate = attention.GateLinear(case.D, case.H), attention.GateLinear(case.H, case.H, bias=True)
        gate[0].weight = rng.normal(case.H, case.D, scale=3 * case.D**-0.5)
        gate[1].weight = rng.normal(case.H, case.H)
        gate[1].bias = rng.normal(case.H)
        scale = max(case.cached, 1) ** 0.5 * case.H**-0.5
        parts.append(filled_cache(rng, case, 1, case.D // 2, mx.float32, scale))
    return dict(
        queries=q,
        keys=k,
        values=v,
        rope=SpiralRoPE(case.D, 10000.0, 0.05),
        gate=gate,
        gate_pre_rope=case.gate != "after",
        cache=CacheList(*parts),
    )


def mask_of(case: Case, cache):
    """The mask of one new token, as the model makes it."""
    return None if case.padding is None else cache[0].make_mask(1)


def widened(given: dict) -> dict:
    """The same arguments in float32, with a cache of their own."""
    wide = {**given, "cache": copy.deepcopy(given["cache"])}
    for name in ("queries", "keys", "values"):
        wide[name] = given[name].astype(mx.float32)
    kv = wide["cache"][0]
    if kv.keys is not None:
        kv.keys, kv.values = kv.keys.astype(mx.float32), kv.values.astype(mx.float32)
    return wide


def by_kernel(case: Case, given: dict) -> dict:
    """What the kernel itself gives, [B, ...] of each output, by name."""
    inputs = attention.kernel_inputs(
        *(given[x] for x in ("queries", "keys", "values", "rope", "gate", "cache"))
    )
    results = attention.launch(inputs, given["gate_pre_rope"])
    assert results is not None, "the kernel did not run"
    names = ["out" if case.T == 1 else "q", "k", "low sums", "high sums"]
    return dict(zip(names, results, strict=False))


def by_operations(case: Case, given: dict) -> dict:
    """The same by the reference, in float32; on the CPU, whose sines are exact."""
    with mx.stream(mx.cpu):
        return reference(case, widened(given))


def reference(case: Case, wide: dict) -> dict:
    cache, rope, T = wide["cache"], wide["rope"], case.T
    results = {}
    if T == 1:
        results["out"] = attention.gated_attention_ops(**wide, mask=mask_of(case, cache))
    else:
        offset, q = cache[0].offset, wide["queries"].swapaxes(1, 2)
        results["q"] = rope(q, offset)
        if case.gate:
            source = q if case.gate == "before" else results["q"]
            results["q"] = attention.attention_gate(source, *wide["gate"], cache) * results["q"]
        new = wide["keys"].swapaxes(1, 2), wide["values"].swapaxes(1, 2)
        cache[0].update_and_fetch(rope(new[0], offset), new[1])
    results["k"] = cache[0].keys_and_values()[0][:, :, -T:]
    if case.gate:
        low, high = cache[1].keys_and_values()
        results |= {"low sums": low[:, :, -T:], "high sums": high[:, :, -T:]}
    return results


def without_pads(case: Case, name: str, array) -> list:
    """The array as numpy, row by row, without tokens that are pads."""
    rows = np.array(array.astype(mx.float32), dtype=np.float64)
    if case.padding is None:
        return list(rows)
    axis = 0 if name == "out" else 1
    return [
        np.take(row, range(min(max(p - case.cached, 0), case.T), case.T), axis=axis)
        for row, p in zip(rows, case.padding, strict=True)
    ]


def error(actual, expected) -> float:
    """The largest difference, as a share of the largest magnitude; NaN counts as infinite."""
    biggest = max((np.abs(e).max() for e in expected if e.size), default=1.0)
    pairs = zip(actual, expected, strict=True)
    differences = [np.abs(a - e).max() / biggest for a, e in pairs if e.size]
    return max((np.inf if d != d else d for d in differences), default=0.0)


def errors(case: Case, given: dict | None = None) -> dict:
    """The kernel's error in each of its outputs."""
    given = given or arguments(case)
    actual, expected = by_kernel(case, given), by_operations(case, given)
    assert actual.keys() == expected.keys()
    return {
        name: error(without_pads(case, name, actual[name]), without_pads(case, name, e))
        for name, e in expected.items()
    }


def covering_cases() -> list[Case]:
    """A few dozen cases in which each value of each parameter, and many pairs, occur."""
    dtypes = itertools.cycle(BOUNDS)
    gates = itertools.cycle(("before", "after", "before", None, "after"))
    cases = []
    for i, (H, D) in enumerate(itertools.product(HEADS, HEAD_SIZES)):
        shared = dict(B=(1, 3)[i % 2], H=H, D=D, dtype=next(dtypes), gate=next(gates), seed=i)
        cases.append(Case(T=1, cached=CACHED[i % len(CACHED)], **shared))
        if i % 2:
            cases.append(Case(T=LENGTHS[i // 2 % len(LENGTHS)], cached=i % 3 * 5, **shared))
    padded = dict(H=5, B=3, padding=(0, 4, 9))
    cases += [
        Case(D=80, cached=33, **padded),
        Case(D=24, cached=6, gate="after", **padded),  # a row of pads only
        Case(D=18, cached=40, gate=None, **padded),
        Case(D=48, T=33, **padded),
        Case(D=18, T=7, cached=5, gate="after", **padded),
        Case(D=24, T=12, gate=None, **padded),
        Case(cached=0),
        Case(cached=256, gate="after"),  # a full buffer
        Case(cached=0, gate=None),
        Case(B=8, H=2, cached=9, padding=tuple(range(8))),
    ]
    return cases


def full_grid() -> list[Case]:
    grid = itertools.product((1, 3), HEADS, HEAD_SIZES, BOUNDS, ("before", "after", None))
    cases = []
    for B, H, D, dtype, gate in grid:
        shared = dict(B=B, H=H, D=D, dtype=dtype, gate=gate)
        cases += [Case(T=1, cached=n, **shared) for n in CACHED]
        cases += [Case(T=T, cached=(0, 7)[T % 2], **shared) for T in LENGTHS]
    return cases
