"""Compiles a kernel's text with g++ against metal_emu.h, and runs it with every access checked."""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import mlx.core as mx
import numpy as np

from .errors import MetalError
from .source import (
    ATTRIBUTES,
    EXTRAS,
    Signature,
    attributes_of,
    dtype_name,
    share_threadgroup_variables,
)

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("METAL_EMULATOR_CACHE", HERE / ".cache"))
CXX = os.environ.get("CXX", "g++")
FLAGS = """-std=c++14 -O1 -g1 -fPIC -fsanitize=thread -fsanitize=undefined
 --param=tsan-instrument-func-entry-exit=0 -fno-threadsafe-statics -fno-gnu-unique
 -fsingle-precision-constant -ffp-contract=off -fexcess-precision=16 -fstack-reuse=none -mf16c
 -Wall -Wextra -Wshadow -Werror=uninitialized -Werror=maybe-uninitialized -Wno-attributes
 -Wno-unused -Wno-literal-suffix -Wno-unknown-pragmas -Wno-sign-compare -Wno-psabi""".split()
MOST_THREADS = 1024
INPUT, OUTPUT, OUTPUT_WITH_VALUE = 0, 1, 2  # kinds of buffers in metal_emu.h


def can_run() -> bool:
    return sys.platform == "linux" and platform.machine() == "x86_64" and bool(shutil.which(CXX))


def as_numpy(x) -> np.ndarray:
    if isinstance(x, mx.array) and x.dtype == mx.bfloat16:
        return np.array(x.view(mx.uint16)).view(ml_dtypes.bfloat16)
    if isinstance(x, (bool, int, float)):  # as MLX types a Python scalar
        return np.array(x, {bool: np.bool_, int: np.int32, float: np.float32}[type(x)])
    return np.asarray(x)


def as_mlx(x: np.ndarray) -> mx.array:
    if x.dtype == ml_dtypes.bfloat16:
        return mx.array(x.view(np.uint16)).view(mx.bfloat16)
    return mx.array(x)


class Buffer(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("bytes", ctypes.c_uint64),
        ("elem", ctypes.c_uint64),
        ("kind", ctypes.c_uint64),
    )


class Grid(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("tg", ctypes.c_uint32 * 3),
        ("groups", ctypes.c_uint32 * 3),
        ("order", ctypes.c_uint32),
        ("lenient", ctypes.c_uint32),
    )


class MetalKernel:
    """Takes the arguments of mx.fast.metal_kernel; is called like what that returns."""

    def __init__(
        self,
        name,
        input_names,
        output_names,
        source,
        header="",
        ensure_row_contiguous=True,
        atomic_outputs=False,
        compile_options=None,
    ):
        self.name, self.source, self.header = name, source, header
        self.input_names, self.output_names = input_names, output_names
        self.contiguous, self.atomic = ensure_row_contiguous, atomic_outputs
        self.attributes = attributes_of(source)
        self.extras = {n: [e for e in EXTRAS if f"{n}_{e}" in source] for n in input_names}

    def compose(self, inputs, output_dtypes, template=None) -> str:
        """MLX's text for a call."""
        names = [dtype_name(d) for d in output_dtypes]
        signature = Signature(self, [as_numpy(x) for x in inputs], names, list(template or []))
        return signature.compose(self.header, self.source)

    def build(self, inputs, output_dtypes, template):
        """The compiled kernel: a library and its path."""
        signature = Signature(self, inputs, output_dtypes, template)
        arguments = [
            f"{'*' if reference == '&' else ''}({qualifiers}{kind} *)b[{i}]"
            for i, (qualifiers, kind, reference, _) in enumerate(signature.parameters)
        ]
        for attribute in self.attributes:
            kind, value = ATTRIBUTES[attribute]
            vector = f"uint3({value}[0], {value}[1], {value}[2])"
            arguments.append(vector if kind == "uint3" else value)
        header = share_threadgroup_variables(self.header, header=True)
        body = share_threadgroup_variables(self.source)
        text = '#include "metal_emu.h"\n' + signature.compose(
            f'#line 1 "header"\n{header}\n#line 1 "signature"\n', f'#line 1 "source"\n{body}'
        )
        text += '#line 1 "driver"\nextern "C" void emu_entry(void **b, const EmuThread &t, '
        text += "const EmuGrid &g) {\n  const uint32_t zero[3] = {};\n"
        text += f"  {signature.instance}(\n    " + ",\n    ".join(arguments) + ");\n}\n"
        return load(text)

    def __call__(
        self,
        *,
        inputs,
        output_shapes,
        output_dtypes,
        grid,
        threadgroup,
        template=None,
        init_value=None,
        stream=None,
        order=0,
        lenient=False,
        seconds=60.0,
    ) -> list[np.ndarray]:
        """Runs the kernel.

        Args:
            order: 0 runs threads and threadgroups upwards, 1 downwards, more: in a random order.
            lenient: several threads may write one element (the same value, one hopes).
            seconds: the time after which a kernel counts as endless.

        Raises:
            MetalError: for any fault, with the line of the source.
        """
        inputs = [as_numpy(x) for x in inputs]
        names = [dtype_name(d) for d in output_dtypes]
        if len(inputs) != len(self.input_names):
            raise ValueError("wrong number of inputs")
        if not len(names) == len(output_shapes) == len(self.output_names):
            raise ValueError("wrong number of outputs")
        if np.prod(threadgroup) > MOST_THREADS:
            raise MetalError(f"threadgroup of {np.prod(threadgroup)} threads, the limit is 1024")
        library, path = self.build(inputs, names, list(template or []))
        buffers, keep = [], []

        def add(array, name, kind):
            keep.append((array, name.encode()))
            data = array.ctypes.data
            buffers.append(Buffer(data, keep[-1][1], array.nbytes, array.itemsize, kind))

        for name, x in zip(self.input_names, inputs, strict=True):
            span = x
            if self.contiguous:
                x = span = np.ascontiguousarray(x).reshape(x.shape)  # the latter for 0-d arrays
            elif x.size:  # all the memory between the first and the last element
                steps = zip(x.shape, x.strides, strict=True)
                count = 1 + sum((size - 1) * stride // x.itemsize for size, stride in steps)
                span = np.lib.stride_tricks.as_strided(x, (count,), (x.itemsize,))
            add(span, name, INPUT)
            extra = dict(
                shape=np.array(x.shape, np.int32),
                ndim=np.array(x.ndim, np.int32),
                strides=np.array([s // x.itemsize for s in x.strides], np.int64),
            )
            for e in self.extras[name] if x.ndim else ():
                add(extra[e], f"{name}_{e}", INPUT)
        outputs = [
            np.full(s, init_value or 0, ml_dtypes.bfloat16 if d == "bfloat16" else d)
            for s, d in zip(output_shapes, names, strict=True)
        ]
        for name, output in zip(self.output_names, outputs, strict=True):
            add(output, name, OUTPUT if init_value is None else OUTPUT_WITH_VALUE)

        size = [min(a, b) for a, b in zip(threadgroup, grid, strict=True)]
        groups = [-(-a // b) for a, b in zip(grid, size, strict=True)]
        triple = ctypes.c_uint32 * 3
        launch = Grid(triple(*grid), triple(*size), triple(*groups), order, lenient)
        error = ctypes.create_string_buffer(1000)
        array = (Buffer * len(buffers))(*buffers)
        limit = ctypes.c_double(seconds)
        if library.emu_run(ctypes.byref(launch), len(buffers), array, error, 1000, limit):
            raise MetalError(with_lines(error.value.decode(), path))
        return outputs


def run(command) -> tuple[int, str]:
    result = subprocess.run(command, capture_output=True, text=True)
    return result.returncode, result.stderr + result.stdout


def build_file(path: Path, command, fault) -> Path:
    """Runs command + [the output], by way of a temporary name: several tests may build at once."""
    if not path.exists():
        part = path.with_name(f"{os.getpid()}_{path.name}")
        code, message = run([*command, "-o", str(part)])
        if code:
            raise fault("does not compile:\n" + message)
        part.replace(path)
    return path


def load(text: str):
    """Compiles, or finds in the cache. Returns the library and its path."""
    CACHE.mkdir(exist_ok=True, parents=True)
    for header in ("metal_stdlib", "metal_simdgroup", "metal_math", "metal_atomic"):
        (CACHE / header).touch()  # a kernel's header may include these
    shim = HERE / "metal_emu.h"

    def key(*parts) -> str:
        return hashlib.sha256(" ".join([shim.read_text(), CXX, *parts]).encode()).hexdigest()[:20]

    runtime = build_file(
        CACHE / f"runtime_{key()}.o",
        [CXX, *"-std=c++17 -O2 -fPIC -DEMU_RUNTIME -x c++ -c".split(), str(shim)],
        RuntimeError,
    )
    name = CACHE / key(text, *FLAGS)
    name.with_suffix(".cpp").write_text(text)
    include = [f"-I{HERE}", f"-I{CACHE}"]
    compiled = build_file(
        name.with_suffix(".o"), [CXX, *FLAGS, *include, "-c", f"{name}.cpp"], MetalError
    )
    link = [CXX, "-shared", "-Wl,-Bsymbolic", str(compiled), str(runtime)]
    library = build_file(name.with_suffix(".so"), link, RuntimeError)
    return ctypes.CDLL(str(library)), library


def with_lines(message: str, library: Path) -> str:
    """Puts source lines in the place of the addresses (@1a2b) in a message."""

    def line(match):
        out = run(["addr2line", "-i", "-e", str(library), "0x" + match[1]])[1].split("\n")
        best = next((x for x in out if re.search(r"(source|header):\d", x)), out[0])
        return "at " + os.path.basename(best).split(" ")[0]

    return re.sub(r"@([0-9a-f]+)", line, message)
