"""Batches: each row equals the same prompt alone, whatever is beside it and how it is padded."""

import mlx.core as mx
import mlx_lm
import pytest
import tiny
from conftest import relative_difference, sums_of
from mlx_lm.models.cache import BatchKVCache
from test_cache import VARIANTS, in_pieces, tokens

from wiola_mlx.models.running_sums import CacheList

BOUND = 1e-5


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS)
def model(request):
    return tiny.random_model(num_attention_heads=4, **request.param)


def prompts(lengths) -> list[mx.array]:
    return [tokens(length, seed=10 + i) for i, length in enumerate(lengths)]


def alone(model, ids):
    cache = model.make_cache()
    return model(ids, cache=cache), cache


def pad(rows, side: str) -> mx.array:
    longest = max(row.shape[1] for row in rows)
    widths = [longest - row.shape[1] for row in rows]
    sides = [(w, 0) if side == "left" else (0, w) for w in widths]
    return mx.concatenate([mx.pad(r, [(0, 0), s]) for r, s in zip(rows, sides, strict=True)])


def left_padded_cache(model, padding):
    return [
        CacheList(*(BatchKVCache(padding) for _ in layer.caches)) for layer in model.make_cache()
    ]


def merged(caches):
    return [type(layers[0]).merge(list(layers)) for layers in zip(*caches, strict=True)]


def right_padded_cache(model, lengths):
    cache = merged([model.make_cache() for _ in lengths])
    padding = [max(lengths) - n for n in lengths]
    for layer in cache:
        layer.prepare(lengths=lengths, right_padding=padding)
    return cache


def feed(model, ids, cache, step):
    return mx.concatenate(
        [model(ids[:, i : i + step], cache=cache) for i in range(0, ids.shape[1], step)], axis=1
    )


def assert_rows_equal_solo_runs(model, cache, rows):
    """The state of each row, and what comes after it, are those of a run of its own."""
    solo = [alone(model, row)[1] for row in rows]
    for index, own in enumerate(solo):
        extracted = [layer.extract(index) for layer in cache]
        if model.args.use_attention_gate:
            for a, b in zip(sums_of(extracted), sums_of(own), strict=True):
                assert relative_difference(a, b) <= BOUND
        for a, b in zip(extracted, own, strict=True):
            assert relative_difference(a[0].keys, b[0].keys_and_values()[0]) <= BOUND
    following = tokens(1, seed=99, batch=len(rows))
    batch = model(following, cache=cache)
    for index, own in enumerate(solo):
        expected = model(following[index : index + 1], cache=own)
        assert relative_difference(batch[index : index + 1], expected) <= BOUND


@pytest.mark.parametrize("step", [4, 100], ids=["in chunks", "at once"])
@pytest.mark.parametrize("lengths", [[9, 4, 1], [12, 3], [3, 31]], ids=str)
def test_issue_C2_left_padding(model, lengths, step):
    rows = prompts(lengths)
    padding = [max(lengths) - n for n in lengths]
    cache = left_padded_cache(model, padding)
    logits = feed(model, pad(rows, "left"), cache, step)
    for index, row in enumerate(rows):
        expected = alone(model, row)[0]
        assert relative_difference(logits[index : index + 1, padding[index] :], expected) <= BOUND
    assert_rows_equal_solo_runs(model, cache, rows)


@pytest.mark.parametrize("step", [4, 100], ids=["in chunks", "at once"])
@pytest.mark.parametrize("lengths", [[9, 4, 1], [12, 3], [256, 5, 250]], ids=str)
def test_issue_C2_right_padding(model, lengths, step):
    rows = prompts(lengths)
    cache = right_padded_cache(model, lengths)
    logits = feed(model, pad(rows, "right"), cache, step if max(lengths) < 100 else 100)
    for index, row in enumerate(rows):
        got = logits[index : index + 1, : row.shape[1]]
        assert relative_difference(got, alone(model, row)[0]) <= BOUND
    for layer in cache:
        layer.finalize()
    assert_rows_equal_solo_runs(model, cache, rows)


@pytest.mark.parametrize("step", [3, 100], ids=["in chunks", "at once"])
def test_left_and_right_padding_at_once(model, step):
    heads, tails = prompts([7, 2, 5]), prompts([3, 8, 1])
    cache = merged([alone(model, head)[1] for head in heads])
    lengths = [tail.shape[1] for tail in tails]
    for layer in cache:
        layer.prepare(lengths=lengths, right_padding=[8 - n for n in lengths])
    feed(model, pad(tails, "right"), cache, step)
    for layer in cache:
        layer.finalize()
    rows = [mx.concatenate(pair, axis=1) for pair in zip(heads, tails, strict=True)]
    assert_rows_equal_solo_runs(model, cache, rows)


def test_a_row_of_pads_only_starts_from_nothing(model):
    """Right padding of a whole row leaves pads where the previous sum would be read."""
    lengths = [256, 0]  # a full buffer: nothing but pads behind the end
    rows = [tokens(256), tokens(1)[:, :0]]
    cache = right_padded_cache(model, lengths)
    feed(model, pad(rows, "right"), cache, 100)
    for layer in cache:
        layer.finalize()
    following = tokens(3, seed=99, batch=2)
    batch = in_pieces(model, following, [1, 2], cache)[0]
    assert relative_difference(batch[1:], model(following[1:])) <= BOUND


def test_filter_join_reorder_and_trim(model):
    rows = prompts([9, 4, 6, 1])
    cache = left_padded_cache(model, [0, 5, 3, 8])
    feed(model, pad(rows, "left"), cache, 100)
    for layer in cache:
        layer.filter([2, 1])  # kept and reordered; the common padding goes
    assert_rows_equal_solo_runs(model, cache, [rows[2], rows[1]])
    for layer in cache:
        layer.trim(1)  # what the comparison just added

    other_rows = prompts([3, 5])
    other = left_padded_cache(model, [2, 0])
    feed(model, pad(other_rows, "left"), other, 2)
    for layer, joined in zip(cache, other, strict=True):
        layer.extend(joined)
    assert_rows_equal_solo_runs(model, cache, [rows[2], rows[1], *other_rows])
    for layer in cache:
        layer.trim(3)
    shorter = [row[:, :-2] for row in (rows[2], rows[1], *other_rows)]
    assert_rows_equal_solo_runs(model, cache, shorter)


def test_nan_in_a_pad_does_not_leak():
    model = tiny.random_model()
    model.model.embed_tokens.weight[0] = float("nan")
    row = mx.maximum(tokens(5), 1)
    cache = left_padded_cache(model, [3])
    model(mx.pad(row, [(0, 0), (3, 0)]), cache=cache)
    assert relative_difference(sums_of(cache)[0][:, 3:], sums_of(alone(model, row)[1])[0]) <= BOUND


@pytest.mark.parametrize("neighbour", [3, 4, 31])
def test_issue_C1_a_neighbour_changes_no_answer(loaded, neighbour):
    model, tokenizer = loaded
    rows = [row[0].tolist() for row in prompts([12, neighbour, 3])]
    together = mlx_lm.batch_generate(
        model, tokenizer, rows, max_tokens=12, return_token_ids=True, return_logprobs=True
    )
    for index, row in enumerate(rows):
        solo = mlx_lm.batch_generate(
            model, tokenizer, [row], max_tokens=12, return_token_ids=True, return_logprobs=True
        )
        assert together.token_ids[index] == solo.token_ids[0]
        assert together.logprobs[index] == pytest.approx(solo.logprobs[0], abs=1e-4)
