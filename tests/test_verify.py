"""``python -m wiola_mlx.verify``: right weights pass, and injected cache bugs are found."""

import json
import math

import mlx.core as mx
import numpy as np
import pytest
import tiny
from conftest import ROOT
from mlx_lm.models.cache import KVCache
from test_cross_layer import random_model as random_cross_layer
from test_cross_layer import write_checkpoint as write_cross_layer

import wiola_mlx
from wiola_mlx import equivalence, verify
from wiola_mlx.models import cross_layer, gated_attention, gated_spiral, running_sums

FAMILIES = {"gated spiral": tiny.random_model, "cross layer": random_cross_layer}
REFERENCE = ROOT / "tests" / "reference"


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES)
def model(request):
    return request.param()


def report_on(model, tokens: int = 12) -> dict:
    ids = mx.random.randint(0, tiny.VOCAB_SIZE, (1, tokens), key=mx.random.key(1))
    return verify.verify_model(model, ids)


def failed(report: dict) -> set[str]:
    return {name for name, result in report["checks"].items() if not result["passed"]}


def test_a_right_model_passes_every_check(model):
    report = report_on(model, tokens=20)
    assert report["passed"] and not failed(report)
    assert len(report["checks"]) == 6
    assert all(r["probabilities"] <= 1e-4 for r in report["checks"].values())


def test_issue_7_it_finds_pads_that_are_counted(model, monkeypatch):
    def counting_pads(values, cache=None):
        offset = None if cache is None else cache[1].offset
        if not isinstance(offset, mx.array):
            return accumulate(values, cache)
        sums = mx.cumsum(values.astype(mx.float32), axis=1)
        previous = running_sums.previous_sums(cache)
        sums = sums if previous is None else sums + previous
        before = cache[1].size()
        running_sums.append_sums(cache, sums)
        return sums, sums / (before + mx.arange(1, values.shape[1] + 1))[None, :, None]

    accumulate = running_sums.accumulate
    for module in (gated_attention, cross_layer):
        monkeypatch.setattr(module, "accumulate", counting_pads)
    assert failed(report_on(model)) == {"left-padded batch", "right-padded batch"}


def test_issue_7_it_finds_sums_that_are_not_rewound(model, monkeypatch):
    class Forgetful(KVCache):
        def trim(self, n):
            self.late = getattr(self, "late", 0) + n
            return super().trim(n)

    Forgetful.__name__ = "KVCache"  # a cache file names its classes

    def stale(cache):
        late = getattr(cache[1], "late", 0)
        cache[1].offset += late
        try:
            return previous(cache)
        finally:
            cache[1].offset -= late
            cache[1].late = 0

    def make_cache(sums=True):
        parts = [KVCache(), Forgetful()] if sums else [KVCache()]
        return running_sums.CacheList(*parts)

    previous = running_sums.previous_sums
    monkeypatch.setattr(running_sums, "previous_sums", stale)
    for module in (gated_spiral, cross_layer):
        monkeypatch.setattr(module, "make_layer_cache", make_cache)
    assert failed(report_on(model)) == {"trim and go on"}


def test_issue_7_it_finds_a_position_that_is_off_by_one(model, monkeypatch):
    fast_rope = mx.fast.rope

    def one_off(x, dims, *, offset, **options):
        late = offset if isinstance(offset, mx.array) or offset == 0 else offset + 1
        return fast_rope(x, dims, offset=late, **options)

    monkeypatch.setattr(mx.fast, "rope", one_off)
    found = failed(report_on(model))
    assert {"step by step", "random chunks", "trim and go on", "save and load"} <= found


def test_issue_7_a_lost_sum_shows_on_trained_weights_too(monkeypatch):
    model, _ = wiola_mlx.load_model("builtin", dtype=mx.float32)
    ids = mx.random.randint(0, 4096, (1, 8), key=mx.random.key(1))
    step = equivalence.CHECKS["step by step"]
    bound = verify.TOLERANCE["float32"]
    assert equivalence.differences(step(model, ids, None))["relative"] <= bound
    monkeypatch.setattr(running_sums, "previous_sums", lambda cache: None)
    assert equivalence.differences(step(model, ids, None))["relative"] > 100 * bound


def test_nan_is_a_difference(model):
    model.model.embed_tokens.weight[5] = math.nan
    report = report_on(model)
    assert not report["passed"]
    assert json.dumps(verify.finite(report), allow_nan=False)


@pytest.mark.parametrize("name", ["gsa-base", "gcla-base"])
def test_the_golden_of_the_reference_is_compared(name, capsys, tmp_path):
    folder = REFERENCE / name
    argv = [str(folder), "--tokens", "6", "--json", "--golden"]
    assert verify.main([*argv, str(folder / "golden.npz")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["checks"]["golden"]["relative"] <= 5e-6
    golden = dict(np.load(folder / "golden.npz"))
    np.savez(tmp_path / "off.npz", **{**golden, "logits": golden["logits"] + 0.1})
    assert verify.main([*argv, str(tmp_path / "off.npz")]) == 1
    report = json.loads(capsys.readouterr().out)
    assert failed(report) == {"golden"}


@pytest.mark.parametrize("dtype", ["stored", "float32", "bfloat16"])
def test_a_folder_by_command_and_its_verdict(checkpoint, dtype, capsys):
    argv = [str(checkpoint), "--prompt", "hello, world", "--dtype", dtype]
    assert verify.main(argv) == 0
    assert "equals the full pass: 12 tokens" in capsys.readouterr().out


def test_a_cross_layer_folder_by_command(tmp_path, capsys):
    assert verify.main([str(write_cross_layer(tmp_path / "m")), "--tokens", "9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]


def test_mistakes_are_one_line(checkpoint, tmp_path, capsys):
    tiny.write_json(tmp_path / "no.npz", {})
    for argv in (
        ["nonsense"],
        [checkpoint, "--tokens", 1],
        [checkpoint, "--prompt", "a"],
        [checkpoint, "--golden", tmp_path / "no.npz"],
        [checkpoint, "--golden", tmp_path / "missing.npz"],
        [checkpoint, "--golden", REFERENCE / "gcla-base" / "golden.npz"],
    ):
        assert verify.main([*map(str, argv)]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1, err
