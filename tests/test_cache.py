"""One sequence: cut, rewound, copied or saved, its logits are those of the full pass."""

import copy
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
import tiny
from conftest import relative_difference, sums_of
from mlx_lm.models.cache import (
    LRUPromptCache,
    can_trim_prompt_cache,
    load_prompt_cache,
    trim_prompt_cache,
)

import wiola_mlx

BOUND = 1e-5
VARIANTS = {
    "gated": {},
    "gate after rope": {"gate_pre_rope": False},
    "no gate": {"use_attention_gate": False},
}


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS)
def model(request):
    return tiny.random_model(num_attention_heads=4, **request.param)


def tokens(length: int, seed: int = 0, batch: int = 1) -> mx.array:
    return mx.random.randint(0, tiny.VOCAB_SIZE, (batch, length), key=mx.random.key(seed))


def in_pieces(model, ids, sizes, cache=None):
    cache = cache or model.make_cache()
    cuts = np.cumsum(sizes)[:-1].tolist()
    return mx.concatenate([model(p, cache=cache) for p in mx.split(ids, cuts, axis=1)], 1), cache


def assert_same_state(cache, expected, bound=BOUND):
    for ours, theirs in zip(cache, expected, strict=True):
        for part, other in zip(ours.caches, theirs.caches, strict=True):
            assert part.empty() == other.empty()
            if part.empty():
                continue
            assert part.offset == other.offset
            for a, b in zip(part.keys_and_values(), other.keys_and_values(), strict=True):
                assert relative_difference(a, b) <= bound


@pytest.mark.parametrize(
    "sizes",
    [[1] * 40, [40], [39, 1], [1, 39], [7, 1, 1, 16, 15]],
    ids=["steps", "whole", "all but one", "one first", "uneven"],
)
def test_any_cutting_equals_the_full_pass(model, sizes):
    ids = tokens(40)
    logits, cache = in_pieces(model, ids, sizes)
    assert relative_difference(logits, model(ids)) <= BOUND
    assert_same_state(cache, in_pieces(model, ids, [40])[1])


@pytest.mark.parametrize("length", [255, 256, 257])
def test_cutting_across_the_growth_of_the_buffers(model, length):
    ids = tokens(length + 5)
    full = model(ids)
    for sizes in ([length, 5], [length, 1, 1, 3], [100, length - 100, 5]):
        logits, _ = in_pieces(model, ids, sizes)
        assert relative_difference(logits, full) <= BOUND


def test_issue_B5_four_tokens_at_once_equal_four_single_ones(model):
    ids = tokens(9)
    together, one = in_pieces(model, ids, [5, 4])
    singly, other = in_pieces(model, ids, [5, 1, 1, 1, 1])
    assert relative_difference(together[:, -1], singly[:, -1]) <= BOUND
    assert_same_state(one, other)


@pytest.mark.parametrize("trimmed", [0, 1, 3, 9, 10])
def test_issue_B1_trimmed_tokens_were_never_seen(model, trimmed):
    ids, others = tokens(10), tokens(4, seed=1)
    _, cache = in_pieces(model, ids, [6, 4])
    assert can_trim_prompt_cache(cache)
    assert trim_prompt_cache(cache, trimmed) == trimmed
    continued, cache = in_pieces(model, others, [4], cache)
    whole = mx.concatenate([ids[:, : 10 - trimmed], others], axis=1)
    assert relative_difference(continued, model(whole)[:, -4:]) <= BOUND
    assert_same_state(cache, in_pieces(model, whole, [14 - trimmed])[1])


def test_trimming_across_the_growth_of_the_buffers(model):
    ids, others = tokens(258), tokens(3, seed=1)
    _, cache = in_pieces(model, ids, [255, 1, 2])
    trim_prompt_cache(cache, 4)
    continued, _ = in_pieces(model, others, [1, 2], cache)
    whole = mx.concatenate([ids[:, :254], others], axis=1)
    assert relative_difference(continued, model(whole)[:, -3:]) <= BOUND


def test_mlx_lms_prefix_reuse_goes_on_exactly(model):
    ids, others = tokens(30), tokens(5, seed=1)
    _, cache = in_pieces(model, ids, [30])
    kept = LRUPromptCache()
    kept.insert_cache("model", ids[0].tolist(), cache)
    wanted = mx.concatenate([ids[:, :17], others], axis=1)  # shares 17 tokens with what is kept
    reused, rest = kept.fetch_nearest_cache("model", wanted[0].tolist())
    assert len(rest) == 5
    continued = model(mx.array([rest]), cache=reused)
    assert relative_difference(continued, model(wanted)[:, -5:]) <= BOUND


def test_a_copy_goes_its_own_way(model):
    ids = tokens(12)
    _, cache = in_pieces(model, ids[:, :6], [6])
    twin = copy.deepcopy(cache)
    in_pieces(model, tokens(3, seed=2), [3], cache)
    continued, _ = in_pieces(model, ids[:, 6:], [6], twin)
    assert relative_difference(continued, model(ids)[:, 6:]) <= BOUND


def test_sums_are_float32_and_causal_means_of_the_queries():
    model = tiny.random_model()
    model.set_dtype(mx.bfloat16)
    ids, cache = tokens(300), model.make_cache()
    model(ids, cache=cache)
    layer = model.layers[0]
    x = layer.input_layernorm(model.model.embed_tokens(ids))
    queries = layer.self_attn.q_proj(x).astype(mx.float32).reshape(1, 300, 2, 32)
    expected = np.cumsum(np.array(queries.mean(axis=2), dtype=np.float64), axis=1)
    assert sums_of(cache)[0].dtype == mx.float32
    assert relative_difference(sums_of(cache)[0], expected) <= 1e-5
    assert model(ids).dtype == mx.bfloat16


def test_a_wrong_sum_would_be_seen():
    """The bound of these tests means something: a sum that is off by one pad breaks it by far."""
    model = tiny.random_model(num_attention_heads=4)
    ids = tokens(10)
    _, cache = in_pieces(model, ids[:, :6], [6])
    for layer in cache:
        layer[1].keys = layer[1].keys * (7 / 6)
        layer[1].values = layer[1].values * (7 / 6)
    continued, _ = in_pieces(model, ids[:, 6:], [4], cache)
    assert relative_difference(continued, model(ids)[:, 6:]) > 100 * BOUND


CONTINUE = """
import sys, mlx.core as mx, numpy as np, wiola_mlx
folder, saved, last, out = sys.argv[1:]
model, _ = wiola_mlx.load_model(folder)
cache = wiola_mlx.load_prompt_cache(saved, model)
token, chosen = int(last), []
for _ in range(5):
    token = model(mx.array([[token]]), cache=cache)[0, -1].argmax().item()
    chosen.append(token)
np.save(out, np.array(chosen))
"""


@pytest.mark.parametrize("length", [255, 256, 257])
def test_issue_B3_a_saved_cache_goes_on_in_a_new_process(checkpoint, tmp_path, length):
    model, _ = wiola_mlx.load_model(checkpoint)
    ids, cache = tokens(length), model.make_cache()
    last = model(ids, cache=cache)[0, -1].argmax().item()
    wiola_mlx.save_prompt_cache(tmp_path / "cache.safetensors", cache, model)
    subprocess.run(
        [sys.executable, "-c", CONTINUE, checkpoint, "cache.safetensors", str(last), "chosen.npy"],
        cwd=tmp_path,
        check=True,
    )
    expected, token = [], last
    for _ in range(5):
        token = model(mx.array([[token]]), cache=cache)[0, -1].argmax().item()
        expected.append(token)
    assert np.load(tmp_path / "chosen.npy").tolist() == expected


def test_a_saved_cache_holds_valid_positions_only_and_equals_what_was_saved(loaded, tmp_path):
    model, _ = loaded
    _, cache = in_pieces(model, tokens(20), [20])
    trim_prompt_cache(cache, 7)
    path = tmp_path / "cache.safetensors"
    wiola_mlx.save_prompt_cache(path, cache, model, {"about": "a test"})
    again, metadata = wiola_mlx.load_prompt_cache(path, model, return_metadata=True)
    assert again[0][0].keys.shape[2] == 13
    assert metadata["about"] == "a test"
    assert_same_state(again, cache, bound=0)
    stock = load_prompt_cache(str(path))
    assert_same_state(stock, cache, bound=0)


def test_a_quantized_cache_can_be_saved_too(loaded, tmp_path):
    model, _ = loaded
    _, cache = in_pieces(model, tokens(20), [20])
    cache = [layer.to_quantized(group_size=32, bits=8) for layer in cache]
    wiola_mlx.save_prompt_cache(tmp_path / "q.safetensors", cache, model)
    again = wiola_mlx.load_prompt_cache(tmp_path / "q.safetensors", model)
    more = tokens(3, seed=3)
    assert relative_difference(model(more, cache=again), model(more, cache=cache)) == 0


def test_issue_B3_foreign_classes_are_refused_by_name(loaded, tmp_path):
    model, _ = loaded
    _, cache = in_pieces(model, tokens(4), [4])
    path = tmp_path / "cache.safetensors"
    wiola_mlx.save_prompt_cache(path, cache, model)
    arrays, header = mx.load(str(path), return_metadata=True)
    mx.save_safetensors(str(path), arrays, {**header, "1.0": "os"})
    with pytest.raises(wiola_mlx.WiolaError, match="os"):
        wiola_mlx.load_prompt_cache(path, model)
    nested = next(header[k[:-1] + "0"] for k, v in header.items() if v == "string")
    arrays[nested] = mx.array([ord(c) for c in "eval"])
    mx.save_safetensors(str(path), arrays, header)
    with pytest.raises(wiola_mlx.WiolaError, match="eval"):
        wiola_mlx.load_prompt_cache(path, model)


@pytest.mark.parametrize(
    "damage",
    [
        {"0.0.0.2": mx.array(5)},
        {"0.0.0.2": mx.array(-5)},
        {"0.0.0.2": mx.array(True)},
        {"0.0.0.0": mx.zeros((1, 2, 4, 32), mx.int32)},
        {"0.1.0.0": mx.full((1, 1, 4, 16), float("nan"))},
    ],
    ids=["too long", "negative", "boolean", "integers", "nan"],
)
def test_a_cache_file_with_wrong_contents_is_refused(loaded, tmp_path, damage):
    model, _ = loaded
    _, cache = in_pieces(model, tokens(4), [4])
    path = tmp_path / "cache.safetensors"
    wiola_mlx.save_prompt_cache(path, cache, model)
    arrays, header = mx.load(str(path), return_metadata=True)
    assert damage.keys() <= arrays.keys()
    mx.eval(arrays)
    mx.save_safetensors(str(path), {**arrays, **damage}, header)
    with pytest.raises(wiola_mlx.WiolaError, match=r"damaged|another shape"):
        wiola_mlx.load_prompt_cache(path, model)


def test_caches_of_other_models_and_damaged_files_are_refused(loaded, tmp_path):
    model, _ = loaded
    path = tmp_path / "cache.safetensors"
    for other, reason in (
        (tiny.random_model(num_hidden_layers=3), "another shape"),
        (tiny.random_model(num_attention_heads=4), "another shape"),
        (tiny.random_model(seed=5), "other weights"),
    ):
        _, cache = in_pieces(other, tokens(4), [4])
        wiola_mlx.save_prompt_cache(path, cache, other)
        with pytest.raises(wiola_mlx.WiolaError, match=reason):
            wiola_mlx.load_prompt_cache(path, model)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(wiola_mlx.WiolaError, match="no readable prompt cache"):
        wiola_mlx.load_prompt_cache(path, model)
    with pytest.raises(wiola_mlx.WiolaError, match="one sequence"):
        wiola_mlx.save_prompt_cache(path, model.make_cache(), model)
    with pytest.raises(wiola_mlx.WiolaError, match="no prompt cache file"):
        wiola_mlx.load_prompt_cache(tmp_path / "none.safetensors", model)
    with pytest.raises(wiola_mlx.WiolaError, match="cannot be written"):
        wiola_mlx.save_prompt_cache(tmp_path / "no" / "c.safetensors", cache, model)
    assert [p.name for p in tmp_path.iterdir()] == ["cache.safetensors"]
