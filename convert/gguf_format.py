"""GGUF as bytes: a header that is read with every length checked, and one that is written.

A file is: magic, version, counts; metadata; one record a tensor; then, aligned, the tensors' data.
All little-endian. The data is left where it is: a record says where to find it.
"""

import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from wiola_mlx.checkpoint import refuse_pointer
from wiola_mlx.errors import WiolaError

MAGIC = b"GGUF"
VERSION = 3
READABLE_VERSIONS = (2, 3)
ALIGNMENT = 32
MOST_DIMENSIONS = 4
LONGEST_KEY = 65535
STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
PLAIN = {"u32": "I", "i32": "i", "f32": "f", "bool": "?"}
CODES = {"u32": 4, "i32": 5, "f32": 6, "bool": BOOL, "str": STRING}


@dataclass(frozen=True)
class Record:
    """A tensor's record: its shape in NumPy's order, and where its bytes are in the file."""

    name: str
    shape: tuple[int, ...]
    kind: str  # ggml's name of the type: "F32", "Q4_0", …
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Contents:
    path: Path
    metadata: dict
    records: dict[str, Record]


class Cursor:
    """Reads a file from its start, and never past its end."""

    def __init__(self, path: Path, file):
        self.path, self.file = path, file
        self.left = os.fstat(file.fileno()).st_size

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise WiolaError(
                f"{self.path} is damaged or truncated: its header wants {count} more bytes, "
                f"and {self.left} are left"
            )
        self.left -= count
        data = self.file.read(count)
        if len(data) != count:
            raise WiolaError(f"{self.path} cannot be read to its end")
        return data

    def number(self, code: str):
        return struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]

    def numbers(self, code: str, count: int) -> list:
        return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(code))))

    def text(self, most: int | None = None) -> str:
        length = self.number("Q")
        if most is not None and length > most:
            raise WiolaError(f"{self.path} is damaged: a name of {length} bytes")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise WiolaError(f"{self.path} is damaged: a text is not UTF-8") from error

    def flags(self, count: int) -> list[bool]:
        data = self.take(count)
        if any(byte > 1 for byte in data):
            raise WiolaError(f"{self.path} is damaged: a truth value is neither 0 nor 1")
        return [bool(byte) for byte in data]

    def value(self, code: int):
        if code in NUMBERS:
            return self.number(NUMBERS[code])
        if code == BOOL:
            return self.flags(1)[0]
        return self.text() if code == STRING else self.array(code)

    def array(self, code: int) -> list:
        if code != ARRAY:
            raise WiolaError(f"{self.path} has metadata of an unknown type ({code})")
        kind, count = self.number("I"), self.number("Q")
        if kind in NUMBERS:
            return self.numbers(NUMBERS[kind], count)
        if kind == BOOL:
            return self.flags(count)
        if kind != STRING:
            raise WiolaError(f"{self.path} has an array of an unsupported type ({kind})")
        if count * 8 > self.left:  # each text has a length of 8 bytes
            self.take(count * 8)
        return [self.text() for _ in range(count)]


def read_gguf(path: Path) -> Contents:
    """A GGUF file's metadata and tensor records.

    Raises:
        WiolaError: for anything but one whole, little-endian GGUF file of known types; says what.
    """
    refuse_pointer(path)
    try:
        with path.open("rb") as file:
            return read_contents(Cursor(path, file))
    except OSError as error:
        raise WiolaError(f"{path} cannot be read: {error.strerror or error}") from error
    except (MemoryError, OverflowError, struct.error) as error:
        raise WiolaError(f"{path} is damaged: a length in its header is absurd") from error


def read_contents(cursor: Cursor) -> Contents:
    path, size = cursor.path, cursor.left
    check_start(cursor)
    tensors, keys = cursor.number("Q"), cursor.number("Q")
    metadata = {}
    for _ in range(keys):
        key = cursor.text(LONGEST_KEY)
        if key in metadata:
            raise WiolaError(f"{path} has the metadata key {key!r} twice")
        metadata[key] = cursor.value(cursor.number("I"))
    if metadata.get("split.count") not in (None, 0, 1):
        raise WiolaError(
            f"{path} is one part of a split model ({metadata['split.count']} parts): join them "
            "first, for example with llama.cpp's llama-gguf-split --merge"
        )
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise WiolaError(f"{path} has an alignment that is no power of two: {alignment!r}")
    found = [read_record(cursor) for _ in range(tensors)]
    start = -(-(size - cursor.left) // alignment) * alignment
    return Contents(path, metadata, place_records(path, found, start, alignment, size))


def check_start(cursor: Cursor):
    path = cursor.path
    magic = cursor.take(4)
    if magic != MAGIC:
        raise WiolaError(f"{path} is not a GGUF file: it begins with {magic!r}")
    version = cursor.number("I")
    if version & 0xFFFF == 0:
        raise WiolaError(
            f"{path} is a big-endian GGUF file: make it little-endian, "
            "for example with gguf-convert-endian"
        )
    if version not in READABLE_VERSIONS:
        raise WiolaError(f"{path} is GGUF version {version}; versions 2 and 3 can be read")


def read_record(cursor: Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, dimensions = cursor.text(LONGEST_KEY), cursor.number("I")
    if dimensions > MOST_DIMENSIONS:
        raise WiolaError(f"{cursor.path} is damaged: {name!r} has {dimensions} dimensions")
    shape = tuple(reversed(cursor.numbers("Q", dimensions)))
    return name, shape, cursor.number("I"), cursor.number("Q")


def place_records(path: Path, found: list, start: int, alignment: int, size: int) -> dict:
    """Records by name, each inside the file, aligned, and apart from the others."""
    records, end, last = {}, start, None
    for name, shape, code, offset in sorted(found, key=lambda record: record[3]):
        kind, nbytes = kind_and_size(path, name, shape, code)
        if name in records:
            raise WiolaError(f"{path} has the tensor {name!r} twice")
        if offset % alignment:
            raise WiolaError(f"{path} is damaged: {name!r} is not aligned to {alignment} bytes")
        if start + offset < end:
            raise WiolaError(f"{path} is damaged: {name!r} overlaps {last!r}")
        end, last = start + offset + nbytes, name
        if end > size:
            raise WiolaError(
                f"{path} is truncated: {name!r} ends at byte {end}, the file at {size}"
            )
        records[name] = Record(name, shape, kind, start + offset, nbytes)
    return records


def kind_and_size(path: Path, name: str, shape: tuple[int, ...], code: int) -> tuple[str, int]:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(code)
    except ValueError:
        raise WiolaError(f"{path}: {name!r} is of a type that is not known ({code})") from None
    block, nbytes = GGML_QUANT_SIZES[kind]
    if not shape or 0 in shape:
        raise WiolaError(f"{path} is damaged: {name!r} has the shape {list(shape)}")
    if shape[-1] % block:
        raise WiolaError(
            f"{path} is damaged: rows of {shape[-1]} in {name!r} are no multiple of {block}, "
            f"the block of {kind.name}"
        )
    return kind.name, prod(shape) // block * nbytes


def encode_header(metadata: list[tuple[str, str, object]], records: list[Record]) -> bytes:
    """The bytes before the data, padded; the offsets in ``records`` count from their end.

    Args:
        metadata: (key, kind, value); a kind is one of ``CODES``, or such a one in brackets.
    """
    pieces = [MAGIC, struct.pack("<IQQ", VERSION, len(records), len(metadata))]
    for key, kind, value in metadata:
        try:
            pieces += [encode_text(key), encode_value(kind, value)]
        except (struct.error, OverflowError) as error:
            raise WiolaError(f"{key} is {value!r}, which GGUF cannot hold as {kind}") from error
    from gguf.constants import GGMLQuantizationType

    for record in records:
        dimensions = record.shape or (1,)
        pieces += [
            encode_text(record.name),
            struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *reversed(dimensions)),
            struct.pack("<IQ", GGMLQuantizationType[record.kind], record.offset),
        ]
    header = b"".join(pieces)
    return header + bytes(-len(header) % ALIGNMENT)


def encode_text(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def encode_value(kind: str, value) -> bytes:
    if not kind.startswith("["):
        return struct.pack("<I", CODES[kind]) + encode_plain(kind, value)
    kind = kind.strip("[]")
    start = struct.pack("<IIQ", ARRAY, CODES[kind], len(value))
    if kind == "str":
        return start + b"".join(map(encode_text, value))
    return start + struct.pack(f"<{len(value)}{PLAIN[kind]}", *value)


def encode_plain(kind: str, value) -> bytes:
    if kind == "str":
        return encode_text(value)
    return struct.pack("<" + PLAIN[kind], value)
