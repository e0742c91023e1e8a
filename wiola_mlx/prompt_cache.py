"""Prompt caches on disk, in mlx-lm's format, with what is needed to refuse a wrong one."""

import hashlib
import os
import tempfile
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import cache as mlx_cache

from .errors import WiolaError
from .models.running_sums import CacheList

CLASSES = {"CacheList", "KVCache", "QuantizedKVCache"}  # all that our caches consist of
FINGERPRINT = "wiola_fingerprint"


def save_prompt_cache(path: str | os.PathLike, cache: list, model, metadata: dict | None = None):
    """Writes ``cache``: the tokens it holds, not the room behind them.

    Stock ``mlx_lm.models.cache.load_prompt_cache`` reads the file, too.

    Args:
        path: a ``.safetensors`` file; complete, or as it was before, whatever happens.
        cache: of one sequence, as ``model.make_cache()`` made it, and not empty.
        metadata: strings to keep in the file.
    """
    path = Path(path).expanduser()
    if path.suffix != ".safetensors":
        raise WiolaError(f"a prompt cache file must be named .safetensors, not {path.name}")
    parts = [part for layer in cache for part in layer.caches]
    single = all(type(part).__name__ in CLASSES for part in parts)
    if not parts or not single or cache[0].empty() or layout(cache[0])[0][0] != 1:
        raise WiolaError("only the cache of one sequence can be saved, and only with tokens in it")
    metadata = {**(metadata or {}), FINGERPRINT: fingerprint(model)}
    try:
        handle, temporary = tempfile.mkstemp(suffix=".safetensors", dir=path.parent)
        os.close(handle)
        try:
            mlx_cache.save_prompt_cache(temporary, [without_room(c) for c in cache], metadata)
            os.chmod(temporary, 0o644)  # a temporary file is its owner's only
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise WiolaError(f"{path} cannot be written: {error.strerror or error}") from error


def without_room(layer) -> CacheList:
    """A copy of a layer's cache whose buffers end at the last token."""
    parts = []
    for part in layer.caches:
        copy = type(part).from_state(part.state)
        if not part.empty():
            copy.keys, copy.values = tree_map(
                lambda a, n=part.offset: mx.contiguous(a[..., :n, :]), (part.keys, part.values)
            )
        parts.append(copy)
    return CacheList(*parts)


def load_prompt_cache(path: str | os.PathLike, model, return_metadata: bool = False):
    """Reads a prompt cache that fits ``model``.

    Returns:
        The cache, one entry a layer; with ``return_metadata``, (cache, metadata).

    Raises:
        WiolaError: for a file that is unreadable, names other classes or is another model's.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise WiolaError(f"there is no prompt cache file {path}")
    try:
        foreign = sorted(class_names(path) - CLASSES)
        if foreign:
            raise WiolaError(f"{path} is no Wiola prompt cache: it names {', '.join(foreign)}")
        loaded, metadata = mlx_cache.load_prompt_cache(str(path), return_metadata=True)
        fits = [layout(layer) for layer in loaded] == expected_layout(model)
        parts = [part for layer in loaded for part in layer.caches if not part.empty()]
        whole = len({part.offset for part in parts}) == 1 and all(map(is_whole, parts))
    except WiolaError:
        raise
    except Exception as error:  # a damaged file fails anywhere in mlx-lm's reader
        reason = " ".join(str(error).split()) or type(error).__name__
        raise WiolaError(f"{path} is no readable prompt cache: {reason}") from error
    if not fits:
        raise WiolaError(f"{path} was made with a model of another shape")
    if not whole:
        raise WiolaError(f"{path} is damaged: its layers lack positions, or hold no numbers")
    if metadata.get(FINGERPRINT, fingerprint(model)) != fingerprint(model):
        raise WiolaError(f"{path} was made with a model of other weights")
    cache = [as_ours(layer) for layer in loaded]
    return (cache, metadata) if return_metadata else cache


def is_whole(part) -> bool:
    """Whether a part has as many positions as it says, and finite floats in them."""
    if type(part.offset) is not int or part.offset < 1:
        return False
    arrays = [array for _, array in tree_flatten((part.keys, part.values))]
    packed = isinstance(part, mlx_cache.QuantizedKVCache)
    floats = [array for array in arrays if array.dtype != mx.uint32]
    return (
        all(array.shape[-2] >= part.offset for array in arrays)
        and len(floats) == (4 if packed else 2)
        and all(mx.issubdtype(array.dtype, mx.floating) for array in floats)
        and all(mx.isfinite(array).all().item() for array in floats)
    )


def class_names(path: Path) -> set[str]:
    """Every class that the file asks mlx-lm to look up, read without looking anything up."""
    arrays, header = mx.load(str(path), format="safetensors", return_metadata=True)
    names = {value for key, value in header.items() if key.startswith("1.")}
    for key, kind in header.items():
        if kind == "string" and key.startswith("2."):
            letters = arrays[header[key[:-1] + "0"]]
            names.add("".join(chr(i) for i in letters.tolist()))
    return names


def layout(layer) -> list[tuple]:
    """(batch, heads, key width, value width) of K and V and of the running sums."""
    return [
        None if part.empty() else (*unpacked(part, part.keys), unpacked(part, part.values)[-1])
        for part in layer.caches
    ]


def unpacked(part, array) -> tuple[int, int, int]:
    if isinstance(part, mlx_cache.QuantizedKVCache):
        batch, heads, _, width = array[0].shape
        return batch, heads, width * 32 // part.bits
    return *array.shape[:2], array.shape[-1]


def expected_layout(model) -> list[list[tuple]]:
    cache = model.make_cache()
    model(mx.array([[0]]), cache=cache)  # shapes only: nothing is evaluated
    return [layout(layer) for layer in cache]


def as_ours(layer) -> mlx_cache.CacheList:
    quantized = isinstance(layer[0], mlx_cache.QuantizedKVCache)  # then no to_quantized any more
    return layer if quantized else CacheList(*layer.caches)


def fingerprint(model) -> str:
    """A hash of the start of every weight: tells models of the same shape apart."""
    digest = hashlib.sha256()
    for name, array in tree_flatten(model.parameters()):
        start = mx.contiguous(array.reshape(-1)[:4096]).view(mx.uint8)
        digest.update(name.encode() + bytes(memoryview(start)))
    return digest.hexdigest()
