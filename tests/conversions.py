"""Helpers of the conversion tests: sources of both families, and tensors as bytes."""

import contextlib
import io
import json
import shutil
import sys
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
import tiny
from conftest import ROOT
from mlx.utils import tree_flatten
from wiola_mlx.convert.source import safetensors_parts
from wiola_mlx.convert.to_gguf import to_gguf
from wiola_mlx.convert.to_hf import to_hf
from wiola_mlx.convert.to_mlx import to_mlx

import wiola_mlx
from wiola_mlx.models import wiola

CONVERSIONS = {
    "to-mlx": (to_mlx, "mlx"),
    "to-hf": (to_hf, "hf"),
    "to-gguf": (to_gguf, "x.gguf"),
}
every_conversion = pytest.mark.parametrize("convert, name", CONVERSIONS.values(), ids=CONVERSIONS)
IDS = mx.array([[5, 9, 200, 41]])
REFERENCES = sorted(
    path.parent.name for path in (ROOT / "tests" / "reference").glob("*/config.json")
)


def logits(path, **options) -> mx.array:
    """Of a few tokens, by the model in a folder or a GGUF file."""
    return wiola_mlx.load_model(path, **options)[0](IDS)


def reference(name: str) -> Path:
    return ROOT / "tests" / "reference" / name


def random_checkpoint(folder: Path, config: dict, dtype=mx.float32, seed: int = 0) -> Path:
    """A folder of either family with random weights in one dtype, norms and gates included."""
    model = wiola.Model(wiola.ModelArgs.from_dict(config))
    names = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(seed), len(names))
    weights = {
        name: (mx.random.normal(array.shape, key=key) * 0.1).astype(dtype)
        for key, (name, array) in zip(keys, names, strict=True)
    }
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    tiny.write_json(folder / "config.json", config)
    return folder


def small_config(name: str, **changes) -> dict:
    """A reference checkpoint's config."""
    return {**json.loads((reference(name) / "config.json").read_text()), **changes}


def with_released_tokenizer(shared: Path, name: str, folder: Path) -> Path:
    """A small random model of the release's family, with its tokenizer of 32,000 tokens."""
    released = shared / "released" / name
    config = json.loads((released / "config.json").read_text())
    config |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {k: 2 for k in ("num_key_value_heads",) if k in config}
    config |= {k: 64 for k in config if k in ("intermediate_size", "dsff_narrow_size")}
    config |= {k: 96 for k in config if k == "dsff_wide_size"}
    random_checkpoint(folder, config)
    for file in released.iterdir():
        if file.name not in ("config.json", "model.safetensors", "README.md"):
            shutil.copyfile(file, folder / file.name)
    return folder


def tensors(folder: Path) -> dict[str, tuple]:
    """Dtype, shape and bytes of every tensor in a folder."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, (shape, part) in safetensors_parts(file).items():
            found[name] = (part.dtype, shape, part.read(0, part.rows).tobytes())
    return found


def arrays(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor in float32."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, array in mx.load(str(file)).items():
            found[name] = np.array(array.astype(mx.float32))
    return found


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def rewrite(path, target, drop: str = "\0", changes: dict | None = None, tensor=None):
    """A GGUF file again by gguf-py's writer, with less or other metadata, or another tensor.

    Args:
        tensor: (name, raw data, type) of one to replace.
    """
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or drop in key:
            continue
        kind, sub = field.types[0], field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(key, (changes or {}).get(key, field.contents()), kind, sub)
    for found in reader.tensors:
        data, kind = found.data, found.tensor_type
        if tensor and found.name == tensor[0]:
            _, data, kind = tensor
        writer.add_tensor(found.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def dump(path) -> str:
    """What ``gguf-dump`` prints of a file."""
    from gguf.scripts.gguf_dump import main

    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", ["gguf-dump", str(path)])
        main()
    return printed.getvalue()
