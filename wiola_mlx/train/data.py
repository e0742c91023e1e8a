"""Tokens on disk: texts are tokenized once, and memory-mapped from then on.

A cache is a file of raw little-endian token ids, an end token first and after each document, with a
JSON file of its figures beside it, which appears last.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from ..documents import end_token, read_documents
from ..errors import WiolaError

DOCUMENTS_AT_ONCE = 512


class Tokens:
    """Token ids of a text, memory-mapped.

    ``ids`` is [N] unsigned; ``documents`` and ``bytes`` (UTF-8, one more for each end) say what
    they came from, ``key`` which text and tokenizer.
    """

    def __init__(self, path: Path):
        figures = json.loads(path.with_suffix(".json").read_text())
        self.documents, self.bytes, self.key = (figures[k] for k in ("documents", "bytes", "key"))
        self.ids = np.memmap(path, dtype=figures["dtype"], mode="r")


def tokenized(paths: list[str], tokenizer, folder: Path) -> Tokens:
    """The tokens of all files, from ``folder`` if they were made before.

    Raises:
        WiolaError: for files that cannot be read or hold no text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key = cache_key(paths, tokenizer)
    path = folder / f"{key[:16]}.tokens"
    if not path.with_suffix(".json").is_file():
        write_tokens(path, key, paths, tokenizer)
    return Tokens(path)


def cache_key(paths: list[str], tokenizer) -> str:
    """Changes with the tokenizer and with the name, size or time of any file."""
    words = json.dumps([file_stamps(paths), tokenizer.backend_tokenizer.to_str()])
    return hashlib.sha256(words.encode()).hexdigest()


def file_stamps(paths: list[str]) -> list[list]:
    """[name, bytes, time] of each file."""
    try:
        stats = [(Path(path).resolve(), os.stat(path)) for path in paths]
    except OSError as error:
        raise WiolaError(f"{error.filename} cannot be read: {error.strerror}") from error
    return [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats]


def write_tokens(path: Path, key: str, paths: list[str], tokenizer):
    dtype = np.dtype("<u2" if len(tokenizer) <= 1 << 16 else "<u4")
    temporary = path.with_suffix(f".{os.getpid()}.part")
    figures = {"key": key, "dtype": dtype.str, "documents": 0, "bytes": 0}
    try:
        with temporary.open("wb") as file:
            np.array([end_token(tokenizer)], dtype).tofile(file)
            for texts in in_groups(read_documents(paths), DOCUMENTS_AT_ONCE):
                token_ids(texts, tokenizer, dtype).tofile(file)
                figures["documents"] += len(texts)
                figures["bytes"] += sum(len(text.encode()) + 1 for text in texts)
        if not figures["documents"]:
            raise WiolaError(f"there is no text in {', '.join(map(str, paths))}")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    write_json(path.with_suffix(".json"), figures)


def in_groups(items: Iterable, size: int) -> Iterator[list]:
    items = iter(items)
    while group := list(islice(items, size)):
        yield group


def token_ids(texts: list[str], tokenizer, dtype) -> np.ndarray:
    end = [end_token(tokenizer)]
    rows = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return np.concatenate([np.array(row + end, dtype) for row in rows])


def write_json(path: Path, content: dict):
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


class Batches:
    """Packed sequences in a random order that only the seed and the step decide.

    Sequence w holds the ids w·T to (w+1)·T, both included: T inputs, and T targets one further.
    Every epoch is a permutation of its own; what is left over at the end of the text is dropped.
    """

    def __init__(self, ids: np.ndarray, length: int, batch_size: int, seed: int):
        self.ids, self.length, self.batch_size, self.seed = ids, length, batch_size, seed
        self.sequences = (len(ids) - 1) // length
        if not self.sequences:
            raise WiolaError(f"the text has {len(ids)} tokens, less than one sequence of {length}")
        self.epoch, self.order = -1, None

    def sequence(self, number: int) -> int:
        """Which sequence comes at place ``number`` of the run."""
        epoch, place = divmod(number, self.sequences)
        if epoch != self.epoch:
            random = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            self.epoch, self.order = epoch, random.permutation(self.sequences)
        return int(self.order[place])

    def batch(self, step: int) -> np.ndarray:
        """Ids [batch_size, T + 1] of one step, counted from 0."""
        first = step * self.batch_size
        starts = [self.length * self.sequence(first + i) for i in range(self.batch_size)]
        return np.stack([self.ids[s : s + self.length + 1] for s in starts]).astype(np.int32)
