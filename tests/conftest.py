import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
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
