"""The Metal kernels' own text against the plain operations, on Linux in the emulator."""

import re

import kernel_cases
import mlx.core as mx
import pytest
from kernel_cases import BOUNDS, Case, arguments, by_kernel, covering_cases, errors, full_grid
from metal_emulator import MetalKernel, find_clang, static_check

from wiola_mlx.models import gated_attention
from wiola_mlx.models import gated_attention_kernels as kernels

VARIANTS = {
    "decode": kernels.decode_kernel(True),
    "decode, no gate": kernels.decode_kernel(False),
    "prologue": kernels.prologue_kernel(True),
    "rotation": kernels.prologue_kernel(False),
}


@pytest.mark.parametrize("case", covering_cases(), ids=str)
def test_kernel_equals_the_reference(emulated, case):
    for name, difference in errors(case).items():
        assert difference <= BOUNDS[case.dtype], name
    assert len(emulated.calls) == 2  # the trial on zeros, and this


class Tried(dict):
    """Every variant of a kernel counts as tried."""

    def __contains__(self, _):
        return True


@pytest.mark.slow
@pytest.mark.parametrize("case", full_grid(), ids=str)
def test_kernel_equals_the_reference_on_the_full_grid(emulated, monkeypatch, case):
    monkeypatch.setattr(gated_attention, "_runs", Tried())
    emulated.order = (0, 1, 9)[(case.B + case.H + case.T + case.cached) % 3]
    for name, difference in errors(case).items():
        assert difference <= BOUNDS[case.dtype], name


SMALL = [
    Case(B=3, D=64, cached=70),
    Case(B=3, D=80, cached=35, gate="after", padding=(0, 4, 9)),
    Case(B=2, D=32, cached=35, gate=None),
    Case(B=3, D=48, T=40, cached=3, padding=(0, 4, 9)),
    Case(B=2, D=32, T=9, gate=None),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_the_order_of_the_threads_changes_no_bit(emulated, case):
    given, results = arguments(case), []
    for order in (0, 1, 9, 77):
        emulated.order = order
        results.append(by_kernel(case, given))
    for other in results[1:]:
        for name, expected in results[0].items():
            assert mx.array_equal(other[name], expected), name


@pytest.mark.parametrize("case", SMALL[:4], ids=str)
def test_what_lies_in_pads_and_unused_room_is_never_read(emulated, case):
    """Unused room is NaN in all cases; here the pads are, too."""
    given = arguments(case)
    expected = by_kernel(case, given)
    for row, pads in enumerate(case.padding or ()):
        for part in given["cache"].caches:
            part.keys[row, :, :pads] = float("nan")
            part.values[row, :, :pads] = float("nan")
        given["queries"][row, : max(pads - case.cached, 0)] = float("nan")
    actual = by_kernel(case, given)
    for name, array in expected.items():
        a, e = (kernel_cases.without_pads(case, name, x) for x in (actual[name], array))
        assert kernel_cases.error(a, e) == 0, name


TG = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SG = "simdgroup_barrier(mem_flags::mem_threadgroup);"
FULL, ROOM = Case(cached=256), Case(D=64, cached=77)
PADDED = Case(B=3, D=64, cached=30, padding=(0, 4, 9))
LONG, LONG_PADDED = Case(B=2, D=64, T=77, cached=5), Case(B=3, T=40, padding=(0, 4, 9))
AFTER, LONG_AFTER = Case(cached=9, gate="after"), Case(T=9, cached=3, gate="after")
BF16, NARROW = Case(dtype=mx.bfloat16), Case(H=1, D=80, cached=256)
LATE = Case(B=3, T=4, cached=4, padding=(0, 4, 5))
BUGS = [  # variant, what, case, old, new, which occurrence, how it shows
    *[("decode", f"barrier {i} missing", ROOM, TG, "", i, "race|uninit") for i in range(3)],
    *[("prologue", f"barrier {i} missing", LONG, TG, "", i, "race|uninit") for i in range(4)],
    ("prologue", "simdgroup barrier missing", LONG, SG, "", 0, "race"),
    ("decode", "other memory", ROOM, "mem_threadgroup);", "mem_device);", 0, "race|uninit"),
    ("decode", "one key too many, full", FULL, "i < used", "i <= used", 0, "out of bounds"),
    ("decode", "one key too many, room", ROOM, "i < used", "i <= used", 0, "wrong"),
    ("decode", "first key skipped", ROOM, ", 0) + sg", ", 0) + sg + 1", 0, "wrong"),
    ("decode", "pads attended", PADDED, "metal::max(used - position, 0)", "0", 0, "wrong"),
    ("decode", "own key forgotten", ROOM, "sg == 0 ? own : LOWEST", "LOWEST", 0, "wrong"),
    ("decode", "rotation sign", ROOM, "q0 * c - q1 * s", "q0 * c + q1 * s", 0, "wrong"),
    ("decode", "k half stored", ROOM, "k_out[at + HALF] = r1;", "", 0, "unwritten"),
    ("decode", "last sum one too far", ROOM, "used - 1)", "used)", 0, "wrong"),
    ("decode", "sums' halves exchanged", ROOM, "sums_low[last]", "sums_high[last]", 0, "wrong"),
    ("decode", "count off by one", ROOM, "position + 1, 1", "position, 1", 0, "wrong"),
    ("decode", "gate before for after", AFTER, "if (!PRE)", "if (PRE)", 0, "wrong"),
    ("decode", "every threadgroup writes sums", ROOM, "if (h == 0)", "if (true)", 0, "race"),
    ("decode", "simd_max for simd_sum", ROOM, "simd_sum(score)", "simd_max(score)", 0, "wrong"),
    ("decode", "sum of lanes missing", ROOM, "simd_sum(score)", "score", 0, "wrong"),
    ("decode", "simd operation in a branch", ROOM, "score = simd_sum",
     "if (lane < 9) score = simd_sum", 0, "divergence"),
    ("decode", "barrier in a branch", ROOM, TG, "if (sg < 2) " + TG, 1, "divergence|uninit"),
    ("decode", "return before a barrier", Case(cached=3), "float z",
     "if (sg > 5) { return; } float z", 0, "divergence"),
    ("decode", "no rescaling", ROOM, "acc[j] * old", "acc[j]", 0, "wrong"),
    ("decode", "threadgroup array too small", ROOM, "hidden[H]", "hidden[H - 1]", 0, "undefined"),
    ("decode", "write past an array", ROOM, "part_out[sg * D", "part_out[(sg + 1) * D", 0,
     "undefined|out of bounds"),
    ("decode", "a simdgroup not combined", ROOM, "i < NSG; i++", "i < NSG - 1; i++", 2, "wrong"),
    ("decode", "an element never written", ROOM, "d < D; d += NSG * 32",
     "d < D - 1; d += NSG * 32", 0, "unwritten"),
    ("decode", "no bound for odd head sizes", NARROW, "score += d < D ?", "score += true ?", 0,
     "out of bounds"),
    ("decode", "too much memory", ROOM, "part_out[NSG * D]", "part_out[9000]", 0,
     "threadgroup memory"),
    ("decode", "misaligned vector", ROOM, "m0 += sums_low[last];",
     "m0 += ((const device float4*)(w1 + 1))[0].x;", 0, "misaligned"),
    ("decode", "no cast into bfloat", BF16, "static_cast<T>(o /", "(o /", 0, "compile"),
    ("decode", "double", ROOM, "float total = ", "double total = ", 0, "compile"),
    ("decode", "endless loop", ROOM, "used; i += NSG", "used; i += 0", 0, "time limit"),
    ("decode", "uninitialized memory", ROOM, "context[i + HALF] = m1 / count;", "", 0, "uninit"),
    ("prologue", "tile's edge forgotten", LONG, "metal::min(TILE, length - t0)", "TILE", 0,
     "out of bounds|race"),
    ("prologue", "sum of the wrong lane", LONG, "ushort(n - 1)", "ushort(n / 2)", 0, "wrong"),
    ("prologue", "exclusive sum", LONG, "prefix_inclusive", "prefix_exclusive", 0, "wrong"),
    ("prologue", "carry dropped", LONG, "carry[d] + simd", "simd", 0, "wrong"),
    ("prologue", "pads summed", LONG_PADDED, "t < n && position >= 0", "t < n", 0, "wrong"),
    ("prologue", "previous sum of pads", LATE, "begin > 0 &&", "", 0, "wrong"),
    ("prologue", "mean not rotated", LONG_AFTER, "if (!PRE)", "if (PRE)", 0, "wrong"),
    ("prologue", "layouts exchanged", LONG, "q[from]", "q[to]", 0, "wrong"),
    ("rotation", "heads and rows exchanged", Case(B=3, T=4, gate=None), "z % H", "z / H", 0,
     "race|wrong|unwritten"),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug[0]}: {bug[1]}")
@pytest.mark.filterwarnings("ignore:Metal kernel")
def test_an_injected_bug_is_caught(emulated, monkeypatch, bug):
    variant, _, case, old, new, nth, how = bug
    right = VARIANTS[variant]
    at = [m.start() for m in re.finditer(re.escape(old), right["source"])][nth]
    source = right["source"][:at] + new + right["source"][at + len(old) :]
    for name in ("decode_kernel", "prologue_kernel"):
        monkeypatch.setattr(kernels, name, lambda gated: {**right, "source": source})
    emulated.seconds = 3 if how == "time limit" else 60
    try:
        worst = max(errors(case).values())
        shown = "wrong" if worst > BOUNDS[case.dtype] else f"not seen: error {worst:.1e}"
    except AssertionError:
        shown = str(emulated.fault)
    assert re.search(how, shown.split("\n")[0]), shown


def test_bugs_of_many_kinds_are_tried():
    assert len(BUGS) >= 20


def call_of(case: Case) -> tuple[MetalKernel, dict]:
    """The kernel and the options of a case's call."""
    calls = []

    def stand_in(**arguments):
        return lambda **options: calls.append((MetalKernel(**arguments), options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "metal_kernel", stand_in)
        patch.setattr(kernels, "on_metal", lambda: True)
        patch.setattr(gated_attention, "_kernels", {})
        given = arguments(case)
        names = ("queries", "keys", "values", "rope", "gate", "cache")
        inputs = gated_attention.kernel_inputs(*(given[name] for name in names))
        patch.setattr(mx, "eval", lambda *_: None)
        gated_attention.launch(inputs, given["gate_pre_rope"])
    return calls[-1]


CALLS = [
    Case(H=H, D=D, T=T, cached=5, dtype=dtype, gate=gate)
    for dtype in BOUNDS
    for T in (1, 9)
    for gate, H, D in (("before", 8, 32), ("after", 5, 48), (None, 12, 128))
]


@pytest.mark.parametrize("case", CALLS, ids=str)
def test_clang_finds_nothing(case):
    if not find_clang():
        pytest.skip("the static check needs clang 17 or newer: apt-get install clang-19")
    kernel, options = call_of(case)
    assert static_check(kernel, **options) == ""


def test_clang_would_find_something():
    if not find_clang():
        pytest.skip("the static check needs clang 17 or newer: apt-get install clang-19")
    kernel, options = call_of(CALLS[0])
    kernel.source = kernel.source.replace("simd_sum(score)", "simd_sum(scores)")
    with pytest.raises(Exception, match="scores"):
        static_check(kernel, **options)


def test_issue_L1_distinct_sources_have_distinct_names():
    """MLX adds template values and the dtypes of inputs; the rest is ours to name."""
    names = [variant["name"] for variant in VARIANTS.values()]
    sources = [variant["source"] for variant in VARIANTS.values()]
    assert len(set(names)) == len(set(sources)) == 4
    composed = {}
    for case in [*CALLS, *(Case(D=64, cached=5, gate=g) for g in ("before", "after"))]:
        kernel, options = call_of(case)
        text = kernel.compose(*(options[x] for x in ("inputs", "output_dtypes", "template")))
        name = re.search(r"void (\w+)\(", text)[1]
        assert composed.setdefault(name, text) == text
        assert name.count("wiola") == 1


@pytest.mark.parametrize("case", [*CALLS, Case(H=40, D=128), Case(H=40, T=5)], ids=str)
def test_issue_L2_threadgroups_fit_every_gpu(case):
    _, options = call_of(case)
    x, y, z = options["threadgroup"]
    assert x * y * z <= 256
    assert all(g > 0 for g in options["grid"])


STRIDED = {
    "every second": lambda x: mx.repeat(x, 2, axis=1)[:, ::2],
    "transposed": lambda x: mx.contiguous(x.swapaxes(0, 3)).swapaxes(0, 3),
    "reversed": lambda x: mx.contiguous(x[:, :, ::-1])[:, :, ::-1],
    "broadcast": lambda x: mx.broadcast_to(x[:1], x.shape),
}


@pytest.mark.parametrize("how", STRIDED)
@pytest.mark.parametrize("case", [SMALL[0], SMALL[3]], ids=str)
def test_issue_L2_strided_inputs(emulated, case, how):
    given = arguments(case)
    for name in ("queries", "keys", "values"):
        given[name] = STRIDED[how](given[name])
    kv = given["cache"][0]
    kv.keys = mx.contiguous(kv.keys.swapaxes(1, 2)).swapaxes(1, 2)
    assert max(errors(case, given).values()) <= BOUNDS[case.dtype]


@pytest.mark.metal
@pytest.mark.skipif(not kernels.on_metal(), reason="needs a Mac's GPU")
@pytest.mark.parametrize("case", covering_cases(), ids=str)
def test_kernel_equals_the_reference_on_a_mac(case):
    for name, difference in errors(case).items():
        assert difference <= BOUNDS[case.dtype], name
