"""Model folders: what loads, and the one line for what does not."""

import json
import pickle
import shutil
import warnings

import mlx.core as mx
import numpy as np
import pytest
import tiny
from conftest import relative_difference
from mlx.utils import tree_flatten
from safetensors.numpy import save_file

import wiola_mlx
from wiola_mlx import WiolaError

IDS = mx.array([[5, 9, 200, 41]])


def logits(folder, **options):
    return wiola_mlx.load_model(folder, **options)[0](IDS)


def weights_of(folder) -> dict:
    return mx.load(str(folder / "model.safetensors"))


def rewrite(folder, **changes):
    """Writes the weights again with some changed; None drops one, underscores stand for dots."""
    weights = {**weights_of(folder), **{k.replace("__", "."): v for k, v in changes.items()}}
    kept = {name: array for name, array in weights.items() if array is not None}
    mx.eval(kept)
    mx.save_safetensors(str(folder / "model.safetensors"), kept, {"format": "pt"})


def assert_refused(folder, *words):
    with pytest.raises(WiolaError) as refusal:
        wiola_mlx.load_model(folder)
    message = str(refusal.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_the_released_layout_loads_as_it_is(checkpoint):
    model, config = wiola_mlx.load_model(checkpoint)
    assert config["hidden_size"] == 64
    for name, array in tree_flatten(model.parameters()):
        assert mx.array_equal(array, weights_of(checkpoint)[name]).item()
    assert not model.training


def test_a_dtype_may_be_asked_for_and_spares_the_gate(checkpoint):
    model, _ = wiola_mlx.load_model(checkpoint, dtype=mx.bfloat16)
    for name, array in tree_flatten(model.parameters()):
        assert array.dtype == (mx.float32 if ".gate_fc" in name else mx.bfloat16)


def test_issue_A1_an_unknown_model_type_is_named(own_checkpoint):
    tiny.edit_json(own_checkpoint / "config.json", model_type="nosuch")
    assert_refused(own_checkpoint, "nosuch", "wiola")


def test_issue_A3_code_of_a_checkpoint_is_never_run(own_checkpoint, cli):
    marker = own_checkpoint / "marker"
    (own_checkpoint / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    (own_checkpoint.parent / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    for name in ("evil.py", "../evil.py"):
        tiny.edit_json(own_checkpoint / "config.json", model_file=name)
        assert_refused(own_checkpoint, name, "never run")
        argv = ("perplexity", "--model", own_checkpoint, "--trust-remote-code")
        result = cli(*argv, module="wiola_mlx")
        assert result.returncode == 1
        assert b"never run" in result.stderr
        assert b"Traceback" not in result.stderr
    assert not marker.exists()


def test_a_tokenizer_with_code_is_refused_and_not_run(own_checkpoint):
    marker = own_checkpoint / "marker"
    (own_checkpoint / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass T: pass")
    tiny.edit_json(
        own_checkpoint / "tokenizer_config.json",
        tokenizer_class="T",
        auto_map={"AutoTokenizer": ["evil.T", "evil.T"]},
    )
    with pytest.raises(WiolaError):
        wiola_mlx.load_tokenizer(own_checkpoint)
    assert not marker.exists()


def test_the_family_is_told_by_the_keys(own_checkpoint):
    tiny.edit_json(own_checkpoint / "config.json", gcla_lookback=2)
    assert_refused(own_checkpoint, "both", "gcla_lookback", "spiral_alpha")
    config = json.loads((own_checkpoint / "config.json").read_text())
    for key in ("spiral_alpha", "intermediate_size", "gcla_lookback"):
        config.pop(key)
    tiny.write_json(own_checkpoint / "config.json", config)
    assert_refused(own_checkpoint, "neither", "hidden_size")


@pytest.mark.parametrize(
    "change, word",
    [
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"num_attention_heads": 3}, "hidden_size 64"),
        ({"num_attention_heads": 0}, "config.json"),
        ({"gate_pre_rope": 1}, "gate_pre_rope"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"rope_theta": "inf"}, "rope_theta"),
        ({"rope_theta": 1e-300}, "rope_theta"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"spiral_alpha": -1}, "spiral_alpha"),
        ({"spiral_alpha": 1e300}, "spiral_alpha"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling"),
        ({"vocab_size": 2**40}, "config.json"),
        ({"hidden_size": 32}, "wrong shape"),
        ({"use_attention_gate": False}, "extra tensors (6)"),
        ({"num_hidden_layers": 3}, "missing tensors (12)"),
        ({"quantization": {"group_size": 64, "bits": 4}}, None),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_is_one_line(own_checkpoint, change, word):
    tiny.edit_json(own_checkpoint / "config.json", **change)
    if word is None:  # quantization without a quantized tensor changes nothing
        assert logits(own_checkpoint).shape == (1, 4, 300)
    else:
        assert_refused(own_checkpoint, word)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "[" * 100_000, "\xff"])
def test_a_broken_config_is_one_line(own_checkpoint, text):
    (own_checkpoint / "config.json").write_bytes(text.encode("latin-1"))
    assert_refused(own_checkpoint, "config.json")


def test_missing_things_are_named(tmp_path, own_checkpoint):
    assert_refused(tmp_path / "nowhere", "nowhere")
    assert_refused(own_checkpoint / "config.json", "not a folder")
    (own_checkpoint / "model.safetensors").unlink()
    assert_refused(own_checkpoint, "model.safetensors")
    (own_checkpoint / "config.json").unlink()
    assert_refused(own_checkpoint, "config.json")


def test_a_hub_id_that_cannot_be_had_is_one_line():
    assert_refused("nobody/such-a-model", "nobody/such-a-model", "Hub")
    assert_refused("a/b/c", "a/b/c")


def test_missing_extra_and_misshapen_tensors_are_each_listed(own_checkpoint):
    rewrite(
        own_checkpoint,
        model__norm__weight=None,
        model__layers__1__mlp__up_proj__weight=None,
        model__stray__weight=mx.zeros((2,)),
        model__layers__0__mlp__down_proj__weight=mx.zeros((64, 95)),
        model__layers__0__input_layernorm__weight=mx.zeros((64,), mx.int32),
    )
    assert_refused(
        own_checkpoint,
        "missing tensors (2): model.layers.1.mlp.up_proj.weight, model.norm.weight",
        "extra tensors (1): model.stray.weight",
        "model.layers.0.mlp.down_proj.weight is [64, 95], the config needs [64, 96]",
        "model.layers.0.input_layernorm.weight is mlx.core.int32",
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_in_the_weights_is_an_error(own_checkpoint, value):
    weight = weights_of(own_checkpoint)["model.norm.weight"]
    weight[7] = value
    rewrite(own_checkpoint, model__norm__weight=weight)
    assert_refused(own_checkpoint, "NaN or infinity", "model.norm.weight")


def test_issue_K1_shards_and_index_are_compared_first(own_checkpoint):
    expected = logits(own_checkpoint)
    tiny.write_shards(own_checkpoint)
    assert relative_difference(logits(own_checkpoint), expected) == 0

    old = {name: array + 1 for name, array in tree_flatten(tiny.random_model(3).parameters())}
    mx.save_safetensors(str(own_checkpoint / "model-old.safetensors"), old)
    with pytest.warns(UserWarning, match=r"model-old\.safetensors"):
        assert relative_difference(logits(own_checkpoint), expected) == 0

    (own_checkpoint / "model-00002-of-00002.safetensors").unlink()
    assert_refused(own_checkpoint, "missing files", "model-00002-of-00002.safetensors")
    (own_checkpoint / "model.safetensors.index.json").unlink()
    assert_refused(own_checkpoint, "missing files", "model-00002-of-00002.safetensors")


def test_shards_without_an_index_load_when_they_are_complete(own_checkpoint):
    expected = logits(own_checkpoint)
    tiny.write_shards(own_checkpoint, 3)
    (own_checkpoint / "model.safetensors.index.json").unlink()
    assert relative_difference(logits(own_checkpoint), expected) == 0


def test_issue_K1_an_index_that_promises_too_much_or_too_little(own_checkpoint):
    tiny.write_shards(own_checkpoint)
    index = own_checkpoint / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    moved = {**weight_map, "ghost.weight": "model-00001-of-00002.safetensors"}
    moved.pop("model.norm.weight")
    tiny.write_json(index, {"weight_map": moved})
    assert_refused(own_checkpoint, "ghost.weight", "does not list: model.norm.weight")
    for path in ("../model.safetensors", "/etc/passwd", "sub/x.safetensors", ".."):
        tiny.write_json(index, {"weight_map": {"a": path}})
        assert_refused(own_checkpoint, "outside the model folder")
    tiny.write_json(index, {"weight_map": {"a": "pytorch_model.bin"}})
    assert_refused(own_checkpoint, "pytorch_model.bin")
    tiny.write_json(index, {"weight_map": {}})
    assert_refused(own_checkpoint, "weight_map")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_issue_K1_pickles_are_refused_by_name_and_not_opened(own_checkpoint, name):
    (own_checkpoint / "model.safetensors").unlink()
    (own_checkpoint / name).write_bytes(pickle.dumps({"a": 1}))
    assert_refused(own_checkpoint, name, "safetensors")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_git_lfs_pointers_are_refused_by_name(own_checkpoint, name):
    (own_checkpoint / name).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 51678432\n"
    )
    with pytest.raises(WiolaError, match=rf"{name} is a Git LFS pointer"):
        wiola_mlx.load(own_checkpoint)


@pytest.mark.parametrize("size", [0, 7, 8, 300, -1000, -1])
def test_a_truncated_file_is_one_line(own_checkpoint, size):
    path = own_checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert_refused(own_checkpoint, "model.safetensors", "damaged")


def test_issue_K2_tied_checkpoints_with_and_without_a_head(own_checkpoint):
    expected = logits(own_checkpoint)
    embedding = weights_of(own_checkpoint)["model.embed_tokens.weight"]
    rewrite(own_checkpoint, lm_head__weight=embedding)
    assert relative_difference(logits(own_checkpoint), expected) == 0
    rewrite(own_checkpoint, lm_head__weight=embedding + 1e-3)
    assert_refused(own_checkpoint, "lm_head.weight differs", "tie_word_embeddings")
    wiola_mlx.register()
    import mlx_lm

    with pytest.raises(ValueError, match=r"lm_head\.weight differs"):
        mlx_lm.load(str(own_checkpoint))
    tiny.edit_json(own_checkpoint / "config.json", tie_word_embeddings=False)
    assert relative_difference(logits(own_checkpoint), expected) > 1e-5
    rewrite(own_checkpoint, lm_head__weight=None)
    assert_refused(own_checkpoint, "missing tensors (1): lm_head.weight")


def test_issue_K2_a_tied_4_bit_checkpoint_with_all_of_the_heads_tensors(own_checkpoint, tmp_path):
    from wiola_mlx.convert.to_mlx import to_mlx

    target = tmp_path / "4bit"
    to_mlx(own_checkpoint, target, bits=4, group_size=32)
    expected = logits(target)
    weights = weights_of(target)
    for part in ("weight", "scales", "biases"):
        weights[f"lm_head.{part}"] = weights[f"model.embed_tokens.{part}"]
    mx.eval(weights)
    (target / "model.safetensors.index.json").unlink()
    mx.save_safetensors(str(target / "model.safetensors"), weights)
    assert relative_difference(logits(target), expected) == 0
    weights["lm_head.scales"] = weights["lm_head.scales"] * 2
    mx.save_safetensors(str(target / "model.safetensors"), weights)
    assert_refused(target, "lm_head.scales differs")


def test_issue_F1_any_named_end_token_stops(own_checkpoint):
    tiny.edit_json(own_checkpoint / "config.json", eos_token_id=1)
    tiny.write_json(own_checkpoint / "generation_config.json", {"eos_token_id": [2, 3]})
    model, tokenizer = wiola_mlx.load(own_checkpoint)
    assert tokenizer.eos_token_ids == {1, 2, 3}
    for stop in (1, 2, 3):
        said = iter([40, 41, stop, 42])
        model_of_few_words = forced(model, said)
        text = wiola_mlx.generate_text(model_of_few_words, tokenizer, "a", max_tokens=10)
        assert text == tokenizer.decode([40, 41])


def forced(model, tokens):
    """The model, but its logits choose the given tokens in turn."""

    class Forced(type(model)):
        def __call__(self, inputs, cache=None, input_embeddings=None):
            logits = super().__call__(inputs, cache, input_embeddings)
            chosen = next(tokens, 42)
            return mx.where(mx.arange(logits.shape[-1]) == chosen, 100.0, logits * 0)

    twin = Forced(model.args)
    twin.update(model.parameters())
    return twin


@pytest.mark.parametrize("eos", [[[2]], {"a": 1}, "2", True, [2, "x"]], ids=str)
def test_an_end_token_that_is_none_is_refused(own_checkpoint, eos):
    tiny.edit_json(own_checkpoint / "config.json", eos_token_id=eos)
    with pytest.raises(WiolaError, match="eos_token_id"):
        wiola_mlx.load(own_checkpoint)


def test_a_tensor_type_that_mlx_lacks_is_one_line(own_checkpoint):
    weights = {name: np.array(array) for name, array in weights_of(own_checkpoint).items()}
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(np.float64)
    save_file(weights, own_checkpoint / "model.safetensors")
    assert_refused(own_checkpoint, "model.safetensors")


def test_endless_and_empty_names_are_one_line(own_checkpoint):
    assert_refused("x" * 5000, "no model folder")
    assert_refused("", "no model folder")
    (own_checkpoint / "model.safetensors").rename(
        own_checkpoint / "model-00001-of-99999.safetensors"
    )
    assert_refused(own_checkpoint, "99999")


def test_a_folder_without_tokenizer_and_one_with_too_many_tokens(tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "a", tokenizer=False)
    assert wiola_mlx.load_model(folder)[1]["vocab_size"] == 300
    with pytest.raises(WiolaError, match=r"tokenizer\.json"):
        wiola_mlx.load(folder)
    small = tiny.write_checkpoint(tmp_path / "b", vocab_size=200)
    with pytest.raises(WiolaError, match="260 tokens, but the model only 200"):
        wiola_mlx.load(small)
    (small / "tokenizer.json").write_text("{}")
    with pytest.raises(WiolaError, match="tokenizer"):
        wiola_mlx.load(small)


def test_adapters_attach_or_are_refused(own_checkpoint, tmp_path):
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model, _ = wiola_mlx.load_model(own_checkpoint)
    settings = {"rank": 2, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    linear_to_lora_layers(model, 2, settings)
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    lora = {k: v + 0.5 for k, v in tree_flatten(model.parameters()) if ".lora_" in k}
    mx.save_safetensors(str(adapters / "adapters.safetensors"), lora)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": settings}
    tiny.write_json(adapters / "adapter_config.json", config)
    tuned, _ = wiola_mlx.load(own_checkpoint, adapter_path=adapters)
    assert relative_difference(tuned(IDS), logits(own_checkpoint)) > 1e-3

    part = dict(list(lora.items())[1:])
    mx.save_safetensors(str(adapters / "adapters.safetensors"), part)
    with pytest.raises(WiolaError, match=f"lacks {next(iter(lora))}"):
        wiola_mlx.load(own_checkpoint, adapter_path=adapters)
    broken = {name: array * float("nan") for name, array in lora.items()}
    mx.save_safetensors(str(adapters / "adapters.safetensors"), broken)
    with pytest.raises(WiolaError, match="NaN"):
        wiola_mlx.load(own_checkpoint, adapter_path=adapters)

    mx.save_safetensors(str(adapters / "adapters.safetensors"), {"nope.lora_a": mx.zeros((2, 2))})
    with pytest.raises(WiolaError, match=r"nope\.lora_a"):
        wiola_mlx.load(own_checkpoint, adapter_path=adapters)
    shutil.rmtree(adapters)
    with pytest.raises(WiolaError, match=r"adapter_config\.json"):
        wiola_mlx.load(own_checkpoint, adapter_path=adapters)


def test_nothing_is_said_when_all_is_well(checkpoint, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, tokenizer = wiola_mlx.load(checkpoint)
        wiola_mlx.generate_text(model, tokenizer, "hi", max_tokens=5)
    assert capfd.readouterr() == ("", "")
