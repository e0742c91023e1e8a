"""``python -m wiola_mlx.convert to-mlx``: a new folder, complete or absent."""

import json

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
from conftest import relative_difference
from mlx.utils import tree_flatten
from wiola_mlx.convert.__main__ import main
from wiola_mlx.convert.to_mlx import to_mlx

import wiola_mlx
from wiola_mlx import WiolaError

IDS = mx.array([[5, 9, 200, 41]])


def test_an_unquantized_copy_is_the_same(checkpoint, tmp_path):
    assert main(["to-mlx", str(checkpoint), str(tmp_path / "copy")]) == 0
    ours = dict(tree_flatten(wiola_mlx.load_model(tmp_path / "copy")[0].parameters()))
    for name, array in mx.load(str(checkpoint / "model.safetensors")).items():
        assert mx.array_equal(ours[name], array).item()
    names = {file.name for file in (tmp_path / "copy").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "model.safetensors"} <= names


@pytest.mark.parametrize("bits, bound", [(8, 0.05), (4, 1.0)])
def test_quantized_folders_load_here_and_in_stock_mlx_lm(checkpoint, tmp_path, bits, bound):
    import mlx_lm

    target = tmp_path / "quantized"
    to_mlx(checkpoint, target, bits=bits, group_size=32)
    model, _ = wiola_mlx.load(target)
    layer = model.layers[0]
    assert isinstance(layer.self_attn.q_proj, nn.QuantizedLinear)
    assert layer.self_attn.gate_fc1.weight.dtype == mx.float32
    wiola_mlx.register()
    stock, _ = mlx_lm.load(str(target))
    assert mx.array_equal(stock(IDS), model(IDS)).item()
    assert relative_difference(model(IDS), wiola_mlx.load_model(checkpoint)[0](IDS)) < bound


def test_issue_E3_a_tied_quantized_embedding_looks_up_and_projects_the_same_matrix(
    checkpoint, tmp_path
):
    to_mlx(checkpoint, tmp_path / "4bit", bits=4, group_size=32)
    model, _ = wiola_mlx.load_model(tmp_path / "4bit")
    embedding = model.model.embed_tokens
    matrix = mx.dequantize(
        embedding.weight, embedding.scales, embedding.biases, group_size=32, bits=4
    )
    assert relative_difference(embedding(IDS), matrix[IDS]) <= 1e-6
    hidden = model.model(IDS)
    assert relative_difference(model(IDS), hidden @ matrix.T) <= 1e-5


def test_issue_E1_a_layer_that_the_group_does_not_divide_stays_as_it_is(tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "m", intermediate_size=48)
    config = to_mlx(folder, tmp_path / "q", bits=4, group_size=32)
    assert config["quantization"]["bits"] == 4
    model, _ = wiola_mlx.load_model(tmp_path / "q")
    assert isinstance(model.layers[0].mlp.down_proj, nn.Linear)
    assert isinstance(model.layers[0].mlp.up_proj, nn.QuantizedLinear)


def test_dtype_casts_all_but_the_gate(checkpoint, tmp_path):
    assert main(["to-mlx", str(checkpoint), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    arrays = mx.load(str(tmp_path / "half" / "model.safetensors"))
    assert {a.dtype for n, a in arrays.items() if ".gate_fc" not in n} == {mx.bfloat16}
    assert {a.dtype for n, a in arrays.items() if ".gate_fc" in n} == {mx.float32}


def test_what_cannot_be_done_is_refused_and_leaves_nothing(checkpoint, tmp_path):
    before = sorted(checkpoint.iterdir())
    with pytest.raises(WiolaError, match="exists already"):
        to_mlx(checkpoint, checkpoint)
    with pytest.raises(WiolaError, match="bits"):
        to_mlx(checkpoint, tmp_path / "a", bits=7)
    to_mlx(checkpoint, tmp_path / "q", bits=8, group_size=32)
    with pytest.raises(WiolaError, match="quantized already"):
        to_mlx(tmp_path / "q", tmp_path / "b", bits=4)
    (tmp_path / "file").write_text("")
    with pytest.raises(WiolaError, match="cannot be written"):
        to_mlx(checkpoint, tmp_path / "file" / "c")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "q"]
    assert sorted(checkpoint.iterdir()) == before
    assert json.loads((tmp_path / "q" / "config.json").read_text())["quantization"]["bits"] == 8
