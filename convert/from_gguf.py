"""GGUF files as a source: names, config and tokenizer out of the file alone."""

import json
from pathlib import Path

import numpy as np

from wiola_mlx.checkpoint import check_config
from wiola_mlx.errors import WiolaError

from .families import Family, complete_config, family_of_architecture
from .gguf_format import Contents, Record, read_gguf
from .source import Source, expected, model_for, refuse
from .tensors import FLOATS, Part, Tensor, row_bytes
from .tokenizer import texts_of

ROPE_FACTORS = "rope_freqs.weight"


def open_gguf(path: Path) -> Source:
    """A GGUF file as a source; every tensor of the model is there, and none besides.

    Raises:
        WiolaError: for a file that is damaged, of another architecture, or not whole.
    """
    contents = read_gguf(path)
    metadata = contents.metadata
    family = family_of_architecture(metadata.get("general.architecture"))
    config = config_of(contents, family)
    records = {n: r for n, r in contents.records.items() if n != ROPE_FACTORS}
    names = {family.from_gguf_name(name) or name: name for name in records}
    shapes, modules = expected(model_for(config, names, path))
    check_rope_factors(contents, family, complete_config(config))
    amiss = [
        f"{records[gguf].name} is {list(records[gguf].shape)}, the metadata needs {list(shape)}"
        for name, shape in shapes.items()
        if (gguf := names.get(name)) and records[gguf].shape != (shape or (1,))
    ]
    refuse(
        [family.to_gguf_name(name) for name in shapes if name not in names],
        [gguf for name, gguf in names.items() if name not in shapes],
        amiss,
    )
    tensors = {
        name: tensor_of(path, name, shape, records[names[name]]) for name, shape in shapes.items()
    }
    source = Source(
        path, config, family, tensors, modules, texts_of(metadata, family.architecture), [path]
    )
    source.own_dtypes = widened(metadata, family, tensors)
    return source


def tensor_of(path: Path, name: str, shape: tuple[int, ...], record: Record) -> Tensor:
    columns = shape[-1] if shape else 1
    rows = record.nbytes // row_bytes(record.kind, columns)
    dense = record.kind in FLOATS
    width = columns if dense else row_bytes(record.kind, columns)
    part = Part(path, record.offset, record.kind if dense else "U8", rows, width)
    return Tensor(name, shape, record.kind, (part,))


def widened(metadata: dict, family: Family, tensors: dict[str, Tensor]) -> dict[str, str]:
    """float32 tensors that had a narrower dtype before they came into the GGUF."""
    dtypes = {}
    for kind in ("F16", "BF16"):
        names = metadata.get(f"{family.architecture}.source.widened_{kind.lower()}", [])
        for gguf in names if isinstance(names, list) else []:
            name = family.from_gguf_name(gguf) if isinstance(gguf, str) else None
            if name in tensors and tensors[name].encoding == "F32":
                dtypes[name] = kind
    return dtypes


def config_of(contents: Contents, family: Family) -> dict:
    """The config: hyper-parameters from the metadata, the other keys as the source had them."""
    path, metadata, prefix = contents.path, contents.metadata, family.architecture
    source = source_config(path, metadata.get(f"{prefix}.source.config"))
    config = dict(source)
    for key, gguf, kind in family.metadata:
        value = metadata.get(f"{prefix}.{gguf}")
        if value is None:
            raise WiolaError(f"{path} has no metadata {prefix}.{gguf}")
        fits = {"u32": int, "bool": bool, "f32": float}[kind]
        if type(value) is not fits:
            raise WiolaError(f"{path}: the metadata {prefix}.{gguf} is {value!r}")
        if key in source and (source[key] is None or agree(source[key], value, kind)):
            continue  # None: the model works it out; the shapes will tell
        if key in source:
            raise WiolaError(
                f"{path}: {prefix}.{gguf} is {value!r}, but {key} in {prefix}.source.config "
                f"is {source[key]!r}"
            )
        if source and key not in source and is_default(family, key, value, kind):
            continue  # the source left it out, too
        config[key] = shortest(value) if kind == "f32" else value
    config.setdefault("model_type", "wiola")
    config.setdefault("architectures", ["WiolaForCausalLM"])
    add_token_ids(config, metadata, prefix, source)
    check_config(config, path)
    return config


def source_config(path: Path, text) -> dict:
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise WiolaError(f"{path}: the source's config in it is not JSON") from error
    if not isinstance(config, dict):
        raise WiolaError(f"{path}: the source's config in it is not a JSON object")
    return config


def agree(value, stored, kind: str) -> bool:
    if kind != "f32":
        return value == stored and isinstance(value, bool) == isinstance(stored, bool)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return float(np.float32(value)) == stored


def is_default(family: Family, key: str, value, kind: str) -> bool:
    from dataclasses import fields
    from importlib import import_module

    args = import_module(f"wiola_mlx.models.{family.name}").ModelArgs
    default = next(field.default for field in fields(args) if field.name == key)
    return agree(default, value, kind)


def shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-06 and not 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def add_token_ids(config: dict, metadata: dict, prefix: str, source: dict):
    if source:
        return
    for role in ("bos", "eos"):
        if (i := metadata.get(f"tokenizer.ggml.{role}_token_id")) is not None:
            config[f"{role}_token_id"] = i
    if (i := metadata.get("tokenizer.ggml.padding_token_id")) is not None:
        config["pad_token_id"] = i
    stops = metadata.get(f"{prefix}.stop_token_ids")
    if isinstance(stops, list) and stops:
        config["eos_token_id"] = stops if len(stops) > 1 else stops[0]


def check_rope_factors(contents: Contents, family: Family, config: dict):
    """``rope_freqs.weight`` follows from the config; another one would be another model."""
    record = contents.records.get(ROPE_FACTORS)
    if record is None:
        return
    wanted = family.rope_factors and family.rope_factors(config)
    fits = wanted is not None and record.kind == "F32" and record.shape == wanted.shape
    if fits:
        part = Part(contents.path, record.offset, "F32", 1, record.shape[0])
        fits = np.allclose(part.read(0, 1)[0], wanted, rtol=1e-5, atol=0)
    if not fits:
        raise WiolaError(
            f"{contents.path}: {ROPE_FACTORS} is not what the metadata's rotary keys give"
        )
