"""Has clang's C++ for OpenCL look at a kernel: address spaces, conversions, overloads."""

import functools
import hashlib
import shutil

from .emulator import CACHE, HERE, as_numpy, run
from .errors import MetalError
from .source import ATTRIBUTES, TYPES, Signature, dtype_name, value_kind

OLDEST_CLANG = 17  # the first to compute with __bf16
FLAGS = """-x cl -cl-std=clc++2021 -cl-no-stdinc -cl-single-precision-constant
 -Xclang -cl-ext=-all,+cl_khr_fp16 -fsyntax-only -Wall -Wextra -Wconversion -Wno-sign-conversion
 -Wno-implicit-int-float-conversion -Wno-implicit-int-conversion -Wno-shorten-64-to-32
 -Wno-implicit-float-conversion -Wno-unused -Wno-sign-compare -Wno-undefined-inline
 -Wno-undefined-internal -Wno-unknown-pragmas -Wconditional-uninitialized""".split()


@functools.cache
def find_clang() -> str | None:
    """A clang that is new enough, or None."""
    for name in ("clang", *(f"clang-{n}" for n in range(30, OLDEST_CLANG - 1, -1))):
        path = shutil.which(name)
        version = run([path, "-dumpversion"])[1].split(".")[0] if path else ""
        if version.isdigit() and int(version) >= OLDEST_CLANG:
            return path
    return None


def static_check(kernel, *, inputs, output_dtypes, template=None, **_call) -> str:
    """What clang says of a kernel called with these arguments; "" if nothing.

    Raises:
        MetalError: for what clang calls an error.
    """
    template = list(template or [])
    names = [dtype_name(d) for d in output_dtypes]
    signature = Signature(kernel, [as_numpy(x) for x in inputs], names, template)
    text = f'#include "{HERE}/metal_static.h"\n#line 1 "header"\n{kernel.header}\n'
    text += f'#line 1 "driver"\nkernel void {kernel.name}() {{\n'
    for name, value in template:
        kind = value_kind(value)
        if kind == "typename":
            text += f"typedef {TYPES[dtype_name(value)]} {name};\n"
        else:
            text += f"constexpr {kind} {name} = {int(value)};\n"
    for qualifiers, kind, reference, name in signature.parameters:
        value = f"{'*' if reference == '&' else ''}emu_arg<{qualifiers}{kind} *>()"
        text += f"{qualifiers}{kind} {reference}{name} = {value};\n"
    for attribute in kernel.attributes:
        kind = ATTRIBUTES[attribute][0]
        text += f"{kind} {attribute} = emu_arg<{kind}>();\n"
    text += '{\n}\n#line 1 "source"\n' + kernel.source + "\n}\n"
    CACHE.mkdir(exist_ok=True, parents=True)
    path = CACHE / f"static_{hashlib.sha256(text.encode()).hexdigest()[:20]}.cl"
    path.write_text(text)
    code, message = run([find_clang(), *FLAGS, "-I", str(CACHE), str(path)])
    if code:
        raise MetalError("clang:\n" + message)
    return message
