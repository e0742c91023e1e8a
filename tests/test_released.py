"""The real configs and tokenizers of the released 13M model, with random weights."""

import json
import shutil

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import wiola_mlx
from wiola_mlx.models import cross_layer, gated_spiral, wiola


def parameters(model) -> int:
    return sum(array.size for _, array in tree_flatten(model.parameters()))


@pytest.fixture(scope="module")
def released(shared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("released") / "wiola13m"
    shutil.copytree(shared / "released" / "wiola13m", folder)
    folder.chmod(0o755)
    model = wiola.Model(gated_spiral.PRESETS["nano"])
    weights = {k: v.astype(mx.float32) for k, v in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    return folder


def test_counts_of_the_presets_are_exact():
    counts = {name: parameters(wiola.Model(args)) for name, args in gated_spiral.PRESETS.items()}
    assert counts == {"nano": 12_915_888, "micro": 26_454_624, "small": 54_154_944}


def test_the_13m_release_loads(released):
    model, tokenizer = wiola_mlx.load(released)
    assert parameters(model) == 12_915_888
    assert len(tree_flatten(model.parameters())) == 74
    assert tokenizer.encode("Once upon a time") == [434, 450, 262, 399]


def test_generation_stops_at_the_end_token_that_the_generation_config_omits(released):
    model, tokenizer = wiola_mlx.load(released)
    assert tokenizer.eos_token_ids == {2}

    class EndsSoon(type(model)):
        def __call__(self, inputs, cache=None, input_embeddings=None):
            logits = super().__call__(inputs, cache, input_embeddings)
            wanted = 2 if cache[0].size() >= 6 else 450
            return mx.where(mx.arange(logits.shape[-1]) == wanted, 100.0, logits * 0)

    ending = EndsSoon(model.args)
    ending.update(model.parameters())
    last = list(wiola_mlx.stream_text(ending, tokenizer, "Once upon a time", max_tokens=20))[-1]
    assert last.finish_reason == "stop"
    assert last.generation_tokens == 3


def test_the_360m_tokenizer_and_config(shared):
    folder = shared / "released" / "wiola360m"
    tokenizer = wiola_mlx.load_tokenizer(folder)
    assert tokenizer.encode("Once upon a time") == [18498, 2364, 266, 653]
    config = json.loads((folder / "config.json").read_text())
    assert wiola.ModelArgs.from_dict(config) == cross_layer.PRESETS["360m"]


@pytest.mark.parametrize("name", ["wiola13m", "wiola360m"])
def test_issue_G1_streams_of_the_released_tokenizers(shared, name):
    tokenizer = wiola_mlx.load_tokenizer(shared / "released" / name)
    for text in ("Once upon a time 🙂", " नमस्ते", "你好，世界\n\nüber", "  two  spaces "):
        stream = tokenizer.detokenizer
        stream.reset()
        pieces = []
        for token in tokenizer.encode(text, add_special_tokens=False):
            stream.add_token(token)
            pieces.append(stream.last_segment)
        stream.finalize()
        assert "".join([*pieces, stream.last_segment]) == text
        assert "\ufffd" not in "".join(pieces)
