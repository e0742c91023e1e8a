"""A 360M-sized checkpoint: what conversions cost in memory and time. Slow: 4 GB of disk."""

import json
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from wiola_mlx.convert.source import expected, model_for

pytestmark = pytest.mark.slow
MEMORY = 1.3e9  # bytes beyond the interpreter with its imports
COPIES = 3  # times the time of a copy
MEASURED = """
import json, resource, sys, time
from pathlib import Path
import blake3, gguf, mlx.core, mlx_lm.convert, numpy
import wiola_mlx.convert.__main__ as convert
import wiola_mlx.convert.from_gguf, wiola_mlx.convert.to_gguf, wiola_mlx.convert.to_hf
import wiola_mlx.convert.to_mlx, wiola_mlx.models.cross_layer
def peak():  # bytes; on Linux ru_maxrss begins with what the parent process had
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

before, start = peak(), time.monotonic()
code = convert.main(sys.argv[1:])
print(json.dumps([code, time.monotonic() - start, peak() - before]))
"""


@pytest.fixture(scope="module")
def large(shared, tmp_path_factory) -> Path:
    """The released 360M's config and tokenizer, random float32 weights in two shards."""
    folder = tmp_path_factory.mktemp("large") / "model"
    shutil.copytree(shared / "released" / "wiola360m", folder)
    folder.chmod(0o755)
    config = json.loads((folder / "config.json").read_text())
    shapes, _ = expected(model_for(config, map(str, range(1000)), folder))
    rng, names, weight_map = np.random.default_rng(0), sorted(shapes), {}
    for i in (0, 1):
        name = f"model-{i + 1:05d}-of-00002.safetensors"
        write_shard(folder / name, {n: shapes[n] for n in names[i::2]}, rng)
        weight_map |= dict.fromkeys(names[i::2], name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) > 1.27e9
    return folder


def write_shard(path: Path, shapes: dict, rng):
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            file.write((0.02 * rng.standard_normal(shape, np.float32)).astype(np.float32).tobytes())


def convert(*argv) -> tuple[float, float]:
    """Seconds, and bytes of peak memory beyond the imports."""
    command = [sys.executable, "-c", MEASURED, *map(str, argv)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    code, seconds, memory = json.loads(result.stdout.splitlines()[-1])
    assert code == 0, result.stderr
    print(f"{argv[0]} {argv[3:]}: {seconds:.2f} s, {memory / 1e6:.0f} MB")
    return seconds, memory


def copy_seconds(source: Path, target: Path) -> float:
    start = time.monotonic()
    shutil.copytree(source, target)
    seconds = time.monotonic() - start
    shutil.rmtree(target)
    return seconds


@pytest.mark.parametrize(
    "argv",
    [("to-gguf", "x.gguf", "--type", "f16"), ("to-mlx", "mlx", "--dtype", "bfloat16")],
    ids=lambda argv: argv[0],
)
def test_memory_and_time_of_a_stream(large, tmp_path, argv):
    command, name, *options = argv
    before = copy_seconds(large, tmp_path / "copy")
    seconds, memory = convert(command, large, tmp_path / name, *options)
    copy = max(before, copy_seconds(large, tmp_path / "copy"))  # other work makes both slower
    print(f"copy: {copy:.2f} s")
    assert memory < MEMORY
    assert seconds < COPIES * copy


def test_memory_of_the_other_conversions(large, tmp_path):
    for argv in (
        ("to-mlx", large, tmp_path / "q", "-q"),
        ("to-gguf", large, tmp_path / "q8.gguf", "--type", "q8_0"),
        ("to-mlx", tmp_path / "q8.gguf", tmp_path / "q8"),
        ("to-hf", tmp_path / "q8.gguf", tmp_path / "hf"),
        ("to-gguf", tmp_path / "q", tmp_path / "q.gguf"),
    ):
        assert convert(*argv)[1] < MEMORY
