"""Documents from text files, one at a time: a file need not fit in memory."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from .errors import WiolaError

SEPARATOR = "<|endoftext|>"
CHUNK = 1 << 20  # characters read at a time


def read_documents(paths: Iterable[str | Path]) -> Iterator[str]:
    """The documents of all files in turn, without white space around them, none of them empty.

    Args:
        paths: UTF-8 text with ``<|endoftext|>`` between documents, or ``.jsonl`` files with one
            object a line whose "text" is the document.

    Raises:
        WiolaError: for a file that is missing, not UTF-8 or not of this form.
    """
    for path in map(Path, paths):
        try:
            found = json_lines(path) if path.suffix == ".jsonl" else text_blocks(path)
            yield from (text for document in found if (text := document.strip()))
        except UnicodeDecodeError as error:
            raise WiolaError(f"{path} is not UTF-8 text: {error.reason}") from error
        except OSError as error:
            raise WiolaError(f"{path} cannot be read: {error.strerror or error}") from error


def text_blocks(path: Path) -> Iterator[str]:
    rest = ""
    with path.open(encoding="utf-8", newline="") as file:
        while chunk := file.read(CHUNK):
            *whole, rest = (rest + chunk).split(SEPARATOR)
            yield from whole
    yield rest


def json_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise WiolaError(f'{path}, line {number}: not a JSON object with a "text"')
            yield text


def end_token(tokenizer) -> int:
    """The token that ends a document; WiolaError if the tokenizer has none."""
    if tokenizer.eos_token_id is not None:
        return tokenizer.eos_token_id
    stops = sorted(getattr(tokenizer, "eos_token_ids", None) or [])
    if not stops:
        raise WiolaError("the tokenizer names no end token (eos_token)")
    return stops[0]
