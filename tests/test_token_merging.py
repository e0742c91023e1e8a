"""Token merging: the pairs of a greedy scan, without a loop, and only where it was asked for."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny
from conftest import relative_difference
from mlx.utils import tree_flatten
from test_cache import in_pieces, tokens
from test_cross_layer import CACHE_BOUND, loss_of, random_model

from wiola_mlx.models import token_merging


def greedy_groups(similar: list[bool]) -> list[list[int]]:
    groups, i = [], 0
    while i <= len(similar):
        size = 2 if i < len(similar) and similar[i] else 1
        groups.append(list(range(i, i + size)))
        i += size
    return groups


def groups_of(pairs: token_merging.Pairs, row: int) -> list[list[int]]:
    first, last, merged = (array[row].tolist() for array in pairs)
    return [list(range(first[k], last[k] + 1)) for k in range(merged[-1] + 1)]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("length", [2, 3, 24])
def test_pairs_are_those_of_a_greedy_scan(share, length):
    similar = mx.random.uniform(shape=(8, length - 1), key=mx.random.key(length)) < share
    turns = mx.cumsum(mx.pad(mx.where(similar, 0.0, np.pi), [(0, 0), (1, 0)]), axis=1)
    x = mx.stack([mx.cos(turns), mx.sin(turns)], axis=-1)  # cosine 1 where similar, else −1
    pairs = token_merging.find_pairs(x, 0.0)
    ratios = []
    for row in range(8):
        groups = greedy_groups(similar[row].tolist())
        assert groups_of(pairs, row) == groups
        assert pairs.merged[row].tolist() == [k for k, group in enumerate(groups) for _ in group]
        ratios.append(1 - len(groups) / length)
    assert token_merging.merge_ratio(pairs).item() == pytest.approx(np.mean(ratios), abs=1e-6)


def test_merging_and_its_gradient_equal_a_loop_over_the_groups():
    x = mx.random.normal((1, 13, 4), key=mx.random.key(2))
    weights = mx.random.normal((1, 13, 4), key=mx.random.key(3))
    groups = groups_of(token_merging.find_pairs(x, 0.0), 0)
    assert 7 < len(groups) < 13

    def vectorised(x):
        pairs = token_merging.find_pairs(x, 0.0)
        merged = mx.tanh(token_merging.merge(x, pairs))
        return (weights * token_merging.unmerge(merged, pairs)).sum()

    def looped(x):
        means = [mx.tanh(x[:, group].mean(axis=1)) for group in groups]
        rows = [mean for mean, group in zip(means, groups, strict=True) for _ in group]
        return (weights * mx.stack(rows, axis=1)).sum()

    value, gradient = mx.value_and_grad(vectorised)(x)
    expected, expected_gradient = mx.value_and_grad(looped)(x)
    assert relative_difference(value, expected) <= 1e-6
    assert relative_difference(gradient, expected_gradient) <= 1e-6


def test_merging_needs_no_host():
    """A training step with it can be traced: reading a value would be an error here."""
    model = random_model()
    model.train()
    model.set_token_merging()
    step = nn.value_and_grad(model, loss_of)
    loss, gradients = mx.compile(lambda ids: step(model, ids))(tokens(17, batch=2))
    assert loss.shape == ()
    assert len(tree_flatten(gradients)) == len(tree_flatten(model.parameters()))
    with pytest.raises(ValueError, match="during function transformations"):
        mx.compile(lambda x: mx.array(x.sum().item()))(mx.ones(3))


@pytest.mark.parametrize("merging", [False, True])
def test_only_merging_sees_the_future(merging):
    model = random_model(atm_threshold=-1.0)
    model.train()
    model.set_token_merging(merging)
    ids = tokens(12)
    other = mx.concatenate([ids[:, :5], (ids[:, 5:6] + 1) % tiny.VOCAB_SIZE, ids[:, 6:]], axis=1)
    change = mx.abs(model(ids) - model(other)).max(axis=-1)[0]
    assert (change[4] > 1e-3).item() is merging  # tokens 4 and 5 are a pair
    assert change[:4].max() < 1e-4
    assert change[5] > 1e-3


def test_merging_leaves_cached_passes_and_single_tokens_alone():
    model = random_model(atm_threshold=-1.0)
    ids = tokens(9)
    expected = model(ids)
    model.train()
    model.set_token_merging()
    logits, _ = in_pieces(model, ids, [5, 4])
    assert relative_difference(logits, expected) <= CACHE_BOUND
    assert relative_difference(model(ids[:, :1]), expected[:, :1]) <= CACHE_BOUND
    model.set_token_merging(False)
    assert relative_difference(model(ids), expected) <= CACHE_BOUND
