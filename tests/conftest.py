import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import metal_emulator
import tiny

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny checkpoint in the released layout; copy it before you change it."""
    return tiny.write_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def own_checkpoint(tmp_path) -> Path:
    return tiny.write_checkpoint(tmp_path / "model")


@pytest.fixture(scope="session")
def loaded(checkpoint):
    import wiola_mlx

    return wiola_mlx.load(checkpoint)


@pytest.fixture(scope="session")
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip("the data beside the project is not there")
    return SHARED


@pytest.fixture
def cli():
    """Runs ``python -m MODULE ARGS`` in a process of its own, as a user would."""

    def run(*argv, stdin: bytes | None = b"", module="wiola_mlx.generate", **options):
        return subprocess.run(
            [sys.executable, "-m", module, *map(str, argv)],
            input=stdin,
            capture_output=True,
            timeout=240,
            env={**os.environ, "PYTHONPATH": str(ROOT / "tests"), "HF_HUB_OFFLINE": "1"},
            **options,
        )

    return run


def relative_difference(actual, expected) -> float:
    """The largest difference, as a share of the largest magnitude."""
    actual, expected = (np.array(a, dtype=np.float64) for a in (actual, expected))
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    return np.abs(actual - expected).max() / np.abs(expected).max()


def sums_of(cache: list) -> list[mx.array]:
    """Each layer's running sums at the cached positions, [B, n, W]."""
    return [mx.concatenate(layer[1].keys_and_values(), axis=-1)[:, 0] for layer in cache]


needs_emulator = pytest.mark.skipif(
    not metal_emulator.can_run(), reason="the Metal emulator needs g++ on Linux, x86-64"
)


class Kernels:
    """Stands in for ``mx.fast.metal_kernel``: the kernels' own text runs in the emulator.

    Attributes:
        order, seconds: the order of the threads and the time limit, see the emulator.
        calls: names of the kernels that ran, in order.
        fault: the last error of the emulator.
    """

    make = metal_emulator.MetalKernel

    def __init__(self):
        self.order, self.seconds, self.calls, self.fault = 0, 60, [], None

    def __call__(self, **arguments):
        kernel = self.make(**arguments)

        def call(**options):
            self.calls.append(arguments["name"])
            return self.run(kernel, options)

        return call

    def run(self, kernel, options: dict) -> list[mx.array]:
        try:
            outputs = kernel(**options, order=self.order, seconds=self.seconds)
        except metal_emulator.MetalError as error:
            self.fault = error
            raise
        return [metal_emulator.as_mlx(x) for x in outputs]


class MetalKernels(Kernels):
    """The real ones, on a Mac; keeps the names of those that ran."""

    make = staticmethod(mx.fast.metal_kernel)

    def run(self, kernel, options: dict) -> list[mx.array]:
        return kernel(**options)


def patched(monkeypatch, kernels: Kernels) -> Kernels:
    from wiola_mlx.models import gated_attention, gated_attention_kernels

    monkeypatch.setattr(mx.fast, "metal_kernel", kernels)
    monkeypatch.setattr(gated_attention_kernels, "on_metal", lambda: True)
    monkeypatch.setattr(gated_attention, "_kernels", {})
    monkeypatch.setattr(gated_attention, "_runs", {})
    return kernels


@pytest.fixture
def emulated(monkeypatch) -> Kernels:
    """Makes the models take the kernels, with the emulator in the place of Metal."""
    if not metal_emulator.can_run():
        pytest.skip("the Metal emulator needs g++ on Linux, x86-64")
    return patched(monkeypatch, Kernels())


@pytest.fixture(params=["emulator", pytest.param("metal", marks=pytest.mark.metal)])
def fused_path(request, monkeypatch) -> Kernels:
    """The kernels in the emulator, and on a Mac as they are."""
    from wiola_mlx.models.gated_attention_kernels import on_metal

    if request.param == "emulator":
        return request.getfixturevalue("emulated")
    if not on_metal():
        pytest.skip("needs a Mac's GPU")
    return patched(monkeypatch, MetalKernels())
