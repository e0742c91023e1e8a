"""``python -m wiola_mlx.gates``: the gates that the model itself used, as figures and picture."""

import json
import sys

import mlx.core as mx
import pytest
import tiny
from conftest import relative_difference
from test_cross_layer import random_model as random_cross_layer
from test_cross_layer import write_checkpoint as write_cross_layer

from wiola_mlx import gates
from wiola_mlx.models import gated_attention

TEXT = "Hello, cat"


@pytest.fixture
def quick(capsys):
    def run(*argv):
        code = gates.main([*map(str, argv)])
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("pre_rope", [True, False])
def test_they_are_the_gates_that_the_model_used(monkeypatch, pre_rope):
    model = tiny.random_model(gate_pre_rope=pre_rope)
    ids = mx.random.randint(0, tiny.VOCAB_SIZE, (1, 9), key=mx.random.key(0))
    used, compute = [], gated_attention.attention_gate

    def recording(*args):
        used.append(compute(*args))
        return used[-1]

    monkeypatch.setattr(gated_attention, "attention_gate", recording)
    model(ids)
    expected = mx.concatenate(used)[..., 0]
    monkeypatch.setattr(gated_attention, "attention_gate", compute)
    found = gates.gate_values(model, ids)
    assert found.shape == (2, 2, 9)
    assert relative_difference(found, expected) <= 1e-6
    assert found.min().item() < 0.2 < 0.8 < found.max().item()


def test_a_cross_layer_head_without_gate_is_shut():
    model = random_cross_layer(num_hidden_layers=3)
    ids = mx.random.randint(0, tiny.VOCAB_SIZE, (1, 9), key=mx.random.key(0))
    gate = model.layers[1].attn.gate_proj
    normed = model.layers[1].input_norm(model.model.hidden_states(ids)[1])
    expected = mx.sigmoid(gate(normed))[0].reshape(9, 4, 16).mean(-1).T
    assert relative_difference(gates.gate_values(model, ids)[1], expected) <= 1e-6
    assert gates.blends(model)[0] == 0.0
    wanted = mx.sigmoid(model.layers[2].attn.blend_logit).item()
    assert gates.blends(model)[2] == pytest.approx(wanted)


def test_json_has_every_gate_and_names_the_shut_heads(tmp_path, quick):
    folder = tiny.write_checkpoint(tmp_path / "model")
    weights = mx.load(str(folder / "model.safetensors"))
    weights["model.layers.1.self_attn.gate_fc2.weight"] *= mx.array([[0.0], [1.0]])
    weights["model.layers.1.self_attn.gate_fc2.bias"] = mx.array([-5.0, 5.0])
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    code, out, err = quick(folder, "--prompt", TEXT, "--json")
    facts = json.loads(out)
    assert code == 0 and err == ""
    assert facts["tokens"] == list(TEXT)
    assert [len(facts["gates"]), len(facts["gates"][0]), len(facts["gates"][0][0])] == [2, 2, 10]
    assert {"layer": 1, "head": 0} in [{k: s[k] for k in ("layer", "head")} for s in facts["shut"]]
    assert facts["mean"][1][0] == pytest.approx(1 / (1 + 2.718281828**5), rel=1e-4)
    assert facts["blend"] is None
    code, out, _ = quick(folder, "--prompt", TEXT)
    assert "1.0 (0.007)" in out


def test_a_cross_layer_folder_by_command(tmp_path, quick):
    folder = write_cross_layer(tmp_path / "model")
    code, out, _ = quick(folder, "--prompt", TEXT)
    assert code == 0 and "from below" in out


def test_a_picture_is_written_when_asked_for(checkpoint, tmp_path, quick):
    pytest.importorskip("matplotlib")
    for name, start in (("gates.png", b"\x89PNG"), ("gates.svg", b"<?xml")):
        code, _, err = quick(checkpoint, "--prompt", "cost $5, $6\n", "--plot", tmp_path / name)
        assert code == 0 and name in err
        assert (tmp_path / name).read_bytes().startswith(start)
    assert len(list(tmp_path.iterdir())) == 2


def test_without_matplotlib_it_says_so_in_one_line(checkpoint, tmp_path, quick, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = quick(checkpoint, "--prompt", "a", "--plot", tmp_path / "gates.png")
    assert code == 1 and out == "" and err.count("\n") == 1
    assert "pip install matplotlib" in err


def test_mistakes_are_one_line(checkpoint, tmp_path, quick):
    gateless = tiny.write_checkpoint(tmp_path / "model", use_attention_gate=False)
    for argv, word in (
        ([checkpoint, "--prompt", ""], "empty"),
        ([gateless, "--prompt", "a"], "no gates"),
        (["nonsense", "--prompt", "a"], "nonsense"),
        ([checkpoint, "--prompt", "a", "--plot", "gates.txt"], "picture's name"),
    ):
        code, out, err = quick(*argv)
        assert code == 1 and out == "" and err.count("\n") == 1 and word in err, err
