"""A random checkpoint of the 360M release's size and layout: memory and a few tokens."""

import json
import subprocess
import sys
from dataclasses import asdict

import mlx.core as mx
import pytest
import tiny
from mlx.utils import tree_flatten

from wiola_mlx.models import cross_layer, wiola

PARAMETERS, TENSORS = 318_048_272, 291
BF16_BYTES = 2 * PARAMETERS

# Prints a JSON object with the peak bytes of MLX, the peak growth of the process, and tokens.
LOAD_AND_GENERATE = """
import json, resource, sys
import mlx.core as mx
import wiola_mlx, wiola_mlx.loading, transformers.utils
from mlx_lm.generate import generate_step
def peak():
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = open("/proc/self/status").read()  # Linux's ru_maxrss starts at the parent's
    return 1024 * int(status.split("VmHWM:")[1].split()[0])
before = peak()
model, _ = wiola_mlx.load_model(sys.argv[1], dtype=mx.bfloat16)
loaded = mx.get_peak_memory()
grown = peak() - before
tokens = [t for (t, _), _ in zip(generate_step(mx.array([5, 6, 7]), model), "123")]
print(json.dumps({"mlx": loaded, "process": grown, "tokens": tokens}))
"""


@pytest.fixture(scope="module")
def released_layout(tmp_path_factory):
    """float32, one file, and a config without ``tie_word_embeddings``, as released."""
    folder = tmp_path_factory.mktemp("360m")
    model = wiola.Model(cross_layer.PRESETS["360m"])
    weights = dict(tree_flatten(model.parameters()))
    assert sum(array.size for array in weights.values()) == PARAMETERS
    assert len(weights) == TENSORS
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    config = asdict(cross_layer.PRESETS["360m"])
    config.pop("tie_word_embeddings")
    tiny.write_json(folder / "config.json", {**config, "dtype": "float32", "eos_token_id": 2})
    return folder


def load_and_generate(folder) -> dict:
    result = subprocess.run(
        [sys.executable, "-c", LOAD_AND_GENERATE, folder], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
def test_it_loads_in_bf16_within_1_3_times_its_size_and_generates(released_layout):
    measured = load_and_generate(released_layout)
    print(measured, {k: measured[k] / BF16_BYTES for k in ("mlx", "process")})
    assert len(measured["tokens"]) == 3
    assert measured["mlx"] <= 1.3 * BF16_BYTES
    assert measured["process"] <= 1.3 * BF16_BYTES


@pytest.mark.slow
def test_it_does_so_after_4_bit_quantization(released_layout, tmp_path):
    from wiola_mlx.convert.to_mlx import to_mlx

    to_mlx(released_layout, tmp_path / "4bit", bits=4, dtype=mx.bfloat16)
    measured = load_and_generate(tmp_path / "4bit")
    size = sum(file.stat().st_size for file in (tmp_path / "4bit").glob("*.safetensors"))
    print(measured, {k: measured[k] / size for k in ("mlx", "process")}, size)
    assert len(measured["tokens"]) == 3
    assert measured["process"] <= 1.3 * size
