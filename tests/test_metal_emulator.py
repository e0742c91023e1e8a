"""The emulator itself: the text it makes is MLX's, and what is right in Metal passes."""

import metal_emulator.source
import mlx.core as mx
import numpy as np
import pytest
from conftest import needs_emulator
from metal_emulator import MetalError, MetalKernel

ALL = " ".join(a for a in metal_emulator.source.ATTRIBUTES if a != "thread_execution_width")
GRID = dict(grid=(4, 1, 1), threadgroup=(4, 1, 1))


def arguments(source, inputs, outputs=1, **options):
    names = ["x", "y", "z"][: len(inputs)]
    results = ["o", "p"][:outputs]
    return dict(name="k", input_names=names, output_names=results, source=source, **options)


def text_of_mlx(kernel: dict, inputs, dtypes, template) -> str:
    """What MLX composes: it traces a kernel on any platform while it exports a function."""
    nodes, kernel = [], mx.fast.metal_kernel(**kernel)
    options = dict(output_shapes=[(4,)] * len(dtypes), output_dtypes=dtypes, template=template)
    mx.export_function(
        nodes.append, lambda *arrays: kernel(inputs=list(arrays), **options, **GRID), *inputs
    )
    return next(n for n in nodes if n.get("name") == "CustomKernel")["arguments"][1]


TEMPLATE = [("T", mx.bfloat16), ("N", 32), ("B", True), ("C", False), ("U", mx.uint8)]
TEXTS = {
    "one attribute": ("o[0] = thread_position_in_grid.x;", [mx.zeros(4)], [mx.float32]),
    "no attribute": ("o[0] = 1;", [mx.zeros(9)], [mx.float32]),
    "all attributes": ("// " + ALL, [mx.zeros(8, mx.float16), mx.zeros(7)], [mx.bfloat16]),
    "shapes": ("x_shape x_strides x_ndim y_strides", [mx.zeros((2, 3))] * 2, [mx.int32]),
    "a scalar": ("x_shape x_ndim", [mx.array(1.0), mx.zeros((0,), mx.int64)], [mx.bool_]),
    "two outputs": ("o[0] = p[0];", [mx.zeros(9)], [mx.float32, mx.int8]),
    "template": ("o[0] = N;", [mx.zeros(9, mx.bfloat16), mx.array(3)], [mx.float32], TEMPLATE),
}  # fmt: skip


@pytest.mark.parametrize("what", TEXTS)
def test_the_text_is_mlxs_own(what):
    source, inputs, dtypes, *template = TEXTS[what]
    template = template[0] if template else None
    kernel = arguments(source, inputs, len(dtypes))
    ours = MetalKernel(**kernel).compose(inputs, dtypes, template)
    assert ours == text_of_mlx(kernel, inputs, dtypes, template)


def test_the_text_of_our_kernels_is_mlxs_own():
    from test_metal_kernels import CALLS, call_of

    for case in CALLS:
        kernel, options = call_of(case)
        names = ("name", "input_names", "output_names", "source")
        inputs = [x if isinstance(x, mx.array) else mx.array(x) for x in options["inputs"]]
        dtypes, template = options["output_dtypes"], options["template"]
        theirs = text_of_mlx({n: getattr(kernel, n) for n in names}, inputs, dtypes, template)
        assert kernel.compose(inputs, dtypes, template) == theirs


@needs_emulator
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.uint8], ids=str)
def test_a_reduction_over_simdgroups(dtype):
    source = """
        threadgroup float part[2];
        const float sum = simd_sum(static_cast<float>(x[thread_position_in_grid.x]));
        if (thread_index_in_simdgroup == 0) {
            part[simdgroup_index_in_threadgroup] = sum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (thread_index_in_threadgroup == 0) {
            o[threadgroup_position_in_grid.x] = static_cast<T>(part[0] + part[1]);
        }
    """
    x = (np.arange(128) % 3).astype(dtype)
    (total,) = MetalKernel(**arguments(source, [x]))(
        inputs=[x],
        template=[("T", dtype)],
        output_shapes=[(2,)],
        output_dtypes=[dtype],
        grid=(128, 1, 1),
        threadgroup=(64, 1, 1),
    )
    assert total.tolist() == [x[:64].sum(), x[64:].sum()]


FAULTS = {
    "write past the end": ("o[4 + thread_position_in_grid.x] = 1.0f;", "out of bounds"),
    "write to an input": ("const_cast<device float*>(x)[0] = 1.0f;", "input"),
    "no output": ("if (x[0] > 100.0f) o[thread_position_in_grid.x] = 1.0f;", "unwritten"),
    "a shared element": ("o[0] = thread_position_in_grid.x;", "race"),
    "shift": ("o[thread_position_in_grid.x] = 1 << (int(x[0]) + 40);", "shift"),
}


@needs_emulator
@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_found(what):
    source, message = FAULTS[what]
    kernel = MetalKernel(**arguments(source, [0]))
    options = dict(output_shapes=[(4,)], output_dtypes=[np.float32], **GRID)
    with pytest.raises(MetalError, match=message):
        kernel(inputs=[np.ones(8, np.float32)], **options)


def test_threadgroups_over_the_limit_are_refused():
    kernel = MetalKernel(**arguments("o[0] = 1;", [0]))
    options = dict(output_shapes=[(4,)], output_dtypes=[np.float32])
    with pytest.raises(MetalError, match="1024"):
        kernel(inputs=[np.ones(8)], grid=(2048, 1, 1), threadgroup=(2048, 1, 1), **options)
