"""To GGUF and back: names, values, logits, tokenizers, over both families."""

import json

import gguf
import mlx.core as mx
import numpy as np
import pytest
import tiny
from conftest import relative_difference
from conversions import (
    REFERENCES,
    arrays,
    dump,
    random_checkpoint,
    reference,
    rewrite,
    small_config,
    tensors,
)
from mlx.utils import tree_flatten
from wiola_mlx.convert.families import CROSS_LAYER, FAMILIES, GATED_SPIRAL, family_for
from wiola_mlx.convert.gguf_format import read_gguf
from wiola_mlx.convert.to_gguf import to_gguf
from wiola_mlx.convert.to_hf import to_hf
from wiola_mlx.convert.to_mlx import to_mlx

import wiola_mlx
from wiola_mlx import WiolaError

IDS = mx.array([[5, 9, 200, 41, 7, 33]])
BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


@pytest.mark.parametrize("name", REFERENCES)
def test_round_trips_of_the_references_are_byte_identical(name, tmp_path):
    source = tensors(reference(name))
    to_mlx(reference(name), tmp_path / "mlx")
    to_hf(tmp_path / "mlx", tmp_path / "hf")
    assert tensors(tmp_path / "hf") == tensors(tmp_path / "mlx") == source
    to_gguf(reference(name), tmp_path / "x.gguf", "f32")
    to_mlx(tmp_path / "x.gguf", tmp_path / "back")
    assert tensors(tmp_path / "back") == source
    original = json.loads((reference(name) / "config.json").read_text())
    for folder in ("mlx", "hf", "back"):
        assert json.loads((tmp_path / folder / "config.json").read_text()) == original
    loaded, _ = wiola_mlx.load_model(tmp_path / "x.gguf")
    expected = wiola_mlx.load_model(reference(name))[0](IDS)
    assert mx.array_equal(loaded(IDS), expected).item()
    assert "tensor(s)" in dump(tmp_path / "x.gguf")


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("name", ["gsa-base", "gcla-base"])
def test_narrow_dtypes_survive_every_way(name, dtype, tmp_path):
    config = small_config(name, torch_dtype=str(dtype).removeprefix("mlx.core."))
    folder = random_checkpoint(tmp_path / "model", config, dtype)
    source = tensors(folder)
    assert {kind for kind, *_ in source.values()} == {"BF16" if dtype == mx.bfloat16 else "F16"}
    to_gguf(folder, tmp_path / "x.gguf")
    to_gguf(tmp_path / "x.gguf", tmp_path / "y.gguf")
    for i, made in enumerate((folder, tmp_path / "x.gguf", tmp_path / "y.gguf")):
        to_mlx(made, tmp_path / f"mlx{i}")
        to_hf(made, tmp_path / f"hf{i}")
        assert tensors(tmp_path / f"mlx{i}") == tensors(tmp_path / f"hf{i}") == source
        assert json.loads((tmp_path / f"hf{i}" / "config.json").read_text()) == config
    vectors = [r for r in read_gguf(tmp_path / "x.gguf").records.values() if len(r.shape) == 1]
    assert {record.kind for record in vectors} == {"F32"}


def dense_twin(source, path):
    """The source's model with the weights that gguf-py itself reads from the file."""
    model, config = wiola_mlx.load_model(source)
    family, weights = family_for(config), []
    for tensor in gguf.GGUFReader(path).tensors:
        name = family.from_gguf_name(tensor.name)
        if name is not None:
            values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            weights.append((name, mx.array(values).reshape(np.shape(dict(shapes(model))[name]))))
    model.load_weights(weights, strict=True)
    return model


def shapes(model) -> list:
    return [(name, np.zeros(array.shape)) for name, array in tree_flatten(model.parameters())]


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@pytest.mark.parametrize("name", ["gsa-base", "gsa-untied", "gcla-base"])
def test_logits_of_packed_types_equal_those_of_ggufs_dequantized_weights(name, kind, tmp_path):
    path = tmp_path / "x.gguf"
    to_gguf(reference(name), path, kind)
    expected = dense_twin(reference(name), path)(IDS)
    model, config = wiola_mlx.load_model(path)
    assert config["quantization"]["bits"] == int(kind[1])
    assert relative_difference(model(IDS), expected) <= 1e-5
    to_mlx(path, tmp_path / "mlx")
    assert mx.array_equal(wiola_mlx.load_model(tmp_path / "mlx")[0](IDS), model(IDS)).item()
    to_hf(path, tmp_path / "hf")
    assert relative_difference(wiola_mlx.load_model(tmp_path / "hf")[0](IDS), expected) <= 1e-6
    to_gguf(tmp_path / "mlx", tmp_path / "again.gguf")
    first, again = read_gguf(path), read_gguf(tmp_path / "again.gguf")
    assert [r.kind for r in first.records.values()] == [r.kind for r in again.records.values()]
    for a, b in zip(
        gguf.GGUFReader(path).tensors, gguf.GGUFReader(again.path).tensors, strict=True
    ):
        assert np.array_equal(a.data, b.data)


def test_issue_K5_the_export_holds_what_gguf_says_it_should(checkpoint, tmp_path):
    report = to_gguf(checkpoint, tmp_path / "x.gguf", "f16")
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["general.architecture"] == "wiolagsa"
    assert any("llama.cpp" in note for note in report.notes)
    assert len(fields["tokenizer.ggml.tokens"]) == tiny.VOCAB_SIZE == fields["wiolagsa.vocab_size"]
    source = arrays(checkpoint)
    assert len(reader.tensors) == len(source) + 1  # rope_freqs
    for tensor in reader.tensors:
        name = GATED_SPIRAL.from_gguf_name(tensor.name)
        if name is None:
            i = np.arange(16)
            expected = 1 / (1 + 0.05 * np.sqrt(i + 1) / np.sqrt(16))
            assert tensor.name == "rope_freqs.weight"
            assert np.allclose(tensor.data, expected, rtol=1e-6)
            continue
        matrix = source[name].ndim == 2 and ".gate_fc" not in name
        assert tensor.tensor_type.name == ("F16" if matrix else "F32")
        assert np.array_equal(
            tensor.data, source[name].astype(np.float16 if matrix else np.float32)
        )


def test_issue_K5_a_4_bit_source_keeps_its_values(checkpoint, tmp_path):
    to_mlx(checkpoint, tmp_path / "4bit", bits=4, group_size=32, dtype="bfloat16")
    report = to_gguf(tmp_path / "4bit", tmp_path / "x.gguf")
    assert not report.kept
    kinds = {r.name: r.kind for r in read_gguf(tmp_path / "x.gguf").records.values()}
    assert kinds["token_embd.weight"] == kinds["blk.0.ffn_up.weight"] == "Q4_1"
    assert not any("scales" in name or "biases" in name for name in kinds)
    model, _ = wiola_mlx.load_model(tmp_path / "4bit", dtype=mx.float32)
    assert relative_difference(wiola_mlx.load_model(tmp_path / "x.gguf")[0](IDS), model(IDS)) < 1e-5


def test_issue_K5_what_has_no_exact_type_is_named(checkpoint, tmp_path):
    to_mlx(checkpoint, tmp_path / "8bit", bits=8, group_size=32)
    report = to_gguf(tmp_path / "8bit", tmp_path / "x.gguf")
    (reason,) = report.kept
    assert "F16" in reason and len(report.kept[reason]) == 1 + 2 * 7
    exact = to_gguf(tmp_path / "8bit", tmp_path / "f32.gguf", "f32")
    assert not exact.kept
    expected = wiola_mlx.load_model(tmp_path / "8bit")[0](IDS)
    assert relative_difference(wiola_mlx.load_model(tmp_path / "f32.gguf")[0](IDS), expected) < 1e-5


def test_issue_K5_extra_tensors_are_listed_and_nothing_is_written(own_checkpoint, tmp_path):
    weights = dict(mx.load(str(own_checkpoint / "model.safetensors")))
    weights |= {"model.stray.weight": mx.zeros((2,)), "other.bias": mx.zeros((2,))}
    weights.pop("model.norm.weight")
    mx.eval(weights)
    mx.save_safetensors(str(own_checkpoint / "model.safetensors"), weights)
    with pytest.raises(WiolaError) as refusal:
        to_gguf(own_checkpoint, tmp_path / "x.gguf")
    for words in ("extra tensors (2): model.stray.weight, other.bias", "missing tensors (1)"):
        assert words in str(refusal.value)
    assert not list(tmp_path.glob("*.gguf"))


def test_rows_that_a_block_does_not_divide_are_named(tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "m", intermediate_size=80)
    report = to_gguf(folder, tmp_path / "x.gguf", "q8_0")
    (reason,) = report.kept
    assert "no multiple of 32" in reason
    assert report.kept[reason] == [
        f"model.layers.{i}.mlp.down_proj.weight [64, 80]" for i in (0, 1)
    ]
    kinds = {r.name: r.kind for r in read_gguf(tmp_path / "x.gguf").records.values()}
    assert kinds["blk.0.ffn_down.weight"] == "F16" and kinds["blk.0.ffn_up.weight"] == "Q8_0"


def test_the_tables_cover_every_hyper_parameter_and_every_tensor():
    from dataclasses import fields

    from wiola_mlx.models import cross_layer, gated_spiral, wiola

    for family, module in ((GATED_SPIRAL, gated_spiral), (CROSS_LAYER, cross_layer)):
        keys = {key for key, *_ in family.metadata}
        assert keys == {field.name for field in fields(module.ModelArgs)} - {"model_type"}
        model = wiola.Model(module.ModelArgs(num_hidden_layers=1, tie_word_embeddings=False))
        for name, _ in tree_flatten(model.parameters()):
            gguf_name = family.to_gguf_name(name)
            assert gguf_name.endswith((".weight", ".bias")) and len(gguf_name) < 64
            assert family.from_gguf_name(gguf_name) == name
    assert [family.architecture for family in FAMILIES] == ["wiolagsa", "wiolagcla"]  # final


def test_a_file_without_the_sources_config_gives_the_same_model(tmp_path):
    for name in ("gsa-strong-spiral", "gcla-lookback3"):
        to_gguf(reference(name), tmp_path / f"{name}.gguf")
        bare = tmp_path / f"{name}-bare.gguf"
        rewrite(tmp_path / f"{name}.gguf", bare, drop=".source.")
        model, config = wiola_mlx.load_model(bare)
        original = small_config(name)
        assert config["rms_norm_eps"] == original["rms_norm_eps"] == 1e-6
        assert mx.array_equal(model(IDS), wiola_mlx.load_model(reference(name))[0](IDS)).item()


def test_keys_that_the_source_left_out_stay_out(own_checkpoint, tmp_path):
    config = json.loads((own_checkpoint / "config.json").read_text())
    config.pop("spiral_alpha")
    tiny.write_json(own_checkpoint / "config.json", config)
    to_gguf(own_checkpoint, tmp_path / "x.gguf")
    to_hf(tmp_path / "x.gguf", tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == config
    tiny.edit_json(own_checkpoint / "config.json", max_position_embeddings=1 << 40)
    with pytest.raises(WiolaError, match=r"context_length is 1099511627776"):
        to_gguf(own_checkpoint, tmp_path / "y.gguf")


def test_metadata_that_contradicts_itself_is_refused(checkpoint, tmp_path):
    to_gguf(checkpoint, tmp_path / "x.gguf")
    for changes, word in (
        ({"wiolagsa.rope.spiral_alpha": 0.5}, "spiral_alpha"),
        ({"wiolagsa.block_count": 3}, "num_hidden_layers"),
    ):
        (tmp_path / "y.gguf").unlink(missing_ok=True)
        rewrite(tmp_path / "x.gguf", tmp_path / "y.gguf", changes=changes)
        with pytest.raises(WiolaError, match=word):
            wiola_mlx.load_model(tmp_path / "y.gguf")
    (tmp_path / "y.gguf").unlink()
    alpha = {"wiolagsa.rope.spiral_alpha": 0.5}
    rewrite(tmp_path / "x.gguf", tmp_path / "y.gguf", ".source.", alpha)
    with pytest.raises(WiolaError, match="rope_freqs"):
        wiola_mlx.load_model(tmp_path / "y.gguf")


@pytest.mark.parametrize("kind", ["Q2_K", "Q6_K"])
def test_types_without_a_packed_form_are_dequantized_with_a_notice(kind, tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "m", hidden_size=256, intermediate_size=256)
    to_gguf(folder, tmp_path / "x.gguf")
    code, raw = gguf.GGMLQuantizationType[kind], random_k_quants(kind, 256)
    tensor = ("blk.1.ffn_down.weight", raw, code)
    rewrite(tmp_path / "x.gguf", tmp_path / "y.gguf", tensor=tensor)
    with pytest.warns(UserWarning, match=rf"{kind}.*layers\.1\.mlp\.down_proj"):
        model, _ = wiola_mlx.load_model(tmp_path / "y.gguf")
    assert np.array_equal(
        np.array(model.layers[1].mlp.down_proj.weight), gguf.dequantize(raw, code)
    )


def random_k_quants(kind: str, rows: int) -> np.ndarray:
    """Random super-blocks, one a row, with small scales: float16 values at their ends."""
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.random.default_rng(0).integers(0, 256, (rows, size), dtype=np.uint8)
    for place in (size - 4, size - 2) if kind == "Q2_K" else (size - 2,):
        raw[:, place : place + 2] = np.full(1, 0.01, np.float16).view(np.uint8)
    return raw


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_come_from_ggml_and_stay_packed_where_mlx_can(kind, tmp_path):
    pytest.importorskip("libggml")
    folder = tiny.write_checkpoint(tmp_path / "m", hidden_size=256, intermediate_size=256)
    path = tmp_path / "x.gguf"
    to_gguf(folder, path, kind)
    assert kind in dump(path)
    expected = dense_twin(folder, path)(IDS)
    if kind == "Q6_K":
        with pytest.warns(UserWarning, match="Q6_K"):
            model, config = wiola_mlx.load_model(path)
        assert "quantization" not in config
    else:
        model, config = wiola_mlx.load_model(path)
        assert config["quantization"]["bits"] == int(kind[1])
    assert relative_difference(model(IDS), expected) <= 1e-5


def test_k_quants_without_ggmls_library_are_one_line(checkpoint, tmp_path, monkeypatch):
    from wiola_mlx.convert import ggml_library

    ggml_library.find_library.cache_clear()
    monkeypatch.setattr(ggml_library, "find_spec", lambda name: None)
    with pytest.raises(WiolaError, match=r"wiola-mlx\[ggml\]"):
        to_gguf(checkpoint, tmp_path / "x.gguf", "q4_k")
    ggml_library.find_library.cache_clear()
    assert not list(tmp_path.iterdir())
