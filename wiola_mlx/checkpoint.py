"""A model folder as files: what is checked before any weight is read.

Both layouts are the same here: the released PyTorch one and MLX's are a config.json beside
safetensors, in one file or in shards that an index lists.
"""

import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from .errors import WiolaError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
PICKLES = (".bin", ".pth", ".pt", ".ckpt", ".pkl", ".pickle")
MAX_SHARDS = 1000
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass
class Checkpoint:
    """A checked model folder.

    ``files`` maps each tensor's name to the file that holds it.
    """

    folder: Path
    config: dict
    files: dict[str, Path]

    def strays(self) -> list[str]:
        """Weight files in the folder that belong to no tensor."""
        used = set(self.files.values())
        return sorted(p.name for p in self.folder.glob("*.safetensors") if p not in used)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Reads the config and compares the index with the shards' headers.

    Raises:
        WiolaError: for a folder that is not a whole, safe Wiola checkpoint; says what is wrong.
    """
    config = read_config(folder)
    index = folder / INDEX
    files = indexed_files(folder, index) if index.is_file() else unindexed_files(folder)
    checkpoint = Checkpoint(folder, config, files)
    if strays := checkpoint.strays():
        warnings.warn(f"ignored in {folder}: {', '.join(strays)} (not in use)", stacklevel=2)
    return checkpoint


def read_config(folder: Path) -> dict:
    if not folder.is_dir():
        raise WiolaError(f"{folder} is not a folder; give the folder that holds config.json")
    if not (folder / "config.json").is_file():
        raise WiolaError(f"there is no config.json in {folder}")
    config = read_json(folder / "config.json")
    check_config(config, folder / "config.json")
    return config


def check_config(config: dict, where: Path):
    """WiolaError for a config that names code to run, or another kind of model."""
    if "model_file" in config:
        raise WiolaError(
            f"{where.name} names Python code to run ({config['model_file']!r}); "
            "code from a checkpoint is never run: remove the model_file key"
        )
    if "model_type" not in config:
        raise WiolaError(f"{where} has no model_type")
    if config["model_type"] != "wiola":
        raise WiolaError(
            f"model_type {config['model_type']!r} is not a Wiola model (model_type 'wiola'); "
            "other models that mlx-lm knows run with: python -m mlx_lm"
        )


def read_json(path: Path) -> dict:
    """A JSON object from a file; WiolaError if it is none."""
    refuse_pointer(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WiolaError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise WiolaError(f"{path} is not a JSON object")
    return content


def refuse_pointer(path: Path):
    try:
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
    except OSError as error:
        raise WiolaError(f"{path} cannot be read: {error.strerror or error}") from error
    if start == LFS_POINTER:
        raise WiolaError(
            f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder"
        )


def indexed_files(folder: Path, index: Path) -> dict[str, Path]:
    """The tensors that the index promises, each found in the shard it names."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WiolaError(f"{index} has no weight_map")
    shards = sorted({str(name) for name in weight_map.values()})
    for name in shards:
        if Path(name).name != name or name in ("", ".", "..") or "\\" in name:
            raise WiolaError(f"{index} names a file outside the model folder: {name!r}")
        if not name.endswith(".safetensors"):
            raise WiolaError(f"{index} names {name}, which is not a safetensors file")
    missing_files = [name for name in shards if not (folder / name).is_file()]
    if missing_files:
        raise WiolaError(f"missing files that {INDEX} names: {', '.join(missing_files)}")

    held = {name: set(tensor_names(folder / name)) for name in shards}
    missing = sorted(tensor for tensor, name in weight_map.items() if tensor not in held[name])
    extra = sorted(
        f"{tensor} in {name}"
        for name, tensors in held.items()
        for tensor in tensors
        if weight_map.get(tensor) != name
    )
    problems = [
        f"{what}: {', '.join(names)}"
        for what, names in (
            (f"tensors that {INDEX} promises and the files lack", missing),
            (f"tensors that {INDEX} does not list", extra),
        )
        if names
    ]
    if problems:
        raise WiolaError("; ".join(problems))
    return {tensor: folder / name for tensor, name in weight_map.items()}


def unindexed_files(folder: Path) -> dict[str, Path]:
    """The tensors of ``model.safetensors``, or of a complete set of numbered shards."""
    shards = [SINGLE] if (folder / SINGLE).is_file() else numbered_shards(folder)
    if not shards:
        refuse_other_formats(folder)
    files = {}
    for name in shards:
        for tensor in tensor_names(folder / name):
            if tensor in files:
                raise WiolaError(f"{tensor} is in two files: {files[tensor].name} and {name}")
            files[tensor] = folder / name
    return files


def numbered_shards(folder: Path) -> list[str]:
    found = [m for path in sorted(folder.iterdir()) if (m := SHARD.fullmatch(path.name))]
    totals = {m[2] for m in found}
    if len(totals) > 1:
        raise WiolaError(
            f"shards of different sets lie in {folder} and no {INDEX} says which: "
            + ", ".join(m[0] for m in found)
        )
    if not found:
        return []
    total = totals.pop()
    if int(total) > MAX_SHARDS:
        raise WiolaError(f"{found[0][0]} is one of {int(total)} shards, which cannot be")
    wanted = [f"model-{i:05d}-of-{total}.safetensors" for i in range(1, int(total) + 1)]
    missing = sorted(set(wanted) - {m[0] for m in found})
    if missing:
        raise WiolaError(f"missing files: {', '.join(missing)}")
    return wanted


def refuse_other_formats(folder: Path):
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    if pickles:
        raise WiolaError(
            f"{folder} holds only pickled weights ({', '.join(pickles)}), which can run code: "
            "save them as safetensors (in PyTorch: model.save_pretrained(folder))"
        )
    raise WiolaError(f"there is no {SINGLE} in {folder}")


def tensor_names(path: Path) -> list[str]:
    """Names in a safetensors header, whose lengths are checked against the file's."""
    refuse_pointer(path)
    try:
        with safe_open(path, framework="numpy") as file:
            return list(file.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise WiolaError(f"{path} is damaged or not a safetensors file: {error}") from error
