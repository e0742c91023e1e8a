"""The Metal kernels against plain operations on this Mac, as a table to send to us.

Elsewhere it says so and does nothing: there the tests run the same cases in an emulator.
"""

import platform
import sys
from pathlib import Path

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from kernel_cases import BOUNDS, Case, arguments, covering_cases, errors

from wiola_mlx.models.gated_attention import gated_attention
from wiola_mlx.models.gated_attention_kernels import on_metal


def written_in_place(cached: int = 20000) -> bool:
    """Whether a decode step writes its token into the caches' buffers and copies none of them."""
    given = arguments(Case(H=8, D=64, cached=cached))
    layer = given["cache"]
    for _ in range(2):  # the first step also compiles
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        out = gated_attention(**given)
        mx.eval(out)
        mx.eval([(part.keys, part.values) for part in layer.caches])
    return mx.get_peak_memory() - before < layer[0].keys.nbytes // 2


def main() -> int:
    print(f"MLX {mx.__version__}, {platform.platform()}")
    if not on_metal():
        print("No Metal GPU here: nothing was checked. The tests emulate the kernels instead.")
        return 0
    print(mx.device_info()["device_name"])
    failed = 0
    for case in covering_cases():
        try:
            worst = max(errors(case).values())
            verdict = "ok" if worst <= BOUNDS[case.dtype] else "TOO FAR"
        except Exception as error:
            worst, verdict = float("nan"), f"FAILED: {error}"
        failed += verdict != "ok"
        print(f"{case!s:64} {worst:8.1e}  bound {BOUNDS[case.dtype]:.0e}  {verdict}")
    print(f"the caches' buffers are written in place: {'yes' if written_in_place() else 'NO'}")
    print(f"{failed} of {len(covering_cases())} cases failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
