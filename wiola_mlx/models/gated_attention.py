"""Gated spiral attention: softmax(g · q kᵀ / √D) v, with one gate per head and position.

The gate scales a whole row of scores, so ``g * q`` followed by ordinary attention is the same
function. Its input is the causal mean of the head-averaged queries:

    m_t = mean over heads of q_t
    c_t = (1/t) Σ_{s≤t} m_s                       float32, continued from the cache
    g_t = sigmoid(W2 · silu(W1 c_t) + b2)         float32

``gated_attention_ops`` says it in plain operations, ``gated_attention_kernel`` does it with the
Metal kernels of gated_attention_kernels.py, and ``gated_attention`` chooses.

Shapes: B batch, T new tokens, n tokens cached, H heads, D head size.
"""

import functools
import os
import warnings

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import BatchKVCache, KVCache

from . import gated_attention_kernels as kernels
from .running_sums import accumulate

SIMDGROUPS = 8  # of 32 threads in a threadgroup: 256 threads, which every GPU allows
THREADGROUP_BYTES = 32768  # of memory, on every GPU
HEAD_SIZES = range(16, 129, 2)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


class GateLinear(nn.Module):
    """A linear layer that no quantizer wraps: not an ``nn.Linear``, no ``to_quantized``.

    Tensor names are those of a linear layer: ``weight`` [out, in] and ``bias`` [out].
    """

    def __init__(self, input_dims: int, output_dims: int, bias: bool = False):
        super().__init__()
        self.weight = mx.zeros((output_dims, input_dims))
        if bias:
            self.bias = mx.zeros((output_dims,))

    def __call__(self, x: mx.array) -> mx.array:
        weight = self.weight.astype(mx.float32).T
        if "bias" in self:
            return mx.addmm(self.bias.astype(mx.float32), x, weight)
        return x @ weight


@functools.partial(mx.compile, shapeless=True)
def scale_queries(gate: mx.array, queries: mx.array) -> mx.array:
    return (gate * queries).astype(queries.dtype)


def attention_gate(queries: mx.array, fc1: GateLinear, fc2: GateLinear, cache=None) -> mx.array:
    """The gate of each head and position, [B, H, T, 1] float32.

    Args:
        queries: [B, H, T, D], before RoPE or after it, as the config says.
        fc1, fc2: the gate network, weights [H, D] and [H, H].
        cache: the layer's cache; gets the new sums.
    """
    mean_query = mx.mean(queries.astype(mx.float32), axis=1)  # [B, T, D]
    _, context = accumulate(mean_query, cache)
    gate = mx.sigmoid(fc2(nn.silu(fc1(context))))  # [B, T, H]
    return gate.swapaxes(1, 2)[..., None]


def gated_attention_ops(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    rope,
    gate: tuple[GateLinear, GateLinear] | None,
    gate_pre_rope: bool,
    cache=None,
    mask=None,
) -> mx.array:
    """Gated attention in plain operations: the specification of every faster path.

    Args:
        queries, keys, values: [B, T, H, D] as projected, before RoPE.
        rope: a function (x, offset) that rotates x [B, H, T, D], with its ``periods`` [D/2].
        gate: the two layers of the gate network, or None for no gate.
        gate_pre_rope: whether the gate reads the queries before the rotation.
        cache: the layer's ``CacheList``; None for a whole sequence.
        mask: "causal", None, or a boolean array [B, 1, T, n + T].

    Returns:
        [B, T, H, D] in the dtype of ``queries``.
    """
    queries, keys, values = (x.swapaxes(1, 2) for x in (queries, keys, values))
    kv = None if cache is None else cache[0]
    offset = 0 if cache is None else kv.offset
    rotated = rope(queries, offset)
    if gate is not None:
        g = attention_gate(queries if gate_pre_rope else rotated, *gate, cache)
        rotated = scale_queries(g, rotated)
    keys = rope(keys, offset)
    if cache is not None:
        keys, values = kv.update_and_fetch(keys, values)
    scale = queries.shape[-1] ** -0.5
    out = scaled_dot_product_attention(rotated, keys, values, cache=kv, scale=scale, mask=mask)
    return out.swapaxes(1, 2)


def gated_attention_kernel(
    queries, keys, values, rope, gate, gate_pre_rope, cache, mask=None
) -> mx.array | None:
    """The same by Metal kernels: one dispatch for T = 1, one before the attention for T > 1.

    Takes and gives what ``gated_attention_ops`` does, and leaves the same in the cache. Where no
    kernel fits or runs, it gives None and the cache is untouched.
    """
    if not kernels_fit(queries, keys, values, cache, mask):
        return None
    kv, T, D = cache[0], queries.shape[1], queries.shape[-1]
    results = launch(kernel_inputs(queries, keys, values, rope, gate, cache), gate_pre_rope)
    if results is None:
        return None
    rotated, new_keys, *new_sums = results
    new_values = values.swapaxes(1, 2)
    if new_sums:
        cache[1].update_and_fetch(*new_sums)
    if T == 1:
        # The buffers can be written in place only once the kernel has read them.
        kv.update_and_fetch(new_keys, mx.depends(new_values, rotated))
        return rotated
    all_keys, all_values = kv.update_and_fetch(new_keys, new_values)
    out = mx.fast.scaled_dot_product_attention(
        rotated, all_keys, all_values, scale=D**-0.5, mask=mask
    )
    return out.swapaxes(1, 2)


def gated_attention(
    queries, keys, values, rope, gate, gate_pre_rope, cache=None, mask=None, use_kernel=True
) -> mx.array:
    """Gated attention by the fastest path for the device; see ``gated_attention_ops``.

    The kernels have no gradient: without a cache, as in training, the plain path is taken. So it
    is with ``use_kernel=False`` and with WIOLA_MLX_KERNELS=0 in the environment.
    """
    arguments = (queries, keys, values, rope, gate, gate_pre_rope, cache, mask)
    if use_kernel and cache is not None and kernels_enabled():
        out = gated_attention_kernel(*arguments)
        if out is not None:
            return out
    return gated_attention_ops(*arguments)


def kernels_enabled() -> bool:
    return os.environ.get("WIOLA_MLX_KERNELS", "1") != "0" and kernels.on_metal()


def kernels_fit(queries, keys, values, cache, mask) -> bool:
    """Whether the kernels can do it: plain float caches, and shapes that a threadgroup holds."""
    _, T, H, D = queries.shape
    kinds = {type(part) for part in cache.caches}
    if kinds not in ({KVCache}, {BatchKVCache}):
        return False
    if queries.dtype not in DTYPES or not queries.dtype == keys.dtype == values.dtype:
        return False
    if cache[0].keys is not None and cache[0].keys.shape[0] != queries.shape[0]:
        return False  # the plain path says what is wrong
    if T == 1 and isinstance(mask, mx.array) and KVCache in kinds:
        return False  # a mask that is not the cache's own
    floats = H + SIMDGROUPS * (D + 2) + 3 * D if T == 1 else 32 * (D + 1 + H + 1) + D
    return D in HEAD_SIZES and 4 * floats + 128 <= THREADGROUP_BYTES


def kernel_inputs(queries, keys, values, rope, gate, cache) -> dict:
    """What the kernels read, by name."""
    B, T, H, D = queries.shape
    kv = cache[0]
    offset = kv.offset if isinstance(kv, BatchKVCache) else mx.array([kv.offset] * B)  # [B]
    inputs = dict(q=queries, k=keys, v=values, offset=offset, used=kv.size(), periods=rope.periods)
    if T == 1:
        inputs["keys"], inputs["values"] = whole_buffers(kv, (B, H, 1, D), keys.dtype)
    if gate is not None:
        fc1, fc2 = gate
        low, high = whole_buffers(cache[1], (B, 1, 1, D // 2), mx.float32)
        inputs |= dict(sums_low=low, sums_high=high)
        inputs |= dict(w1=fc1.weight, w2=fc2.weight, bias=fc2.bias)
    return inputs


def whole_buffers(cache, shape, dtype) -> tuple[mx.array, mx.array]:
    """A cache's buffers as they lie: a slice of them would be copied for the kernel."""
    if cache.keys is None:
        return mx.zeros(shape, dtype), mx.zeros(shape, dtype)
    return cache.keys, cache.values


def launch(inputs: dict, gate_pre_rope: bool) -> list[mx.array] | None:
    """What the kernel for these inputs gives, or None where it does not run."""
    B, T, H, D = inputs["q"].shape
    dtype, gated = inputs["q"].dtype, "w1" in inputs
    template = [("T", dtype), ("H", H), ("D", D)]
    grid, threadgroup = (32 * SIMDGROUPS, H, B), (32 * SIMDGROUPS, 1, 1)
    shapes, dtypes = [(B, H, T, D)] * 2, [dtype] * 2
    if T == 1:
        shapes[0] = (B, T, H, D)
    if T == 1 or gated:
        template.append(("NSG", SIMDGROUPS))
    else:
        grid, threadgroup = (D // 2, T, B * H), (D // 2, 4, 1)
    if gated:
        template.append(("PRE", bool(gate_pre_rope)))
        shapes, dtypes = shapes + [(B, 1, T, D // 2)] * 2, dtypes + [mx.float32] * 2
    arguments = (kernels.decode_kernel if T == 1 else kernels.prologue_kernel)(gated)
    return run_kernel(
        arguments,
        inputs=[inputs[name] for name in arguments["input_names"]],
        template=template,
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=shapes,
        output_dtypes=dtypes,
    )


_kernels = {}  # by name; None for one that cannot be built
_runs = {}  # whether a variant of a kernel compiles and runs


def run_kernel(arguments: dict, inputs: list, **call) -> list[mx.array] | None:
    """Calls a kernel; None where it fails, with one warning.

    MLX compiles at evaluation, too late to choose another path, so each variant is evaluated once
    on zeros before it is used.
    """
    name = arguments["name"]
    variant = (
        name,
        tuple(call["template"]),
        tuple((x.dtype, x.size < 8) for x in inputs if isinstance(x, mx.array)),
    )
    if _runs.get(variant, True):
        try:
            if name not in _kernels:
                _kernels[name] = kernels.make_kernel(arguments)
            kernel = _kernels[name]
            if kernel is not None and variant not in _runs:
                zeros = [mx.zeros_like(x) if isinstance(x, mx.array) else x for x in inputs]
                mx.eval(kernel(inputs=zeros, **call))
                _runs[variant] = True
            return kernel and kernel(inputs=inputs, **call)
        except Exception as error:  # whatever a compiler, a driver or an old system raises
            if all(list(_runs.values())):
                reason = str(error).strip().split("\n")[0]
                warnings.warn(
                    f"Metal kernel {name} does not run, plain operations do its work: {reason}",
                    stacklevel=2,
                )
            _runs[variant] = False
    return None
