"""Parity with the published PyTorch package on its own tiny checkpoints."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import relative_difference, sums_of
from mlx.utils import tree_flatten

import wiola_mlx

FOLDERS = sorted((Path(__file__).parent / "reference").glob("gsa-*"))
BOUND, GRADIENT_BOUND = 5e-6, 1e-4


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def reference(request):
    model, _ = wiola_mlx.load_model(request.param)
    return model, np.load(request.param / "golden.npz")


def test_eight_checkpoints_are_compared():
    assert len(FOLDERS) == 8


def test_logits_of_the_full_pass(reference):
    model, golden = reference
    logits = model(mx.array(golden["input_ids"]))
    assert relative_difference(logits, golden["logits"]) <= BOUND


def test_logits_and_sums_in_the_goldens_pieces(reference):
    model, golden = reference
    ids, cache = mx.array(golden["input_ids"]), model.make_cache()
    ends = np.cumsum(golden["chunks"]).tolist()
    pieces = [
        model(ids[:, end - size : end], cache=cache)
        for size, end in zip(golden["chunks"].tolist(), ends, strict=True)
    ]
    logits = mx.concatenate(pieces, axis=1)
    assert relative_difference(logits, golden["step_logits"]) <= BOUND
    if model.args.use_attention_gate:
        last = mx.stack([sums[:, -1] for sums in sums_of(cache)])
        assert relative_difference(last, golden["gate_sum"]) <= BOUND


def test_loss_and_gradients(reference):
    model, golden = reference
    ids = mx.array(golden["input_ids"])

    def loss(model):
        return nn.losses.cross_entropy(model(ids)[:, :-1], ids[:, 1:], reduction="mean")

    value, gradients = nn.value_and_grad(model, loss)(model)
    assert abs(value.item() / golden["eval_loss"] - 1) <= BOUND
    gradients = dict(tree_flatten(gradients))
    names = [name for name in golden.files if name.startswith("grad:")]
    assert len(names) >= 15
    for name in names:
        difference = relative_difference(gradients[name.removeprefix("grad:")], golden[name])
        assert difference <= GRADIENT_BOUND, name
