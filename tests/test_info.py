"""``python -m wiola_mlx.info``: formulas equal the arrays, and the figures that were published."""

import json

import mlx.core as mx
import pytest
import tiny
from mlx.utils import tree_flatten
from test_cross_layer import random_model as random_cross_layer
from test_cross_layer import write_checkpoint as write_cross_layer
from wiola_mlx.convert.to_mlx import to_mlx

from wiola_mlx import budget, info

KNOWN = {
    "nano": 12_915_888,
    "micro": 26_454_624,
    "small": 54_154_944,
    "120m": 147_297_804,
    "360m": 318_048_272,
    "700m": 1_068_518_424,
    "1.5b": 2_179_698_716,
}


@pytest.fixture
def quick(capsys):
    def run(*argv):
        code = info.main([*map(str, argv), "--json"])
        out, err = capsys.readouterr()
        return json.loads(out) if code == 0 else (code, out, err)

    return run


@pytest.mark.parametrize("preset", KNOWN)
def test_issue_7_counts_equal_the_real_arrays_for_every_preset(quick, preset):
    facts = quick(preset)
    model, _ = info.open_model(preset)
    arrays = sum(array.size for _, array in tree_flatten(model.parameters()))
    assert facts["parameters"]["total"] == facts["formula"]["total"] == arrays == KNOWN[preset]
    assert facts["formula_agrees"]
    assert facts["remark"].startswith(f'published as "{budget.PUBLISHED[preset]}"')


def test_all_presets_are_known():
    assert set(KNOWN) == set(budget.PRESETS) == set(budget.PUBLISHED)


def test_flops_of_nano_at_512_are_the_published_28_97_million(quick):
    assert quick("nano", "--context", 512)["flops_per_token"]["total"] == 28_970_752


def test_flops_count_every_weight_matrix_twice_and_the_cross_layer_ones_per_summary():
    args = random_cross_layer(num_hidden_layers=4, gcla_lookback=3).args
    flops, counts = budget.forward_flops(args, 7), budget.parameter_formula(args)
    assert flops["feed-forward"] == 2 * counts["feed-forward"]
    assert flops["attention projections"] == 2 * counts["attention"]
    per_summary = (counts["context attention"] // 4 - 1) * 2 + 4 * args.hidden_size
    assert flops["context attention"] == (0 + 1 + 2 + 3) * per_summary


@pytest.mark.parametrize("changes", [{}, {"use_attention_gate": False}, {"num_hidden_layers": 3}])
def test_cache_bytes_are_those_of_a_real_cache(changes):
    for model in (tiny.random_model(**changes), random_cross_layer(num_hidden_layers=3)):
        cache = model.make_cache()
        model(mx.zeros((1, 256), mx.int32), cache=cache)  # 256: a whole buffer
        parts = [part.keys_and_values() for layer in cache for part in layer.caches]
        real = sum(array.nbytes for pair in parts for array in pair)
        assert 256 * sum(budget.cache_bytes(model.args, 4).values()) == real


def test_counts_of_other_shapes_and_of_quantized_weights(own_checkpoint, tmp_path, quick):
    plain = quick(own_checkpoint)
    to_mlx(own_checkpoint, tmp_path / "q", bits=4, group_size=32)
    quantized = quick(tmp_path / "q")
    assert plain["formula_agrees"] and quantized["formula_agrees"]
    assert quantized["parameters"] == plain["parameters"]
    assert quantized["bits_per_weight"] < 8 < plain["bits_per_weight"]
    assert {row["bits"] for row in quantized["quantization"]} == {4}
    assert not plain["quantization"]
    assert plain["weight_bytes"] == 4 * plain["parameters"]["total"]
    assert plain["tokenizer"]["entries"] == 260
    assert plain["tokenizer"]["rows_without_entry"] == 40
    assert plain["tokenizer"]["stop_ids"] == [2]


@pytest.mark.parametrize("tied", [True, False])
def test_counts_of_a_cross_layer_folder(tmp_path, quick, tied):
    folder = write_cross_layer(tmp_path / "model", tie_word_embeddings=tied)
    facts = quick(folder)
    assert facts["formula_agrees"]
    assert ("head" in facts["parameters"]) is not tied
    assert facts["preset"] is facts["remark"] is None


def test_the_table_names_what_it_counts(capsys, own_checkpoint):
    assert info.main([str(own_checkpoint)]) == 0
    out = capsys.readouterr().out
    for word in ("parameters", "formula and count agree", "FLOPs a token", "running sums"):
        assert word in out


def test_mistakes_are_one_line(quick, tmp_path):
    for argv in (["nonsense"], [tmp_path], ["nano", "--context", 0]):
        code, out, err = quick(*argv)
        assert code == 1 and out == "" and err.count("\n") == 1
