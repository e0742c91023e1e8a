"""The exact maps: random non-zero blocks of every type, against gguf-py and MLX."""

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from wiola_mlx.convert import blocks, floats
from wiola_mlx.convert.blocks import PACKINGS, Packed, Packing

ROWS, COLUMNS = 24, 768
FLOAT16_AT = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q3_K": (108,)}
FLOAT16_AT |= dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL"), (0,))


def random_blocks(kind: str, seed: int = 0) -> np.ndarray:
    """Random bytes, but scales of usual sizes and both signs, none of them zero."""
    rng = np.random.default_rng(seed)
    values, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (ROWS, COLUMNS // values * size), dtype=np.uint8)
    block = raw.reshape(ROWS, -1, size)
    for start in FLOAT16_AT.get(kind, ()):
        scale = rng.standard_normal(block.shape[:2]).astype(np.float16)
        scale[scale == 0] = 1
        block[..., start : start + 2] = scale[..., None].view(np.uint8)
    if kind == "MXFP4":
        block[..., 0] = rng.integers(100, 150, block.shape[:2])
    if kind == "NVFP4":
        block[..., :4] = rng.integers(1, 127, (*block.shape[:2], 4))
    return raw


@pytest.mark.parametrize("kind", PACKINGS)
def test_packed_blocks_equal_ggufs_own_dequantization(kind):
    raw, packing = random_blocks(kind), PACKINGS[kind]
    expected = gguf.dequantize(raw, GGMLQuantizationType[kind])
    assert np.count_nonzero(expected) > expected.size / 2
    packed = blocks.to_mlx(raw, kind)
    assert np.array_equal(blocks.packed_to_float32(packed, packing), expected)
    in_mlx = mx.dequantize(
        *(mx.array(a) for a in packed if a is not None),
        group_size=packing.group_size,
        bits=packing.bits,
        mode=packing.mode,
        dtype=mx.float32,
    )
    assert np.array_equal(np.array(in_mlx), expected)


@pytest.mark.parametrize("kind", sorted(set(PACKINGS) - {"Q4_K", "Q5_K", "MXFP4", "NVFP4"}))
def test_scales_of_all_but_k_quants_fit_float16(kind):
    packed = blocks.to_mlx(random_blocks(kind), kind)
    assert blocks.in_float16(packed.scales) and blocks.in_float16(packed.biases)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "NVFP4"])
def test_the_way_back_gives_the_same_bytes(kind):
    raw, packing = random_blocks(kind), PACKINGS[kind]
    packed = blocks.to_mlx(raw, kind)
    assert blocks.exact_type(packed.scales, packed.biases, packing) == kind
    assert np.array_equal(blocks.from_mlx(packed, packing, kind), raw)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits, kind", [(2, "Q4_1"), (3, "Q4_1"), (4, "Q4_1"), (5, "Q5_1")])
def test_mlx_weights_become_blocks_exactly(bits, kind, group_size, dtype):
    w = mx.random.normal((ROWS, COLUMNS), key=mx.random.key(bits)).astype(dtype)
    q, s, b = mx.quantize(w, group_size=group_size, bits=bits)
    packed = Packed(np.array(q), *(np.array(x.astype(mx.float32)) for x in (s, b)))
    packing = Packing(bits, group_size)
    assert blocks.exact_type(packed.scales, packed.biases, packing) == kind
    raw = blocks.from_mlx(packed, packing, kind)
    expected = blocks.packed_to_float32(packed, packing)
    assert np.array_equal(gguf.dequantize(raw, GGMLQuantizationType[kind]), expected)
    assert (packed.scales < 0).any()  # ggml takes negative scales as well


@pytest.mark.parametrize("bits", [6, 8])
def test_what_has_no_exact_type_is_said_to_have_none(bits):
    q, s, b = mx.quantize(mx.random.normal((4, 128)).astype(mx.float16), bits=bits)
    packed = Packed(np.array(q), *(np.array(x.astype(mx.float32)) for x in (s, b)))
    assert blocks.exact_type(packed.scales, packed.biases, Packing(bits, 64)) is None
    four = Packing(4, 64)
    assert blocks.exact_type(packed.scales + 1e-7, packed.biases, four) is None  # no float16


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_packing_is_mlxs(bits):
    q, s, b = mx.quantize(mx.random.normal((ROWS, COLUMNS)), group_size=32, bits=bits)
    packed = Packed(*map(np.array, (q, s, b)))
    codes = blocks.unpack(packed.weight, bits)
    assert codes.max() == 2**bits - 1
    assert np.array_equal(blocks.pack(codes, bits), packed.weight)
    expected = np.array(mx.dequantize(q, s, b, group_size=32, bits=bits))
    assert np.array_equal(blocks.packed_to_float32(packed, Packing(bits, 32)), expected)


@pytest.mark.parametrize(
    "mode, packing", [("mxfp4", (4, 32)), ("nvfp4", (4, 16)), ("mxfp8", (8, 32))]
)
def test_float_modes_are_mlxs(mode, packing):
    q, s = mx.quantize(mx.random.normal((ROWS, COLUMNS)), mode=mode)
    expected = np.array(mx.dequantize(q, s, mode=mode, dtype=mx.float32))
    packed = Packed(np.array(q), np.array(s), None)
    assert np.array_equal(blocks.packed_to_float32(packed, Packing(*packing, mode)), expected)


def every_kind_of_float() -> np.ndarray:
    """Random bits, every float16, the points halfway between them, and the neighbours of these."""
    rng = np.random.default_rng(0)
    half = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    half = half[np.isfinite(half)]
    middle = ((half[:-1].astype(np.float64) + half[1:]) / 2).astype(np.float32)
    around = [np.nextafter(middle, np.float32(x)) for x in (-np.inf, np.inf)]
    bits = rng.integers(0, 1 << 32, 1 << 18, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = np.concatenate([bits, half, middle, *around])
    return x[np.isfinite(x)]


def test_rounding_to_float16_is_numpys():
    x = every_kind_of_float()
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    assert np.array_equal(floats.to_float16(x).view(np.uint16), expected.view(np.uint16))


def test_rounding_to_bfloat16_is_mlxs_and_goes_past_float16():
    x = every_kind_of_float()
    expected = np.array(mx.array(x).astype(mx.bfloat16).view(mx.uint16))
    assert np.array_equal(floats.to_bfloat16(x), expected)
    assert floats.from_bfloat16(floats.to_bfloat16(np.array([1e5, 3e38], np.float32)))[1] > 2e38
