"""The whole model with the emulator in the place of Metal, and what happens where kernels fail."""

import copy
import os
import subprocess
import sys
import warnings

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny
from conftest import relative_difference
from kernel_cases import BOUNDS, Case, arguments, by_kernel, by_operations
from mlx.utils import tree_flatten
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import trim_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers
from test_batch import left_padded_cache, merged, pad, prompts, right_padded_cache
from test_cache import assert_same_state, in_pieces, tokens

import wiola_mlx
from wiola_mlx.models import gated_attention
from wiola_mlx.models import gated_attention_kernels as kernels

BOUND = 1e-3 if kernels.on_metal() else 1e-5  # a GPU's mx.fast.rope has rough sines
VARIANTS = {
    "gated": {},
    "gate after rope": {"gate_pre_rope": False},
    "no gate": {"use_attention_gate": False},
}
DECODE = {"wiola_decode_gated", "wiola_decode"}


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS)
def model(request):
    return tiny.random_model(num_attention_heads=4, gate_scale=3.0, **request.param)


def plainly(monkeypatch, work):
    """What ``work`` gives without the kernels."""
    with monkeypatch.context() as patch:
        patch.setenv("WIOLA_MLX_KERNELS", "0")
        return work()


def assert_same(fused, plain):
    """Logits and caches."""
    (logits, cache), (expected, other) = fused, plain
    assert relative_difference(logits, expected) <= BOUND
    for ours, theirs in zip(cache, other, strict=True):
        for part, reference in zip(ours.caches, theirs.caches, strict=True):
            assert type(part) is type(reference)
            assert np.array_equal(np.array(part.offset), np.array(reference.offset))
            for a, b in zip(part.keys_and_values(), reference.keys_and_values(), strict=True):
                assert a.dtype == b.dtype
                assert relative_difference(a, b) <= BOUND


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [9, 1, 1, 5, 1], [40, 1]], ids=str)
def test_prefill_and_decode(fused_path, monkeypatch, model, sizes):
    ids = tokens(sum(sizes))
    fused = in_pieces(model, ids, sizes)
    ran = len(fused_path.calls)
    assert set(fused_path.calls) & DECODE and ran >= 2 * len(sizes)
    assert_same(fused, plainly(monkeypatch, lambda: in_pieces(model, ids, sizes)))
    assert len(fused_path.calls) == ran


def test_decode_across_the_growth_of_the_buffers(fused_path, monkeypatch):
    model = tiny.random_model(num_hidden_layers=1, gate_scale=3.0)
    ids, sizes = tokens(258), [254, 1, 1, 1, 1]
    fused = in_pieces(model, ids, sizes)
    assert_same(fused, plainly(monkeypatch, lambda: in_pieces(model, ids, sizes)))


def test_trim(fused_path, monkeypatch, model):
    def work():
        _, cache = in_pieces(model, tokens(10), [8, 1, 1])
        trim_prompt_cache(cache, 3)
        return in_pieces(model, tokens(4, seed=1), [1, 3], cache)

    assert_same(work(), plainly(monkeypatch, work))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch(fused_path, monkeypatch, model, side):
    lengths = [9, 4, 1]
    rows = prompts(lengths)

    def work():
        if side == "left":
            cache = left_padded_cache(model, [9 - n for n in lengths])
        else:
            cache = right_padded_cache(model, lengths)
        ids = pad(rows, side)
        for at in (0, 4, 8):  # the last piece is one token
            model(ids[:, at : at + 4], cache=cache)
        if side == "right":
            for layer in cache:
                layer.finalize()
        following = tokens(5, seed=99, batch=3)
        first, _ = in_pieces(model, following[:, :3], [1, 2], cache)
        for layer in cache:
            layer.filter([2, 0])  # kept and reordered
        second, _ = in_pieces(model, following[:2, 3:], [1, 1], cache)
        logits = mx.concatenate([first[:2], second], axis=1)
        return logits, [layer.extract(i) for i in (0, 1) for layer in cache]

    fused = work()
    assert DECODE & set(fused_path.calls)
    assert_same(fused, plainly(monkeypatch, work))


def test_batch_of_caches_of_different_lengths(fused_path, monkeypatch, model):
    def work():
        cache = merged([in_pieces(model, row, [row.shape[1]])[1] for row in prompts([5, 2])])
        logits, _ = in_pieces(model, tokens(3, seed=5, batch=2), [1, 1, 1], cache)
        return logits, [layer.extract(i) for i in (0, 1) for layer in cache]

    assert_same(work(), plainly(monkeypatch, work))


def test_speculative_decoding(fused_path, monkeypatch, loaded):
    model, tokenizer = loaded
    tokenizer = copy.copy(tokenizer)
    tokenizer._eos_token_ids = set()
    draft = tiny.random_model(seed=9)

    def work(**options):
        stream = wiola_mlx.stream_text(model, tokenizer, [5, 6, 7], max_tokens=12, **options)
        return [response.token for response in stream]

    plain = plainly(monkeypatch, work)
    assert not fused_path.calls
    assert work() == plain
    assert work(draft_model=draft, num_draft_tokens=3) == plain
    assert {"wiola_decode_gated", "wiola_prologue_gated"} <= set(fused_path.calls)


def test_speculative_decoding_leaves_equal_logits_and_caches(fused_path, monkeypatch):
    model, draft = tiny.random_model(), tiny.random_model(seed=9)

    def work():
        cache = [*model.make_cache(), *draft.make_cache()]
        steps = speculative_generate_step(
            mx.array([5, 6, 7]), model, draft, max_tokens=12, prompt_cache=cache
        )
        return mx.stack([logprobs for _, logprobs, _ in steps]), cache

    expected, expected_cache = plainly(monkeypatch, work)
    assert not fused_path.calls
    logprobs, cache = work()
    assert {"wiola_decode_gated", "wiola_prologue_gated"} <= set(fused_path.calls)
    assert relative_difference(logprobs, expected) <= 1e-5
    assert_same_state(cache, expected_cache)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_precision_keeps_float32_sums(fused_path, monkeypatch, dtype):
    model = tiny.random_model(num_attention_heads=4, gate_scale=3.0)
    model.set_dtype(dtype)  # the gate's weights, too
    ids = tokens(8)
    logits, cache = in_pieces(model, ids, [6, 1, 1])
    expected, _ = plainly(monkeypatch, lambda: in_pieces(model, ids, [6, 1, 1]))
    assert logits.dtype == dtype and cache[0][1].keys.dtype == mx.float32
    bound = {mx.float16: 1e-2, mx.bfloat16: 5e-2}[dtype]
    wide = (x.astype(mx.float32) for x in (logits, expected))
    assert relative_difference(*wide) <= bound


def test_what_no_kernel_fits_takes_plain_operations(fused_path, monkeypatch):
    model = tiny.random_model()
    cache = [layer.to_quantized(32, 8) for layer in in_pieces(model, tokens(9), [9])[1]]
    fused_path.calls.clear()
    in_pieces(model, tokens(3), [1, 2], cache)
    for changes in (dict(num_attention_heads=8), dict(num_attention_heads=1, hidden_size=144)):
        other = tiny.random_model(**changes)  # head sizes 8 and 144
        in_pieces(other, tokens(3), [2, 1])
    given = arguments(Case(H=400, T=3))  # more than a threadgroup's memory
    gated_attention.gated_attention(**given, mask="causal")
    given = arguments(Case(cached=3))
    gated_attention.gated_attention(**given, mask=mx.array([True, False, True, True]))
    given = arguments(Case(cached=3))
    gated_attention.gated_attention(**given, use_kernel=False)
    given = arguments(Case(cached=3))
    given["keys"] = given["keys"].astype(mx.float16)
    gated_attention.gated_attention(**given)
    assert not fused_path.calls


def test_issue_L1_variants_in_one_graph(fused_path):
    """Other head sizes, dtypes and gates, evaluated together: each runs its own code."""
    cases = [
        Case(D=D, cached=3, T=T, gate=gate, dtype=dtype)
        for D, T, gate, dtype in (
            (32, 1, "before", mx.float32),
            (64, 1, "before", mx.float32),
            (32, 1, "after", mx.float32),
            (32, 1, "before", mx.float16),
            (32, 5, "before", mx.float32),
            (32, 5, None, mx.float32),
        )
    ]
    given = [arguments(case) for case in cases]
    together = [by_kernel(case, g) for case, g in zip(cases, given, strict=True)]
    mx.eval(together)
    for case, g, results in zip(cases, given, together, strict=True):
        for name, expected in by_operations(case, g).items():
            actual = results[name].astype(mx.float32)
            assert relative_difference(actual, expected) <= BOUNDS[case.dtype]


@pytest.mark.parametrize("mask", ["causal", "array", None])
def test_any_mask_of_a_prompt(fused_path, mask):
    given = arguments(Case(T=6, cached=3))
    allowed = mx.random.uniform(shape=(1, 1, 6, 9), key=mx.random.key(0)) < 0.7
    mask = allowed | (mx.arange(9) == 0) if mask == "array" else mask
    plain = {**given, "cache": copy.deepcopy(given["cache"])}
    actual = gated_attention.gated_attention(**given, mask=mask)
    assert fused_path.calls
    assert (
        relative_difference(actual, gated_attention.gated_attention_ops(**plain, mask=mask))
        <= BOUND
    )


def loss(model, ids):
    return nn.losses.cross_entropy(model(ids)[:, :-1], ids[:, 1:], reduction="mean")


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_issue_D2_training_takes_the_differentiable_path(fused_path, monkeypatch, mode):
    model = tiny.random_model()
    model.freeze()
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 20.0, "dropout": 0.0})
    for name, module in model.named_modules():
        if "lora_b" in module:
            key = mx.random.key(len(name))
            module.lora_b = mx.random.normal(module.lora_b.shape, scale=0.1, key=key)
    getattr(model, mode)()
    ids = tokens(8, batch=2)
    value, gradients = nn.value_and_grad(model, loss)(model, ids)
    plain, expected = plainly(monkeypatch, lambda: nn.value_and_grad(model, loss)(model, ids))
    assert not fused_path.calls
    assert value.item() == pytest.approx(plain.item(), rel=1e-6)
    gradients, expected = dict(tree_flatten(gradients)), dict(tree_flatten(expected))
    assert gradients.keys() == expected.keys() and len(gradients) >= 28
    for name, gradient in gradients.items():
        assert mx.isfinite(gradient).all() and mx.abs(gradient).max() > 0, name
        assert relative_difference(gradient, expected[name]) <= 1e-4


def test_issue_D2_a_model_in_training_mode_uses_no_kernel_even_with_a_cache(fused_path):
    model = tiny.random_model().train()
    in_pieces(model, tokens(5), [4, 1])
    assert not fused_path.calls


def no_compiler(**_):
    raise RuntimeError("error: unknown type name 'bfloat'\nmany more lines")


def kernel_that_fails(monkeypatch, when: str):
    """A ``metal_kernel`` that raises when it is made, or when what it gave is evaluated."""
    evaluate, made = mx.eval, []

    def kernel(**_):
        def call(output_shapes, output_dtypes, **_):
            made.append(True)
            return [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]

        return call

    def evaluate_or_fail(*arrays):
        if made:
            made.clear()
            no_compiler()
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", evaluate_or_fail)
    return no_compiler if when == "made" else kernel


@pytest.mark.parametrize("when", ["made", "evaluated"])
def test_issue_L3_a_kernel_that_does_not_compile(fused_path, monkeypatch, when):
    model, ids = tiny.random_model(num_attention_heads=4), tokens(8)
    expected = plainly(monkeypatch, lambda: in_pieces(model, ids, [5, 1, 2]))
    with warnings.catch_warnings(record=True) as caught, monkeypatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(mx.fast, "metal_kernel", kernel_that_fails(patch, when))
        actual = in_pieces(model, ids, [5, 1, 2])
        in_pieces(model, ids, [7, 1])
    assert_same(actual, expected)
    assert len(caught) == 1
    assert "wiola_prologue_gated" in str(caught[0].message)
    assert "\n" not in str(caught[0].message)


@pytest.mark.parametrize("off", [{"WIOLA_MLX_KERNELS": "0"}, {}], ids=str)
def test_issue_L3_import_and_use_compile_nothing_here(off):
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "import mlx.core as mx\n"
        "def no(**_): raise AssertionError('a kernel was built')\n"
        "mx.fast.metal_kernel = no\n"
        "import wiola_mlx.models.wiola, tiny\n"
        "if sys.argv[1] or not mx.metal.is_available():\n"
        "    model = tiny.random_model()\n"
        "    cache = model.make_cache()\n"
        "    mx.eval(model(mx.array([[1, 2]]), cache=cache), model(mx.array([[3]]), cache=cache))\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, off.get("WIOLA_MLX_KERNELS", "")],
        env={**os.environ, **off},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0 and not result.stderr, result.stderr


def traced(model, ids, cache, monkeypatch):
    """MLX's own graph of a step, with the real kernels, which it makes while it exports."""
    monkeypatch.setattr(kernels, "on_metal", lambda: True)
    monkeypatch.setattr(gated_attention, "_kernels", {})
    monkeypatch.setattr(gated_attention, "_runs", {})
    monkeypatch.setattr(mx, "eval", lambda *_: None)  # no trial: nothing can run here
    nodes, buffers = [], {}

    def step(ids, *arrays):
        arrays = list(arrays)
        for layer in cache:
            for part in layer.caches:
                part.keys, part.values = arrays.pop(0), arrays.pop(0)
        logits = model(ids, cache=cache)
        state = [x for layer in cache for part in layer.caches for x in (part.keys, part.values)]
        return [logits, *state]

    state = [x for layer in cache for part in layer.caches for x in (part.keys, part.values)]
    mx.export_function(nodes.append, step, ids, *state)
    names = [name for name, *_ in next(n for n in nodes if n["type"] == "inputs")["inputs"]]
    buffers = dict(zip(names[1:], [x.shape for x in state], strict=True))
    return [n for n in nodes if n["type"] == "primitive"], buffers


@pytest.mark.parametrize("cached", [5, 256], ids=["with room", "full"])
def test_no_buffer_is_copied_for_the_decode_kernel(monkeypatch, model, cached):
    """Each buffer of the caches enters the kernel itself: no slice, no copy, no other node."""
    _, cache = in_pieces(model, tokens(cached), [2, cached - 2])
    mx.eval([part.state for layer in cache for part in layer.caches])
    for layer in cache:
        for part in layer.caches:
            for buffer in (part.keys, part.values):
                assert np.array(buffer, copy=False).flags.c_contiguous
    primitives, buffers = traced(model, tokens(1), cache, monkeypatch)
    calls = [p for p in primitives if p["name"] == "CustomKernel"]
    assert len(calls) == len(model.layers)
    inputs = [name for call in calls for name, *_ in call["inputs"]]
    assert set(buffers) <= set(inputs)
    assert not [p for p in primitives if p["name"] in ("Contiguous", "Copy")]

    # Whatever else reads a buffer writes the new token, once the kernel is done with it.
    made_by = {name: p for p in primitives for name, *_ in p["outputs"]}

    def after_a_kernel(name):
        node = made_by.get(name)
        if node is None or node["name"] == "CustomKernel":
            return node is not None
        return any(after_a_kernel(source) for source, *_ in node["inputs"])

    for p in primitives:
        read = [name for name, *_ in p["inputs"]]
        if p["name"] != "CustomKernel" and set(read) & set(buffers):
            assert p["name"] in ("SliceUpdate", "Concatenate")
            if p["name"] == "SliceUpdate":
                assert read[0] in buffers and after_a_kernel(read[1])
