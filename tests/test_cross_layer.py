"""The cross-layer family: parity with its published package, its cache, and token merging."""

import copy
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
import tiny
from conftest import relative_difference, sums_of
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import trim_prompt_cache
from test_batch import alone, feed, left_padded_cache, pad, prompts, right_padded_cache
from test_cache import in_pieces, tokens

import wiola_mlx
from wiola_mlx.models import cross_layer, wiola
from wiola_mlx.models.running_sums import accumulate

FOLDERS = sorted((Path(__file__).parent / "reference").glob("gcla-*"))
BOUND, GRADIENT_BOUND, CACHE_BOUND = 5e-6, 1e-4, 1e-5
CONFIG = {
    "model_type": "wiola",
    "vocab_size": tiny.VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "dsff_narrow_size": 48,
    "dsff_wide_size": 96,
    "srpe_radial_amplitude": 0.4,
    "srpe_radial_frequency": 0.5,
    "gcla_lookback": 2,
    "atm_threshold": 0.1,
    "eos_token_id": 2,
}
VARIANTS = {
    "grouped": {},
    "three layers back, one head a group": {"gcla_lookback": 3, "num_key_value_heads": None},
    "one layer back": {"gcla_lookback": 1, "num_key_value_heads": 1},
    "a single layer": {"num_hidden_layers": 1},
}


def random_model(seed: int = 0, **changes):
    """Weights of std 1/√in, contexts of more, half of each head from context: a leak shows."""
    model = wiola.Model(wiola.ModelArgs.from_dict({**CONFIG, **changes}))
    keys = mx.random.split(mx.random.key(seed), len(tree_flatten(model.parameters())))
    weights = []
    for key, (name, array) in zip(keys, tree_flatten(model.parameters()), strict=True):
        scale = (4 if "_ctx_" in name else 1) * (array.shape[-1] if array.ndim else 1) ** -0.5
        noise = mx.random.normal(array.shape, scale=scale, key=key)
        weights.append((name, 1 + noise if name.endswith("norm.weight") else noise))
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())
    return model.eval()


def write_checkpoint(folder: Path, **changes) -> Path:
    folder.mkdir(exist_ok=True)
    weights = dict(tree_flatten(random_model(**changes).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    tiny.write_json(folder / "config.json", {**CONFIG, **changes})
    tiny.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS)
def model(request):
    return random_model(**request.param)


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def reference(request):
    model, _ = wiola_mlx.load_model(request.param)
    return model, np.load(request.param / "golden.npz")


def loss_of(model, ids):
    return nn.losses.cross_entropy(model(ids)[:, :-1], ids[:, 1:], reduction="mean")


def assert_same_rows(cache, rows, model):
    """The sums of each row, and what comes after it, are those of a run of its own."""
    solo = [alone(model, row)[1] for row in rows]
    for index, own in enumerate(solo):
        extracted = [layer.extract(index) for layer in cache]
        for a, b in zip(sums_of(extracted[:-1]), sums_of(own[:-1]), strict=True):
            assert relative_difference(a, b) <= CACHE_BOUND
    following = tokens(1, seed=99, batch=len(rows))
    batch = model(following, cache=cache)
    for index, own in enumerate(solo):
        expected = model(following[index : index + 1], cache=own)
        assert relative_difference(batch[index : index + 1], expected) <= CACHE_BOUND


# Parity


def test_six_checkpoints_are_compared():
    assert len(FOLDERS) == 6


def test_logits_of_the_full_pass(reference):
    model, golden = reference
    logits = model(mx.array(golden["input_ids"]))
    assert relative_difference(logits, golden["logits"]) <= BOUND


def test_logits_and_sums_in_the_goldens_pieces(reference):
    model, golden = reference
    logits, cache = in_pieces(model, mx.array(golden["input_ids"]), golden["chunks"].tolist())
    assert relative_difference(logits, golden["step_logits"]) <= BOUND
    kept = mx.stack([sums[:, -1] for sums in sums_of(cache[:-1])])
    assert relative_difference(kept, golden["layer_sum"][:-1]) <= BOUND
    assert len(cache[-1].caches) == 1  # nothing reads the last layer's output


def test_loss_and_gradients(reference):
    model, golden = reference
    ids = mx.array(golden["input_ids"])
    value, gradients = nn.value_and_grad(model, lambda m: loss_of(m, ids))(model)
    assert abs(value.item() / golden["eval_loss"] - 1) <= BOUND
    gradients = dict(tree_flatten(gradients))
    names = [name for name in golden.files if name.startswith("grad:")]
    assert len(names) >= 27
    for name in names:
        difference = relative_difference(gradients[name.removeprefix("grad:")], golden[name])
        assert difference <= GRADIENT_BOUND, name


def test_training_with_token_merging(reference, capsys):
    model, golden = reference
    ids = mx.array(golden["input_ids"])
    model.train()
    assert relative_difference(model(ids), golden["logits"]) <= BOUND  # off unless asked for
    if model.args.atm_enabled:
        model.set_token_merging()
        assert "leaks the future" in capsys.readouterr().err
    assert relative_difference(model(ids), golden["train_logits"]) <= BOUND
    assert abs(loss_of(model, ids).item() / golden["train_loss"] - 1) <= BOUND
    assert np.allclose(model.merge_ratios(ids), golden["merge_ratio"], rtol=0, atol=1e-6)
    model.eval()
    assert relative_difference(model(ids), golden["logits"]) <= BOUND


@pytest.mark.parametrize(
    "name, count",
    [
        ("120m", 147_297_804),
        ("360m", 318_048_272),
        ("700m", 1_068_518_424),
        ("1.5b", 2_179_698_716),
    ],
)
def test_parameter_counts_of_the_presets(name, count):
    model = cross_layer.Model(cross_layer.PRESETS[name])
    assert sum(array.size for _, array in tree_flatten(model.parameters())) == count


# Arguments and dtypes


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"hidden_size": 66}, "hidden_size 66"),
        ({"hidden_size": 60}, "even head size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_attention_heads": -4}, "num_attention_heads is -4"),
        ({"gcla_lookback": 0}, "gcla_lookback is 0"),
        ({"srpe_spiral_divisor": 0}, "srpe_spiral_divisor is 0"),
        ({"srpe_theta": -1.0}, "srpe_theta is -1.0"),
    ],
)
def test_arguments_that_make_no_model_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        wiola.ModelArgs.from_dict({**CONFIG, **changes})


def test_key_value_heads_default_to_heads(tmp_path):
    model, _ = wiola_mlx.load_model(write_checkpoint(tmp_path, num_key_value_heads=None))
    assert model.args.num_key_value_heads == model.args.num_attention_heads


def test_blend_and_offsets_stay_float32():
    model, _ = wiola_mlx.load_model(FOLDERS[0], dtype=mx.bfloat16)
    for name, array in tree_flatten(model.parameters()):
        kept = name.endswith(("blend_logit", "offset"))
        assert array.dtype == (mx.float32 if kept else mx.bfloat16), name
    cache = model.make_cache()
    assert model(tokens(5), cache=cache).dtype == mx.bfloat16
    assert cache[1][0].keys.dtype == mx.bfloat16
    assert cache[1][1].keys.dtype == mx.float32


def test_bfloat16_counts_past_256_positions():
    model = random_model()
    model.set_dtype(mx.bfloat16)
    ids, cache = tokens(300), model.make_cache()
    model(ids, cache=cache)
    outputs = model.model.hidden_states(ids)[1:-1]
    for sums, output in zip(sums_of(cache[:-1]), outputs, strict=True):
        exact = np.cumsum(np.array(output.astype(mx.float32), dtype=np.float64), axis=1)
        assert relative_difference(sums, exact) <= CACHE_BOUND
        exact /= np.arange(1, 301)[:, None]
        _, means = accumulate(output)
        assert relative_difference(means[:, 256:], exact[:, 256:]) <= CACHE_BOUND


# The cache


@pytest.mark.parametrize(
    "sizes", [[1] * 40, [40], [39, 1], [1, 39], [7, 1, 1, 16, 15]], ids=lambda s: f"{len(s)} cuts"
)
def test_any_cutting_equals_the_full_pass(model, sizes):
    ids = tokens(40)
    logits, cache = in_pieces(model, ids, sizes)
    assert relative_difference(logits, model(ids)) <= CACHE_BOUND
    _, whole = in_pieces(model, ids, [40])
    for a, b in zip(sums_of(cache[:-1]), sums_of(whole[:-1]), strict=True):
        assert relative_difference(a, b) <= CACHE_BOUND


def test_cutting_across_the_growth_of_the_buffers(model):
    ids = tokens(262)
    logits, _ = in_pieces(model, ids, [255, 1, 1, 1, 4])
    assert relative_difference(logits, model(ids)) <= CACHE_BOUND


@pytest.mark.parametrize("trimmed", [0, 1, 9, 10])
def test_trimmed_tokens_were_never_seen(model, trimmed):
    ids, others = tokens(10), tokens(4, seed=1)
    _, cache = in_pieces(model, ids, [6, 4])
    assert trim_prompt_cache(cache, trimmed) == trimmed
    twin = copy.deepcopy(cache)
    whole = mx.concatenate([ids[:, : 10 - trimmed], others], axis=1)
    for own in (cache, twin):
        continued, _ = in_pieces(model, others, [1, 3], own)
        assert relative_difference(continued, model(whole)[:, -4:]) <= CACHE_BOUND


def test_a_wrong_sum_would_be_seen():
    model = random_model()
    ids = tokens(10)
    for wrong in range(3):
        _, cache = in_pieces(model, ids[:, :6], [6])
        cache[wrong][1].keys = cache[wrong][1].keys * (7 / 6)
        continued, _ = in_pieces(model, ids[:, 6:], [4], cache)
        assert relative_difference(continued, model(ids)[:, 6:]) > 100 * CACHE_BOUND


@pytest.mark.parametrize("step", [4, 100], ids=["in chunks", "at once"])
@pytest.mark.parametrize("lengths", [[9, 4, 1], [3, 31]], ids=str)
def test_padded_rows_equal_rows_alone(model, lengths, step):
    rows = prompts(lengths)
    padding = [max(lengths) - n for n in lengths]
    left, right = left_padded_cache(model, padding), right_padded_cache(model, lengths)
    from_left = feed(model, pad(rows, "left"), left, step)
    from_right = feed(model, pad(rows, "right"), right, step)
    for index, row in enumerate(rows):
        expected = alone(model, row)[0]
        for logits, start in ((from_left, padding[index]), (from_right, 0)):
            got = logits[index : index + 1, start : start + row.shape[1]]
            assert relative_difference(got, expected) <= CACHE_BOUND
    for layer in right:
        layer.finalize()
    assert_same_rows(left, rows, model)
    assert_same_rows(right, rows, model)


def test_filter_join_reorder_and_trim(model):
    rows, others = prompts([9, 4, 6, 1]), prompts([3, 5])
    cache = left_padded_cache(model, [0, 5, 3, 8])
    feed(model, pad(rows, "left"), cache, 100)
    other = left_padded_cache(model, [2, 0])
    feed(model, pad(others, "left"), other, 2)
    for layer, joined in zip(cache, other, strict=True):
        layer.filter([2, 1])
        layer.extend(joined)
    rows = [rows[2], rows[1], *others]
    assert_same_rows(cache, rows, model)
    for layer in cache:
        layer.trim(3)
    assert_same_rows(cache, [row[:, :-2] for row in rows], model)


def test_nan_in_a_pad_does_not_leak():
    row = mx.maximum(tokens(5), 1)
    outputs = mx.random.normal((1, 8, 6), key=mx.random.key(0))
    outputs = mx.where(mx.arange(8)[None, :, None] < 3, float("nan"), outputs)
    model = random_model()
    layer = left_padded_cache(model, [3])[0]
    sums, means = accumulate(outputs, layer)
    assert relative_difference(sums[:, 3:], mx.cumsum(outputs[:, 3:], axis=1)) <= CACHE_BOUND
    assert not mx.isnan(means).any()
    cache = left_padded_cache(model, [3])
    logits = model(mx.pad(row, [(0, 0), (3, 0)]), cache=cache)[:, 3:]
    assert relative_difference(logits, model(row)) <= CACHE_BOUND


def test_a_saved_cache_goes_on(model, tmp_path):
    ids, more = tokens(20), tokens(3, seed=3)
    _, cache = in_pieces(model, ids, [20])
    wiola_mlx.save_prompt_cache(tmp_path / "cache.safetensors", cache, model)
    again = wiola_mlx.load_prompt_cache(tmp_path / "cache.safetensors", model)
    logits = model(more, cache=cache)
    assert relative_difference(model(more, cache=again), logits) <= CACHE_BOUND


def test_kv_bits_quantizes_k_and_v_only():
    """mlx-lm's quantized attention scales the queries in place, and the context needs them, too."""
    model = random_model(num_attention_heads=2, num_key_value_heads=1)
    ids, more = tokens(20), tokens(3, seed=3)
    _, cache = in_pieces(model, ids, [20])
    quantized = [layer.to_quantized(group_size=32, bits=8) for layer in copy.deepcopy(cache)]
    assert relative_difference(model(more, cache=quantized), model(more, cache=cache)) < 0.02
    assert quantized[0][1].keys.dtype == mx.float32
    assert quantized[0][1].offset == quantized[0][0].offset == 23


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return wiola_mlx.load(write_checkpoint(tmp_path_factory.mktemp("cross_layer")))


def test_a_neighbour_in_a_batch_changes_no_answer(loaded):
    model, tokenizer = loaded
    rows = [row[0].tolist() for row in prompts([12, 31, 3])]
    ask = {"max_tokens": 12, "return_token_ids": True, "return_logprobs": True}
    together = mlx_lm.batch_generate(model, tokenizer, rows, **ask)
    for index, row in enumerate(rows):
        solo = mlx_lm.batch_generate(model, tokenizer, [row], **ask)
        assert together.token_ids[index] == solo.token_ids[0]
        assert together.logprobs[index] == pytest.approx(solo.logprobs[0], abs=1e-4)


def test_a_draft_model_changes_no_answer(loaded):
    model, tokenizer = loaded
    draft = random_model(seed=1, num_hidden_layers=2)
    prompt = tokens(9)[0].tolist()

    def answer(**options):
        replies = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=20, **options)
        return [reply.token for reply in replies]

    assert answer(draft_model=draft, num_draft_tokens=3) == answer()
