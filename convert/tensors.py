"""Tensors as runs of bytes in files: where they are, how they are encoded, and rows of them.

No more than some rows are in memory at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from wiola_mlx.errors import WiolaError

from . import blocks
from .blocks import Packed, Packing
from .floats import DTYPES, all_finite, from_float32, to_bfloat16, to_float32

CHUNK = 1 << 18  # values at a time: a megabyte in float32
FLOATS = ("F32", "F16", "BF16")
LARGEST_FLOAT16 = 65504


@dataclass(frozen=True)
class Part:
    """Rows of equal length in a file; a vector or a scalar is one row."""

    path: Path
    offset: int
    dtype: str  # a key of DTYPES; raw blocks are "U8"
    rows: int
    width: int  # values of the dtype in a row

    @property
    def nbytes(self) -> int:
        return self.rows * self.width * np.dtype(DTYPES[self.dtype]).itemsize

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows ``start`` to ``stop``, [rows, width]."""
        dtype = np.dtype(DTYPES[self.dtype])
        count = (stop - start) * self.width
        offset = self.offset + start * self.width * dtype.itemsize
        try:
            values = np.fromfile(self.path, dtype, count, offset=offset)
        except OSError as error:
            raise WiolaError(f"{self.path} cannot be read: {error.strerror or error}") from error
        if values.size != count:
            raise WiolaError(f"{self.path} is shorter than its header says")
        return values.reshape(-1, self.width)


@dataclass(frozen=True)
class Tensor:
    """A weight in a file.

    Attributes:
        name: its name in a checkpoint.
        shape: as the model has it, whatever the encoding.
        encoding: "F32", "F16", "BF16", the name of a GGUF block type, or a ``Packing``.
        parts: one, or weight, scales and biases of a packing.
    """

    name: str
    shape: tuple[int, ...]
    encoding: str | Packing
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def rows(self) -> int:
        return self.parts[0].rows

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def scales(self) -> str:
        """The dtype of a packing's scales."""
        return self.parts[1].dtype

    def spans(self) -> Iterator[tuple[int, int]]:
        """All rows in turn, some at a time: first and end."""
        step = max(1, CHUNK // max(1, self.size // self.rows))
        for start in range(0, self.rows, step):
            yield start, min(start + step, self.rows)

    def read(self, start: int, stop: int) -> list[np.ndarray]:
        """Rows as stored, one array a part."""
        return [part.read(start, stop) for part in self.parts]


def decode(tensor: Tensor, arrays: list[np.ndarray]) -> np.ndarray:
    """Rows of any encoding in float32, [rows, columns]."""
    if isinstance(tensor.encoding, Packing):
        return blocks.packed_to_float32(packed(tensor, arrays), tensor.encoding)
    if tensor.encoding in FLOATS:
        check_finite(tensor, arrays[0], tensor.encoding)
        return to_float32(arrays[0], tensor.encoding)
    return dequantize(tensor, arrays[0])


def check_finite(tensor: Tensor, x: np.ndarray, kind: str):
    if not all_finite(x, kind):
        raise WiolaError(f"NaN or infinity in the weights: {tensor.name}")


def dequantize(tensor: Tensor, raw: np.ndarray) -> np.ndarray:
    from gguf import GGMLQuantizationType
    from gguf import dequantize as gguf_dequantize

    try:
        with np.errstate(invalid="ignore", over="ignore"):
            x = gguf_dequantize(raw, GGMLQuantizationType[tensor.encoding])
    except NotImplementedError as error:
        raise WiolaError(f"{tensor.name} is {tensor.encoding}, which cannot be read") from error
    x = np.ascontiguousarray(x, np.float32)
    check_finite(tensor, x, "F32")
    return x


def packed(tensor: Tensor, arrays: list[np.ndarray]) -> Packed:
    """A packing's arrays with scales and biases in float32."""
    weight, *numbers = arrays
    if tensor.encoding.mode != "affine":
        return Packed(weight, numbers[0], None)
    for array in numbers:
        check_finite(tensor, array, tensor.scales)
    return Packed(weight, *(to_float32(array, tensor.scales) for array in numbers))


@dataclass(frozen=True)
class Target:
    """An encoding to make.

    Attributes:
        encoding: as ``Tensor.encoding``.
        scales: the dtype of scales and biases, if the encoding is an affine packing.
        mapped: whether blocks are made from packed weights by an exact map, not by rounding.
    """

    encoding: str | Packing
    scales: str = "F32"
    mapped: bool = False


class TooLarge(Exception):
    """A finite value has become infinity in a narrower dtype."""


def narrow(x: np.ndarray, kind: str) -> np.ndarray:
    """float32 to a dtype; ``TooLarge`` if that cannot hold it."""
    y = from_float32(x, kind)
    if kind != "F32" and not all_finite(y, kind):
        raise TooLarge
    return y


def encode(tensor: Tensor, arrays: list[np.ndarray], target: Target) -> list[np.ndarray]:
    """Rows as stored to rows of another encoding, one array a part."""
    to, scales = target.encoding, target.scales
    if to == tensor.encoding:
        return same_encoding(tensor, arrays, scales)
    if isinstance(to, Packing):
        if tensor.encoding in blocks.PACKINGS:
            return with_scales(blocks.to_mlx(arrays[0], tensor.encoding), to, scales)
        return quantize_mlx(tensor, arrays, to, scales)
    if target.mapped:
        return [blocks.from_mlx(packed(tensor, arrays), tensor.encoding, to)]
    if tensor.encoding in FLOATS and to in FLOATS:
        return [recast(tensor, arrays[0], to)]
    x = decode(tensor, arrays)
    return [narrow(x, to)] if to in FLOATS else [quantize_blocks(x, to)]


def recast(tensor: Tensor, x: np.ndarray, kind: str) -> np.ndarray:
    """One float dtype to another; looks at the source only if the result is not finite."""
    y = from_float32(to_float32(x, tensor.encoding), kind)
    if not all_finite(y, kind):
        check_finite(tensor, x, tensor.encoding)
        raise TooLarge
    return y


def same_encoding(tensor: Tensor, arrays: list[np.ndarray], scales: str) -> list[np.ndarray]:
    if isinstance(tensor.encoding, Packing):
        whole = packed(tensor, arrays)
        return arrays if scales == tensor.scales else with_scales(whole, tensor.encoding, scales)
    if tensor.encoding in FLOATS:
        check_finite(tensor, arrays[0], tensor.encoding)
    return arrays


def with_scales(whole: Packed, packing: Packing, scales: str) -> list[np.ndarray]:
    if packing.mode != "affine":
        return [whole.weight, whole.scales]
    if not (np.isfinite(whole.scales).all() and np.isfinite(whole.biases).all()):
        raise WiolaError("a block's scale is NaN or infinity")
    return [whole.weight, narrow(whole.scales, scales), narrow(whole.biases, scales)]


def quantize_mlx(tensor: Tensor, arrays: list[np.ndarray], packing: Packing, scales: str):
    """By MLX itself, from weights in the dtype that the scales are to have: as mlx-lm does."""
    import mlx.core as mx

    x = mx.array(decode(tensor, arrays))
    if packing.mode == "affine" and scales != "F32":
        x = x.astype(mx.float16 if scales == "F16" else mx.bfloat16)
        if not mx.isfinite(x).all().item():
            raise TooLarge
    out = mx.quantize(x, group_size=packing.group_size, bits=packing.bits, mode=packing.mode)
    return [as_numpy(array) for array in out]


def as_numpy(array) -> np.ndarray:
    import mlx.core as mx

    if array.dtype == mx.bfloat16:
        return to_bfloat16(np.array(array.astype(mx.float32)))
    return np.array(array)


def quantize_blocks(x: np.ndarray, kind: str) -> np.ndarray:
    """float32 to raw blocks: K-quants by ggml's library, the others by gguf-py."""
    if np.abs(x).max() > LARGEST_FLOAT16:  # of which a block's scale is a fraction
        raise TooLarge
    if kind.endswith("_K"):
        from .ggml_library import quantize_rows

        return quantize_rows(x, kind)
    from gguf import GGMLQuantizationType, quantize

    raw = quantize(x, GGMLQuantizationType[kind])
    return np.ascontiguousarray(raw)


def parts_of(tensor: Tensor, target: Target) -> list[tuple[str, int]]:
    """The (dtype, width) of each array that ``encode`` gives; their rows are the tensor's."""
    columns, to = tensor.size // tensor.rows, target.encoding
    if isinstance(to, Packing):
        numbers = [(target.scales, columns // to.group_size)] * 2
        if to.mode != "affine":
            numbers = [("U8", columns // to.group_size)]
        return [("U32", columns * to.bits // 32), *numbers]
    return [(to, columns) if to in FLOATS else ("U8", row_bytes(to, columns))]


def row_bytes(kind: str, columns: int) -> int:
    block, nbytes = block_size(kind)
    return columns // block * nbytes


def block_size(kind: str) -> tuple[int, int]:
    """Values and bytes of a block."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    return GGML_QUANT_SIZES[GGMLQuantizationType[kind]]


def named(encoding: str | Packing, scales: str = "") -> str:
    """An encoding as people read it."""
    if not isinstance(encoding, Packing):
        return encoding
    mode = "" if encoding.mode == "affine" else f" {encoding.mode}"
    return f"{encoding.bits} bits, groups of {encoding.group_size}{mode}" + (
        f", scales {scales}" if scales and not mode else ""
    )
