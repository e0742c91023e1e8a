"""``python -m wiola_mlx.convert``: to-mlx, to-hf, and the manners of all conversions."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny
from conftest import relative_difference
from conversions import (
    arrays,
    every_conversion,
    logits,
    random_checkpoint,
    reference,
    small_config,
    tensors,
)
from mlx.utils import tree_flatten
from wiola_mlx.convert.gguf_format import read_gguf
from wiola_mlx.convert.to_gguf import to_gguf
from wiola_mlx.convert.to_hf import to_hf
from wiola_mlx.convert.to_mlx import to_mlx

import wiola_mlx
from wiola_mlx import WiolaError

IDS = mx.array([[5, 9, 200, 41]])


def config_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


# Quantization


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
    assert relative_difference(model(IDS), logits(checkpoint)) < bound


@pytest.mark.parametrize("recipe", [None, "mixed_3_6", "mixed_4_6"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantization_is_mlx_lms_own(checkpoint, tmp_path, recipe, dtype):
    from mlx_lm.convert import mixed_quant_predicate_builder
    from mlx_lm.utils import quantize_model

    model, config = wiola_mlx.load_model(checkpoint, dtype=getattr(mx, dtype))
    predicate = recipe and mixed_quant_predicate_builder(recipe, model, 32)
    bits = None if recipe else 4
    expected, expected_config = quantize_model(
        model, dict(config), 32, bits or 4, quant_predicate=predicate
    )
    report = to_mlx(
        checkpoint, tmp_path / "q", bits=bits, group_size=32, recipe=recipe, dtype=dtype
    )
    found = mx.load(str(tmp_path / "q" / "model.safetensors"))
    wanted = dict(tree_flatten(expected.parameters()))
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        assert mx.array_equal(found[name], array).item(), name
    for path, settings in expected_config["quantization"].items():
        if isinstance(settings, dict) and path in report.config["quantization"]:
            assert report.config["quantization"][path] == settings


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_float_modes_load(checkpoint, tmp_path, mode):
    to_mlx(checkpoint, tmp_path / "q", mode=mode)
    model, config = wiola_mlx.load_model(tmp_path / "q")
    assert config["quantization"]["mode"] == mode
    assert relative_difference(model(IDS), logits(checkpoint)) < 1.0
    to_gguf(tmp_path / "q", tmp_path / "x.gguf")
    kind = read_gguf(tmp_path / "x.gguf").records["blk.0.attn_q.weight"].kind
    assert kind == {"mxfp4": "MXFP4", "nvfp4": "NVFP4", "mxfp8": "F16"}[mode]
    if mode == "nvfp4":  # whose blocks of 64 do not divide rows of 96
        down = read_gguf(tmp_path / "x.gguf").records["blk.0.ffn_down.weight"]
        assert down.kind == "F16"
    to_hf(tmp_path / "q", tmp_path / "a")
    to_hf(tmp_path / "x.gguf", tmp_path / "b")
    if mode == "mxfp4":
        assert tensors(tmp_path / "a") == tensors(tmp_path / "b")


def test_recipes_know_the_layers_of_the_cross_layer_family(tmp_path):
    report = to_mlx(reference("gcla-base"), tmp_path / "q", recipe="mixed_3_6", group_size=32)
    bits = {row["name"]: row["to"].split()[0] for row in report.tensors}
    assert bits["model.layers.0.ffn.up_a.weight"] == "3"
    assert bits["model.layers.5.ffn.down_a.weight"] == "6"
    assert bits["model.layers.5.attn.v_ctx_proj.weight"] == "6"
    assert (
        relative_difference(
            wiola_mlx.load_model(tmp_path / "q")[0](IDS), logits(reference("gcla-base"))
        )
        < 2
    )


@pytest.mark.parametrize("name", ["gsa-base", "gcla-base"])
def test_bits_per_weight_are_true_and_gates_are_never_quantized(name, tmp_path):
    report = to_mlx(reference(name), tmp_path / "q", quantize=True)
    (file,) = (tmp_path / "q").glob("*.safetensors")
    data = sum(len(data) for _, _, data in tensors(tmp_path / "q").values())
    parameters = sum(array.size for array in arrays(reference(name)).values())
    assert report.bits_per_weight == pytest.approx(8 * data / parameters)
    assert data < file.stat().st_size < data + 40_000
    for tensor, (kind, *_) in tensors(tmp_path / "q").items():
        if any(word in tensor for word in (".gate_fc", "norm", "blend_logit", "offset")):
            assert kind == "F32"


def test_issue_E3_a_tied_quantized_embedding_looks_up_and_projects_the_same_matrix(
    checkpoint, tmp_path
):
    to_mlx(checkpoint, tmp_path / "4bit", bits=4, group_size=32)
    assert not any(name.startswith("lm_head") for name in tensors(tmp_path / "4bit"))
    model, _ = wiola_mlx.load_model(tmp_path / "4bit")
    embedding = model.model.embed_tokens
    matrix = mx.dequantize(
        embedding.weight, embedding.scales, embedding.biases, group_size=32, bits=4
    )
    assert relative_difference(embedding(IDS), matrix[IDS]) <= 1e-6
    hidden = model.model(IDS)
    assert relative_difference(model(IDS), hidden @ matrix.T) <= 1e-5


@pytest.mark.parametrize("group_size", [32, 64])
def test_issue_E1_layers_that_the_group_does_not_divide_are_named_and_stay(tmp_path, group_size):
    folder = tiny.write_checkpoint(tmp_path / "m", hidden_size=48, intermediate_size=128)
    report = to_mlx(folder, tmp_path / "q", bits=4, group_size=group_size)
    (reason,) = report.kept
    assert f"groups of {group_size}" in reason
    assert "model.layers.0.self_attn.q_proj [48, 48]" in report.kept[reason]
    quantization = config_of(tmp_path / "q")["quantization"]
    assert quantization["model.embed_tokens"] is False
    assert "model.layers.0.mlp.down_proj" not in quantization
    model, _ = wiola_mlx.load_model(tmp_path / "q")
    assert isinstance(model.layers[0].self_attn.q_proj, nn.Linear)
    assert isinstance(model.layers[0].mlp.down_proj, nn.QuantizedLinear)
    import mlx_lm

    wiola_mlx.register()
    assert mx.array_equal(mlx_lm.load(str(tmp_path / "q"))[0](IDS), model(IDS)).item()


def test_issue_E1_nothing_to_quantize_is_one_line(tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "m", hidden_size=48, intermediate_size=48)
    with pytest.raises(WiolaError, match=r"nothing can be quantized.*embed_tokens \[300, 48\]"):
        to_mlx(folder, tmp_path / "q", bits=4)
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize(
    "options, word",
    [
        ({"bits": 7}, "bits"),
        ({"bits": 4, "group_size": 16}, "group size"),
        ({"group_size": 32}, "without quantization"),
        ({"mode": "mxfp4", "bits": 8}, "mxfp4 has 4 bits"),
        ({"mode": "no"}, "mode"),
        ({"recipe": "no"}, "recipe"),
        ({"recipe": "mixed_3_6", "bits": 4}, "chooses the bits"),
        ({"dtype": "float8"}, "float8"),
    ],
)
def test_options_that_do_not_fit_are_one_line(checkpoint, tmp_path, options, word):
    with pytest.raises(WiolaError, match=word):
        to_mlx(checkpoint, tmp_path / "a", **options)
    assert not list(tmp_path.iterdir())


def test_a_quantized_source_is_not_quantized_again(checkpoint, tmp_path):
    to_mlx(checkpoint, tmp_path / "q", bits=8, group_size=32)
    to_gguf(checkpoint, tmp_path / "q.gguf", "q8_0")
    for source in (tmp_path / "q", tmp_path / "q.gguf"):
        with pytest.raises(WiolaError, match="quantized already"):
            to_mlx(source, tmp_path / "b", bits=4)
    to_mlx(tmp_path / "q", tmp_path / "copy")
    assert tensors(tmp_path / "copy") == tensors(tmp_path / "q")


def perplexity(model, ids: mx.array) -> float:
    losses = nn.losses.cross_entropy(model(ids[:, :-1]).astype(mx.float32), ids[:, 1:])
    return mx.exp(losses.mean()).item()


def test_issue_E4_perplexity_of_8_bits_and_of_the_4_bit_default(shared, tmp_path):
    source = shared / "released" / "pico"
    model, tokenizer = wiola_mlx.load(source)
    text = (shared / "corpus" / "tinystories_valid.txt").read_text()[:2000]
    ids = mx.array([tokenizer.encode(text)])
    expected = perplexity(model, ids)
    found = {}
    for name, options in (("8bit", {"bits": 8}), ("4bit", {"quantize": True})):
        to_mlx(source, tmp_path / name, **options)
        to_hf(tmp_path / name, tmp_path / f"{name}-dense")  # the same values, faster on a CPU
        found[name] = perplexity(wiola_mlx.load_model(tmp_path / f"{name}-dense")[0], ids)
    assert found["8bit"] < 1.01 * expected
    assert found["4bit"] < 1.05 * expected < 4096  # 1.2 % over a long text


# Dtypes


def test_issue_K4_dtypes_are_as_asked_and_the_config_says_so(tmp_path):
    folder = random_checkpoint(tmp_path / "m", small_config("gsa-base"), mx.bfloat16)
    for dtype in (None, "float16", "float32", "bfloat16"):
        for convert in (to_mlx, to_hf):
            target = tmp_path / f"{convert.__name__}-{dtype}"
            convert(folder, target, dtype=dtype)
            kind = {"float16": "F16", "float32": "F32"}.get(dtype, "BF16")
            for name, (found, *_) in tensors(target).items():
                assert found == ("BF16" if ".gate_fc" in name else kind)
            assert config_of(target)["torch_dtype"] == (dtype or "bfloat16")
    assert tensors(tmp_path / "to_mlx-None") == tensors(folder)
    assert tensors(tmp_path / "to_hf-bfloat16") == tensors(folder)
    narrow, wide = arrays(tmp_path / "to_mlx-float16"), arrays(folder)
    for name, array in wide.items():
        assert np.array_equal(narrow[name], array.astype(np.float16).astype(np.float32))


def test_issue_K4_the_released_dtype_key_is_the_one_that_is_updated(tmp_path):
    config = small_config("gcla-base", dtype="float32")
    config.pop("torch_dtype")
    folder = random_checkpoint(tmp_path / "m", config)
    to_mlx(folder, tmp_path / "a", dtype="bfloat16")
    assert config_of(tmp_path / "a") == {**config, "dtype": "bfloat16"}
    kinds = {name: kind for name, (kind, *_) in tensors(tmp_path / "a").items()}
    assert kinds["model.layers.0.attn.blend_logit"] == kinds["model.final_norm.offset"] == "F32"


@every_conversion
def test_issue_K4_values_beyond_float16_warn_and_stay_exact(
    own_checkpoint, tmp_path, convert, name
):
    weights = dict(mx.load(str(own_checkpoint / "model.safetensors")))
    weights["model.layers.0.mlp.up_proj.weight"][3, 4] = 70_000.0
    mx.eval(weights)
    mx.save_safetensors(str(own_checkpoint / "model.safetensors"), weights)
    target = tmp_path / name
    options = {"kind": "F16"} if convert is to_gguf else {"dtype": "float16"}
    with pytest.warns(UserWarning, match=r"beyond.*F16.*float32.*layers\.0\.mlp\.up_proj"):
        convert(own_checkpoint, target, **options)
    model, _ = wiola_mlx.load_model(target)
    assert model.layers[0].mlp.up_proj.weight.dtype == mx.float32
    assert model.layers[0].mlp.up_proj.weight[3, 4].item() == 70_000.0
    assert model.layers[0].mlp.down_proj.weight.dtype == mx.float16


@every_conversion
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_in_the_source_is_refused(own_checkpoint, tmp_path, convert, name, value):
    weights = dict(mx.load(str(own_checkpoint / "model.safetensors")))
    weights["model.layers.1.self_attn.q_proj.weight"][0, 7] = value
    mx.eval(weights)
    mx.save_safetensors(str(own_checkpoint / "model.safetensors"), weights)
    for options in ({}, {"kind": "q8_0"} if convert is to_gguf else {"dtype": "float16"}):
        with pytest.raises(WiolaError, match=r"NaN or infinity.*layers\.1\.self_attn\.q_proj"):
            convert(own_checkpoint, tmp_path / name, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# Sources


@every_conversion
def test_issue_K1_and_K2_shards_strays_pickles_and_heads(own_checkpoint, tmp_path, convert, name):
    expected = logits(own_checkpoint)
    tiny.write_shards(own_checkpoint)
    stray = own_checkpoint / "model-old.safetensors"
    mx.save_safetensors(str(stray), {"model.norm.weight": mx.zeros((64,))})
    with pytest.warns(UserWarning, match=r"model-old\.safetensors"):
        convert(own_checkpoint, tmp_path / "a" / name)
    assert mx.array_equal(logits(tmp_path / "a" / name), expected).item()
    stray.unlink()

    first = own_checkpoint / "model-00001-of-00002.safetensors"
    index = json.loads((own_checkpoint / "model.safetensors.index.json").read_text())
    weights = dict(mx.load(str(first)))
    embedding = arrays(own_checkpoint)["model.embed_tokens.weight"]
    index["weight_map"]["lm_head.weight"] = first.name
    tiny.write_json(own_checkpoint / "model.safetensors.index.json", index)
    for change, differs in ((0, False), (1e-3, True)):
        weights["lm_head.weight"] = mx.array(embedding + np.float32(change))
        mx.eval(weights)
        mx.save_safetensors(str(first), weights)
        if differs:
            with pytest.raises(WiolaError, match=r"lm_head\.weight differs"):
                convert(own_checkpoint, tmp_path / "c" / name)
        else:
            convert(own_checkpoint, tmp_path / "b" / name)
            assert mx.array_equal(logits(tmp_path / "b" / name), expected).item()

    (own_checkpoint / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WiolaError, match="missing files"):
        convert(own_checkpoint, tmp_path / "c" / name)
    for file in own_checkpoint.glob("*.safetensors*"):
        file.unlink()
    (own_checkpoint / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WiolaError, match="pickled"):
        convert(own_checkpoint, tmp_path / "c" / name)
    assert not (tmp_path / "c").exists()


def test_issue_K2_a_tied_4_bit_head_with_all_three_tensors(checkpoint, tmp_path):
    to_mlx(checkpoint, tmp_path / "q", bits=4, group_size=32, dtype="float16")
    file = tmp_path / "q" / "model.safetensors"
    weights = dict(mx.load(str(file)))
    (tmp_path / "q" / "model.safetensors.index.json").unlink()
    for part in ("weight", "scales", "biases"):
        weights[f"lm_head.{part}"] = weights[f"model.embed_tokens.{part}"]
    mx.eval(weights)
    mx.save_safetensors(str(file), weights)
    to_gguf(tmp_path / "q", tmp_path / "x.gguf")
    assert "output.weight" not in read_gguf(tmp_path / "x.gguf").records
    weights["lm_head.scales"] = weights["lm_head.scales"] * 2
    mx.save_safetensors(str(file), weights)
    with pytest.raises(WiolaError, match=r"lm_head\.scales differs"):
        to_gguf(tmp_path / "q", tmp_path / "y.gguf")


# The released layout


def test_to_hf_restores_what_newer_tools_rewrite(own_checkpoint, tmp_path):
    """mlx-lm and transformers 5 leave a tokenizer_config.json that transformers 4 cannot read."""
    import mlx_lm.utils

    wiola_mlx.register()
    model, tokenizer = mlx_lm.utils.load(str(own_checkpoint))
    config = config_of(own_checkpoint)
    mlx_lm.utils.save(tmp_path / "fused", own_checkpoint, model, tokenizer, dict(config))
    fused = json.loads((tmp_path / "fused" / "tokenizer_config.json").read_text())
    assert fused["tokenizer_class"] == "TokenizersBackend"
    to_hf(tmp_path / "fused", tmp_path / "hf")
    settings = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not isinstance(settings.get("extra_special_tokens"), list)
    special = json.loads((tmp_path / "hf" / "special_tokens_map.json").read_text())
    assert special["eos_token"] == "</s>"
    assert config_of(tmp_path / "hf") == config
    assert tensors(tmp_path / "hf") == tensors(own_checkpoint)
    assert wiola_mlx.load_tokenizer(tmp_path / "hf").encode("a") == tokenizer.encode("a")


def test_to_hf_dequantizes_exactly(checkpoint, tmp_path):
    to_mlx(checkpoint, tmp_path / "q", bits=4, group_size=32, dtype="bfloat16")
    report = to_hf(tmp_path / "q", tmp_path / "hf")
    assert any("dequantized" in note for note in report.notes)
    assert not {"quantization", "quantization_config"} & config_of(tmp_path / "hf").keys()
    model, _ = wiola_mlx.load_model(tmp_path / "q", dtype=mx.float32)
    layer = model.layers[1].mlp.up_proj
    expected = mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=32, bits=4)
    found = arrays(tmp_path / "hf")["model.layers.1.mlp.up_proj.weight"]
    assert np.array_equal(found, np.array(expected))
    with (tmp_path / "hf" / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert header["__metadata__"]["format"] == "pt"
