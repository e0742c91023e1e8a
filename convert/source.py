"""What is converted: a model folder, a Hub id or a GGUF file, checked before any work."""

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from wiola_mlx.checkpoint import Checkpoint, open_checkpoint, refuse_pointer
from wiola_mlx.errors import WiolaError
from wiola_mlx.loading import build_model, resolve
from wiola_mlx.models.tied_head import EMBEDDING, HEAD

from .blocks import Packing
from .families import Family, family_for
from .tensors import FLOATS, Part, Tensor

TEXTS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "README.md",
)
# Quantization is told by the tensors; the path is of the machine that the model was trained on.
DROPPED_KEYS = ("quantization", "quantization_config", "_name_or_path")
FLOAT_MODES = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}


@dataclass
class Source:
    """A checked model, whatever its layout.

    Attributes:
        path: the folder or file that was read.
        config: the released keys, without quantization.
        tensors: by name, complete, of the shapes that the config needs; no copy of a tied head.
        modules: what the model calls its layers: path to module, of those that can be quantized.
        texts: the other files' names and contents.
        files: everything that was read, for the manifest.
        own_dtypes: float32 tensors that a GGUF widened, and the dtype that they had.
    """

    path: Path
    config: dict
    family: Family
    tensors: dict[str, Tensor]
    modules: dict
    texts: dict[str, bytes]
    files: list[Path]
    own_dtypes: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        path = self.path.resolve()
        if path.parent.name == "snapshots":  # the Hub's cache: models--owner--name/snapshots/hash
            return path.parent.parent.name.split("--")[-1]
        return path.name.removesuffix(".gguf")

    @property
    def quantized(self) -> bool:
        return any(tensor.encoding not in FLOATS for tensor in self.tensors.values())

    def own_dtype(self, tensor: Tensor) -> str:
        """The dtype of a float tensor before any conversion that left a note of it."""
        return self.own_dtypes.get(tensor.name, tensor.encoding)


def open_source(name) -> Source:
    """Opens a model to convert.

    Args:
        name: a folder (released or MLX layout), a GGUF file, a Hub id, or "builtin".

    Raises:
        WiolaError: for anything that is not one whole Wiola; lists every tensor that is amiss.
    """
    path = resolve(name)
    if path.is_file():
        from .from_gguf import open_gguf

        return open_gguf(path)
    return open_folder(path)


def open_folder(folder: Path) -> Source:
    checkpoint = open_checkpoint(folder)
    shapes, modules = expected(build_model(checkpoint))
    parts = {}
    for file in sorted(set(checkpoint.files.values())):
        found = safetensors_parts(file)
        parts |= {name: found[name] for name, home in checkpoint.files.items() if home == file}
    if checkpoint.config.get("tie_word_embeddings", True):
        parts = without_tied_head(parts)
    tensors = assemble(shapes, parts, checkpoint.config.get("quantization"))
    texts = read_texts(folder)
    config = {k: v for k, v in checkpoint.config.items() if k not in DROPPED_KEYS}
    files = [folder / "config.json", *sorted(set(checkpoint.files.values()))]
    files += [folder / text for text in texts if text != "README.md"]
    return Source(folder, config, family_for(config), tensors, modules, texts, files)


def expected(model) -> tuple[dict[str, tuple[int, ...]], dict]:
    """Tensor shapes by name, and modules that can be quantized by path. Computes no weight."""
    from mlx.utils import tree_flatten

    shapes = {name: array.shape for name, array in tree_flatten(model.parameters())}
    modules = {
        path: module for path, module in model.named_modules() if hasattr(module, "to_quantized")
    }
    return shapes, modules


def safetensors_parts(path: Path) -> dict[str, tuple[tuple[int, ...], Part]]:
    """Each tensor's shape and place in a file whose header ``open_checkpoint`` has accepted."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    parts = {}
    for name, entry in header.items():
        shape, start = tuple(entry["shape"]), entry["data_offsets"][0]
        width = shape[-1] if len(shape) > 1 else prod(shape)
        rows = prod(shape) // width if width else 0
        parts[name] = shape, Part(path, 8 + length + start, entry["dtype"], rows, width)
    return parts


def without_tied_head(parts: dict) -> dict:
    """Leaves out a copy of the embedding; WiolaError if it is none."""
    for name in parts:
        if name.startswith(HEAD):
            twin = EMBEDDING + name[len(HEAD) :]
            if not (twin in parts and same(parts[name], parts[twin])):
                raise WiolaError(
                    f"{name} differs from {twin}, but the config ties them: set "
                    '"tie_word_embeddings": false in config.json if the head is its own'
                )
    return {name: part for name, part in parts.items() if not name.startswith(HEAD)}


def same(one, other) -> bool:
    (shape, a), (other_shape, b) = one, other
    if shape != other_shape or a.dtype != b.dtype:
        return False
    step = max(1, (1 << 20) // max(1, a.width))
    return all(
        np.array_equal(a.read(i, min(i + step, a.rows)), b.read(i, min(i + step, a.rows)))
        for i in range(0, a.rows, step)
    )


def assemble(shapes: dict, parts: dict, quantization: dict | None) -> dict[str, Tensor]:
    """Whole tensors out of parts; WiolaError that names all that are missing, extra or amiss."""
    tensors, used, amiss = {}, set(), []
    for name, shape in shapes.items():
        layer = name.removesuffix(".weight")
        names = [name]
        if quantization is not None and f"{layer}.scales" in parts:
            names += [n for n in (f"{layer}.scales", f"{layer}.biases") if n in parts]
        used |= set(names)
        if name not in parts:
            continue
        found = [parts[n] for n in names]
        encoding = encoding_of(shape, found) if len(found) > 1 else found[0][1].dtype
        if encoding is None or (len(found) == 1 and encoding not in FLOATS):
            amiss.append(f"{name} is {list(found[0][0])} {found[0][1].dtype}")
        elif len(found) == 1 and found[0][0] != shape:
            amiss.append(f"{name} is {list(found[0][0])}, the config needs {list(shape)}")
        tensors[name] = Tensor(name, shape, encoding, tuple(part for _, part in found))
    refuse(shapes.keys() - tensors.keys(), parts.keys() - used, amiss)
    return tensors


def encoding_of(shape: tuple[int, ...], found: list) -> Packing | None:
    """The packing that the parts' shapes tell; None if they do not fit together."""
    (weight_shape, weight), (scales_shape, scales), *rest = found
    if len(shape) != 2 or len(weight_shape) != 2 or weight.dtype != "U32" or not scales.width:
        return None
    bits, group_size = weight.width * 32 // shape[-1], shape[-1] // scales.width
    affine = scales.dtype != "U8"
    mode = "affine" if affine else FLOAT_MODES.get((bits, group_size))
    fits = (
        mode is not None
        and bits in ((1, 2, 3, 4, 5, 6, 8) if affine else (4, 8))
        and weight_shape == (shape[0], shape[1] * bits // 32)
        and scales_shape == (shape[0], shape[1] // max(1, group_size))
        and [(s, p.dtype) for s, p in rest] == [(scales_shape, scales.dtype)] * affine
        and (not affine or scales.dtype in FLOATS)
    )
    return Packing(bits, group_size, mode) if fits else None


def refuse(missing: Iterable[str], extra: Iterable[str], amiss: Iterable[str]):
    problems = [
        f"{what} ({len(names)}): {', '.join(names)}"
        for what, names in (
            ("missing tensors", sorted(missing)),
            ("extra tensors", sorted(extra)),
            ("tensors of the wrong shape or kind", sorted(amiss)),
        )
        if names
    ]
    if problems:
        raise WiolaError("the weights do not fit the config: " + "; ".join(problems))


def read_texts(folder: Path) -> dict[str, bytes]:
    texts = {}
    for name in TEXTS:
        if (folder / name).is_file():
            refuse_pointer(folder / name)
            texts[name] = (folder / name).read_bytes()
    return texts


def model_for(config: dict, names: Iterable[str], where: Path):
    """The model of a config that is in no folder."""
    return build_model(Checkpoint(where, config, dict.fromkeys(names, where)))
