"""The exact maps between GGUF's block types and MLX's packed weights, both ways.

MLX keeps w = scale · code + bias for groups of a row, the codes in one little-endian bit stream
per row. A map here is exact if that product and sum, in float32, equal ``gguf.dequantize``.

Shapes: R rows; C values a row; raw blocks are [R, bytes] uint8.
"""

from typing import NamedTuple

import numpy as np


class Packing(NamedTuple):
    """How MLX packs: bits a value, values a scale, "affine" or one of the float modes."""

    bits: int
    group_size: int
    mode: str = "affine"


class Packed(NamedTuple):
    weight: np.ndarray  # [R, C · bits / 32] uint32
    scales: np.ndarray  # [R, C / group size] float32; uint8 in the float modes
    biases: np.ndarray | None  # as the scales; None in the float modes


# Exact in float32. Scales and biases of all but Q4_K and Q5_K also fit float16.
PACKINGS = {
    "Q4_0": Packing(4, 32),
    "Q4_1": Packing(4, 32),
    "Q5_0": Packing(5, 32),
    "Q5_1": Packing(5, 32),
    "Q8_0": Packing(8, 32),
    "Q4_K": Packing(4, 32),
    "Q5_K": Packing(5, 32),
    "Q3_K": Packing(8, 128),
    "IQ4_NL": Packing(8, 32),
    "MXFP4": Packing(4, 32, "mxfp4"),
    "NVFP4": Packing(4, 16, "nvfp4"),
}
IQ4_NL_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16
)
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4_VALUES = np.concatenate([FP4_VALUES, -FP4_VALUES])


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [R, C] to MLX's words [R, C · bits / 32] uint32; C is a multiple of 32."""
    if bits == 8:
        return np.ascontiguousarray(codes, np.uint8).view(np.uint32)
    eights = codes.reshape(len(codes), -1, 8)
    words = np.zeros(eights.shape[:2], np.uint64)
    for i in range(8):
        words |= eights[..., i].astype(np.uint64) << np.uint64(bits * i)
    stream = words.astype("<u8", copy=False).view(np.uint8).reshape(*words.shape, 8)[..., :bits]
    return np.ascontiguousarray(stream).reshape(len(codes), -1).view(np.uint32)


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """MLX's words back to codes [R, C] uint8."""
    stream = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1, bits)
    eights = np.zeros((*stream.shape[:2], 8), np.uint8)
    eights[..., :bits] = stream
    eights = eights.view("<u8")  # [R, C / 8, 1]
    shifts = np.arange(0, 8 * bits, bits, dtype=np.uint64)
    codes = (eights >> shifts) & np.uint64((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(len(words), -1)


def to_mlx(raw: np.ndarray, kind: str) -> Packed:
    """Raw blocks of a type in ``PACKINGS`` to MLX's arrays, scales and biases in float32."""
    return READERS[kind](raw)


def packed_to_float32(packed: Packed, packing: Packing) -> np.ndarray:
    """The weights [R, C] float32: product and sum rounded once each, as MLX specifies."""
    codes = unpack(packed.weight, packing.bits)
    rows = codes.reshape(len(codes), -1, packing.group_size)
    if packing.mode == "affine":
        scales, biases = (a.astype(np.float32, copy=False)[..., None] for a in packed[1:])
        return (scales * rows + biases).reshape(codes.shape)
    values = FP4_VALUES[rows] if packing.bits == 4 else decode_e4m3(rows)
    scales = decode_e4m3(packed.scales) if packing.mode == "nvfp4" else decode_e8m0(packed.scales)
    return (scales[..., None] * values).reshape(codes.shape)


def decode_e8m0(x: np.ndarray) -> np.ndarray:
    """2^(x − 127) float32."""
    return np.ldexp(np.float32(1), x.astype(np.int32) - 127)


def decode_e4m3(x: np.ndarray) -> np.ndarray:
    """Floats of 4 exponent and 3 mantissa bits to float32."""
    x = x.astype(np.int32)
    exponent, mantissa = (x >> 3) & 15, x & 7
    value = np.ldexp(
        np.where(exponent == 0, mantissa, 8 + mantissa).astype(np.float32),
        np.maximum(exponent, 1) - 10,
    )
    return np.where(x & 128, -value, value).astype(np.float32)


def blocks(raw: np.ndarray, size: int) -> np.ndarray:
    return np.ascontiguousarray(raw).reshape(len(raw), -1, size)


def float16_at(block: np.ndarray, start: int) -> np.ndarray:
    """The float16 at a byte of each block, [R, blocks] float32."""
    half = np.ascontiguousarray(block[..., start : start + 2]).view(np.float16)
    return half[..., 0].astype(np.float32)


def nibbles(block: np.ndarray) -> np.ndarray:
    """Low nibbles of all bytes, then the high ones: the order within a block."""
    return np.concatenate([block & 15, block >> 4], axis=-1)


def high_bits(block: np.ndarray) -> np.ndarray:
    """The fifth bits: 4 bytes a block, bit i for value i."""
    return np.unpackbits(block, axis=-1, bitorder="little") << 4


def affine(codes: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int) -> Packed:
    return Packed(pack(codes.reshape(len(codes), -1), bits), scales, biases)


def read_q4_0(raw: np.ndarray) -> Packed:
    block = blocks(raw, 18)
    d = float16_at(block, 0)
    return affine(nibbles(block[..., 2:]), d, -8 * d, 4)


def read_q4_1(raw: np.ndarray) -> Packed:
    block = blocks(raw, 20)
    return affine(nibbles(block[..., 4:]), float16_at(block, 0), float16_at(block, 2), 4)


def read_q5_0(raw: np.ndarray) -> Packed:
    block = blocks(raw, 22)
    d = float16_at(block, 0)
    codes = nibbles(block[..., 6:]) | high_bits(block[..., 2:6])
    return affine(codes, d, -16 * d, 5)


def read_q5_1(raw: np.ndarray) -> Packed:
    block = blocks(raw, 24)
    codes = nibbles(block[..., 8:]) | high_bits(block[..., 4:8])
    return affine(codes, float16_at(block, 0), float16_at(block, 2), 5)


def read_q8_0(raw: np.ndarray) -> Packed:
    block = blocks(raw, 34)
    d = float16_at(block, 0)
    return affine(block[..., 2:] ^ 128, d, -128 * d, 8)  # int8 q to code q + 128


def read_iq4_nl(raw: np.ndarray) -> Packed:
    block = blocks(raw, 18)
    d = float16_at(block, 0)
    codes = (IQ4_NL_VALUES + 128).astype(np.uint8)[nibbles(block[..., 2:])]
    return affine(codes, d, -128 * d, 8)


def k_scales(block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The eight 6-bit scales and minima in 12 bytes of a super-block, both [R, blocks, 8]."""
    low, middle, high = block[..., 0:4], block[..., 4:8], block[..., 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=-1)
    return scales, minima


def k_affine(block: np.ndarray, codes: np.ndarray, bits: int) -> Packed:
    d, dmin = float16_at(block, 0), float16_at(block, 2)
    scales, minima = k_scales(block[..., 4:16])
    rows = len(block)
    return affine(
        codes,
        (d[..., None] * scales).reshape(rows, -1),
        -(dmin[..., None] * minima).reshape(rows, -1),
        bits,
    )


def runs_of_nibbles(quarter: np.ndarray) -> np.ndarray:
    """128 bytes as four runs of 32, each with its low nibbles first: [R, blocks, 256]."""
    runs = quarter.reshape(*quarter.shape[:2], 4, 32)
    return nibbles(runs).reshape(*quarter.shape[:2], 256)


def read_q4_k(raw: np.ndarray) -> Packed:
    block = blocks(raw, 144)
    return k_affine(block, runs_of_nibbles(block[..., 16:]), 4)


def read_q5_k(raw: np.ndarray) -> Packed:
    block = blocks(raw, 176)
    fifth = block[..., 16:48, None] >> np.arange(8, dtype=np.uint8) & 1  # bit j: run j of 32
    fifth = fifth.swapaxes(-1, -2).reshape(*block.shape[:2], 256)
    return k_affine(block, runs_of_nibbles(block[..., 48:]) | fifth << 4, 5)


def read_q3_k(raw: np.ndarray) -> Packed:
    """w = d · scale · q with 6-bit scale − 32 and 3-bit q − 4: the product of both is the code."""
    block = blocks(raw, 110)
    shape = block.shape[:2]
    two = np.array([0, 2, 4, 6], np.uint8)[:, None]
    low = block[..., 32:96].reshape(*shape, 2, 1, 32) >> two & 3
    bit = np.arange(8, dtype=np.uint8).reshape(2, 4, 1)
    high = block[..., None, None, :32] >> bit & 1
    q = (low | high << 2).astype(np.int16).reshape(*shape, 16, 16) - 4
    packed = block[..., 96:108]
    scales = nibbles(packed[..., :8]).reshape(*shape, 4, 4)
    scales = scales | (packed[..., None, 8:] >> two & 3) << 4
    scales = scales.reshape(*shape, 16).astype(np.int16) - 32
    codes = (128 - scales[..., None] * q).astype(np.uint8).reshape(*shape, 256)
    d = float16_at(block, 108).repeat(2, axis=-1)  # two groups of 128 in a super-block
    return affine(codes, -d, 128 * d, 8)


def read_mxfp4(raw: np.ndarray) -> Packed:
    block = blocks(raw, 17)
    codes = nibbles(block[..., 1:]).reshape(len(raw), -1)
    return Packed(pack(codes, 4), np.ascontiguousarray(block[..., 0]), None)


def read_nvfp4(raw: np.ndarray) -> Packed:
    block = blocks(raw, 36)
    codes = nibbles(block[..., 4:].reshape(*block.shape[:2], 4, 8)).reshape(len(raw), -1)
    return Packed(pack(codes, 4), block[..., :4].reshape(len(raw), -1), None)


READERS = {
    "Q4_0": read_q4_0,
    "Q4_1": read_q4_1,
    "Q5_0": read_q5_0,
    "Q5_1": read_q5_1,
    "Q8_0": read_q8_0,
    "Q4_K": read_q4_k,
    "Q5_K": read_q5_k,
    "Q3_K": read_q3_k,
    "IQ4_NL": read_iq4_nl,
    "MXFP4": read_mxfp4,
    "NVFP4": read_nvfp4,
}


# Back. 8 bits with biases that are not −128 · scale, and 6 bits, have no exact block type.
SYMMETRIC = {4: ("Q4_0", 8), 5: ("Q5_0", 16), 8: ("Q8_0", 128)}
WITH_MINIMUM = {2: "Q4_1", 3: "Q4_1", 4: "Q4_1", 5: "Q5_1"}


def exact_type(scales: np.ndarray, biases: np.ndarray | None, packing: Packing) -> str | None:
    """The block type that holds an MLX weight exactly; None if there is none.

    Args:
        scales, biases: float32, of the whole weight; None in the float modes.
    """
    if packing.mode != "affine":
        return {"mxfp4": "MXFP4", "nvfp4": "NVFP4"}.get(packing.mode)
    if packing.group_size % 32 or not (in_float16(scales) and in_float16(biases)):
        return None
    if packing.bits in SYMMETRIC:
        kind, centre = SYMMETRIC[packing.bits]
        if np.array_equal(biases, -centre * scales):
            return kind
    return WITH_MINIMUM.get(packing.bits)


def in_float16(x: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        return np.array_equal(x.astype(np.float16).astype(np.float32), x)


def from_mlx(packed: Packed, packing: Packing, kind: str) -> np.ndarray:
    """MLX's arrays as raw blocks of ``exact_type``'s kind, [R, bytes] uint8."""
    rows = len(packed.weight)
    codes = unpack(packed.weight, packing.bits)
    if packing.mode == "mxfp4":
        parts = [packed.scales[..., None], join_nibbles(codes.reshape(rows, -1, 32))]
    elif packing.mode == "nvfp4":
        quarters = join_nibbles(codes.reshape(rows, -1, 16)).reshape(rows, -1, 32)
        parts = [packed.scales.reshape(rows, -1, 4), quarters]
    else:
        parts = affine_parts(codes.reshape(rows, -1, 32), packed, packing, kind)
    return np.concatenate(parts, axis=-1).reshape(rows, -1)


def affine_parts(codes: np.ndarray, packed: Packed, packing: Packing, kind: str) -> list:
    repeats = packing.group_size // 32
    numbers = [packed.scales] if kind.endswith("_0") else list(packed[1:])
    parts = [
        n.astype(np.float16).repeat(repeats, axis=-1)[..., None].view(np.uint8) for n in numbers
    ]
    if kind == "Q8_0":
        return [*parts, codes ^ 128]
    if kind.startswith("Q5"):
        parts.append(np.packbits(codes >> 4, axis=-1, bitorder="little"))
    return [*parts, join_nibbles(codes & 15)]


def join_nibbles(codes: np.ndarray) -> np.ndarray:
    low, high = np.split(codes, 2, axis=-1)
    return low | high << 4
