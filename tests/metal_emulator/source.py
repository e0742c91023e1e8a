"""The text that MLX 0.32 makes of a kernel, to the letter; and the emulator's reading of it."""

import re

import numpy as np

from .errors import MetalError

TYPES = dict(
    float32="float",
    float16="float16_t",
    bfloat16="bfloat16_t",
    bool="bool",
    bool_="bool",
    **{f"{u}int{n}": f"{u}int{n}_t" for u in ("", "u") for n in (8, 16, 32, 64)},
)
SIMDGROUPS_OF = "({0}[0]*{0}[1]*{0}[2]+{1})/{2}"
ATTRIBUTES = dict(  # in MLX's order: type, and the emulator's value
    dispatch_quadgroups_per_threadgroup=("uint", SIMDGROUPS_OF.format("g.tg", 3, 4)),
    dispatch_simdgroups_per_threadgroup=("uint", SIMDGROUPS_OF.format("g.tg", 31, 32)),
    dispatch_threads_per_threadgroup=("uint3", "g.tg"),
    grid_origin=("uint3", "zero"),
    grid_size=("uint3", "g.grid"),
    quadgroup_index_in_threadgroup=("uint", "t.index/4"),
    quadgroups_per_threadgroup=("uint", SIMDGROUPS_OF.format("t.tgsize", 3, 4)),
    simdgroup_index_in_threadgroup=("uint", "t.sg"),
    simdgroups_per_threadgroup=("uint", "t.nsg"),
    thread_execution_width=("uint", "32"),
    thread_index_in_quadgroup=("uint", "t.index%4"),
    thread_index_in_simdgroup=("uint", "t.lane"),
    thread_index_in_threadgroup=("uint", "t.index"),
    thread_position_in_grid=("uint3", "t.gpos"),
    thread_position_in_threadgroup=("uint3", "t.tpos"),
    threadgroup_position_in_grid=("uint3", "t.group"),
    threadgroups_per_grid=("uint3", "g.groups"),
    threads_per_grid=("uint3", "g.grid"),
    threads_per_simdgroup=("uint", "32"),
    threads_per_threadgroup=("uint3", "t.tgsize"),
)
EXTRAS = ("shape", "strides", "ndim")


def dtype_name(dtype) -> str:
    return str(dtype).split(".")[-1] if "mlx" in str(dtype) else np.dtype(dtype).name


def cxx_value(value) -> str:
    """A template value as C++ writes it."""
    return str(int(value)) if isinstance(value, (bool, int)) else TYPES[dtype_name(value)]


def value_kind(value) -> str:
    if isinstance(value, bool):
        return "bool"
    return "int" if isinstance(value, int) else "typename"


class Signature:
    """What MLX adds around a kernel's body, for given inputs, outputs and template values.

    Attributes:
        function: the name, which holds all that MLX puts into it.
        parameters: in order [(qualifiers, C++ type, "*" or "&", name)].
        template: [(name, value)].
    """

    def __init__(self, kernel, inputs, output_dtypes, template):
        self.kernel, self.template = kernel, template
        self.parameters = []
        for name, x in zip(kernel.input_names, inputs, strict=True):
            space = "constant" if x.size < 8 else "device"
            reference = "*" if x.ndim else "&"
            self.parameters.append((f"const {space} ", TYPES[x.dtype.name], reference, name))
            for extra in kernel.extras[name] if x.ndim else ():
                kind = "int64_t" if extra == "strides" else "int"
                reference = "&" if extra == "ndim" else "*"
                self.parameters.append(("const constant ", kind, reference, f"{name}_{extra}"))
        for name, dtype in zip(kernel.output_names, output_dtypes, strict=True):
            kind = f"atomic<{TYPES[dtype]}>" if kernel.atomic else TYPES[dtype]
            self.parameters.append(("device ", kind, "*", name))

        self.arguments = [cxx_value(value) for _, value in template]
        self.function = "custom_kernel_" + kernel.name
        if template:  # MLX < 0.32.4 leaves a minus in
            self.function += "__" + "_".join(self.arguments).replace("-", "_")
        for x in inputs:
            small = "s" if x.ndim == 0 else "c" if x.size < 8 else ""
            self.function += "_" + TYPES[x.dtype.name] + small
        self.function += "".join("_" + TYPES[dtype] for dtype in output_dtypes)

    @property
    def instance(self) -> str:
        arguments = ", ".join(self.arguments)
        return f"{self.function}<{arguments}>" if arguments else self.function

    def compose(self, header: str, body: str) -> str:
        """MLX's text around a header and a body."""
        text = header
        if self.template:
            kinds = (f"{value_kind(value)} {name}" for name, value in self.template)
            text += f"template <{', '.join(kinds)}>\n"
        lines = [
            f"  {qualifiers}{kind}{reference} {name} [[buffer({i})]]"
            for i, (qualifiers, kind, reference, name) in enumerate(self.parameters)
        ]
        lines += [f"  {ATTRIBUTES[a][0]} {a} [[{a}]]" for a in self.kernel.attributes]
        text += f"[[kernel]] void {self.function}(\n" + ",\n".join(lines) + ") {\n"
        text += body + "\n}\n"
        if self.template:
            host = f'[[host_name("{self.function}")]] [[kernel]]'
            text += f"\ntemplate {host} decltype({self.instance}) {self.instance};\n"
        return text


def attributes_of(source: str) -> list[str]:
    found = [a for a in ATTRIBUTES if a in source]
    if {"thread_execution_width", "threads_per_simdgroup"} <= set(found):
        raise MetalError("Metal forbids thread_execution_width with threads_per_simdgroup")
    return found


def share_threadgroup_variables(text: str, header: bool = False) -> str:
    """Turns `threadgroup float x[4];` into memory that the threads of a threadgroup share."""

    def blank(match):
        return re.sub(r"[^\n]", " ", match[0])

    text = re.sub(r"//[^\n]*|/\*.*?\*/", blank, text, flags=re.S)

    def declare(match):
        before = text[: match.start()].rstrip()
        plain = re.sub(r"\[[^\]]*\]", "", match[1])
        if re.search(r"[*&=(]", plain) or before[-1:] not in ("", ";", "{", "}"):
            return match[0]  # a pointer, or a parameter
        if header or before.count("{") > before.count("}"):
            raise MetalError(f"threadgroup variable not in the outermost scope: {match[0]}")
        parts = re.split(r",(?![^<\[]*[>\]])", match[1])
        first = re.match(r"(.*[\w>]\s+)(\w+\s*(?:\[.*)?)$", parts[0].strip(), re.S)
        kind, parts[0] = first[1].strip(), first[2]
        out = ""
        for part in parts:
            name, sizes = re.match(r"\s*(\w+)\s*(.*)", part, re.S).groups()
            memory = f'emu_tg(sizeof({kind} {sizes}), sizeof({kind}), "{name}")'
            out += f"static auto &{name} = *({kind} (*){sizes}){memory}; "
        return out + "\n" * match[0].count("\n")

    return re.sub(r"\bthreadgroup\s+([^;]*);", declare, text)
