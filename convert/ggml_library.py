"""ggml's own quantizer for K-quants, where its library is installed."""

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from wiola_mlx.errors import WiolaError

from .tensors import row_bytes

PATTERNS = ("lib*/libggml-base.so*", "lib*/libggml-base*.dylib", "lib*/ggml-base.dll")


@cache
def find_library() -> ctypes.CDLL:
    """``libggml-base``, opened for this process alone.

    Raises:
        WiolaError: if it is not installed.
    """
    spec = find_spec("libggml")
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    found = [file for folder in folders for p in PATTERNS for file in sorted(folder.glob(p))]
    if not found:
        raise WiolaError(
            "K-quants are made by ggml's library, which is not installed: "
            "pip install 'wiola-mlx[ggml]' (or libggml-python)"
        )
    try:  # RTLD_LOCAL, ctypes' default: mlx has symbols of the same names
        library = ctypes.CDLL(str(found[0]))
        quantize = library.ggml_quantize_chunk
    except (OSError, AttributeError) as error:
        raise WiolaError(f"ggml's library {found[0]} cannot be used: {error}") from error
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    return library


def quantize_rows(x: np.ndarray, kind: str) -> np.ndarray:
    """float32 rows [R, C] to raw blocks [R, bytes] uint8."""
    from gguf import GGMLQuantizationType

    x = np.ascontiguousarray(x, np.float32)
    rows, columns = x.shape
    out = np.zeros((rows, row_bytes(kind, columns)), np.uint8)
    code = int(GGMLQuantizationType[kind])
    quantize = find_library().ggml_quantize_chunk
    if quantize(code, x.ctypes.data, out.ctypes.data, 0, rows, columns, None) != out.nbytes:
        raise WiolaError(f"ggml did not quantize to {kind}")
    return out
