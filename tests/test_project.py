"""The project itself: layout, lint, README, examples, and what an import does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

RUFF = [sys.executable, "-m", "ruff"]


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=str)
def test_ruff_is_content(command):
    result = run(*RUFF, *command, ".", cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_nothing_happens_at_import():
    code = (
        "import sys, wiola_mlx; before = set(sys.modules)\n"
        "assert not {'mlx', 'mlx_lm', 'transformers', 'numpy'} & before, before\n"
        "import wiola_mlx.generate, wiola_mlx.__main__, wiola_mlx.loading, wiola_mlx.generation\n"
        "assert 'mlx_lm.models.wiola' not in sys.modules\n"
        "wiola_mlx.register()\n"
        "assert sys.modules['mlx_lm.models.wiola'].__name__ == 'wiola_mlx.models.wiola'\n"
    )
    result = run(sys.executable, "-c", code, cwd="/")
    assert result.returncode == 0, result.stderr
    assert result.stdout + result.stderr == ""


def test_convert_is_installed_as_wiola_mlx_convert():
    code = "import wiola_mlx.convert.to_mlx as m; print(m.__name__)"
    result = run(sys.executable, "-c", code, cwd="/")
    assert result.stdout.strip() == "wiola_mlx.convert.to_mlx", result.stderr


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(example):
    result = run(sys.executable, example)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) > 40
    assert example.name in (ROOT / "examples" / "README.md").read_text()


def test_the_examples_differences_are_small():
    result = run(sys.executable, ROOT / "examples" / "exact_cache.py")
    differences = [float(x) for x in re.findall(r"\d\.\de-\d\d", result.stdout)]
    assert len(differences) == 2 and max(differences) <= 1e-5


def test_the_readmes_python_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) >= 2
    result = run(sys.executable, "-c", "\n".join(blocks), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["story.safetensors"]


def test_the_readmes_commands_are_the_makefiles():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    assert re.findall(r"^make (\w+)", readme, re.M) == ["story", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in ("story", "test"))


def test_the_map_in_contributing_is_true():
    named = re.findall(r"^\| (.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    paths = [p for row in named for p in re.findall(r"`([\w/.]+)`", row)]
    home = None
    for path in paths:
        candidate = ROOT / path
        if "/" not in path.rstrip("/"):
            candidate = candidate if candidate.exists() else home / path
        assert candidate.exists(), path
        home = candidate.parent
    models = {p.name for p in (ROOT / "wiola_mlx" / "models").glob("*.py")} - {"__init__.py"}
    assert models <= {Path(p).name for p in paths}


def test_python_files_stay_short():
    long = {
        str(path.relative_to(ROOT)): lines
        for path in ROOT.glob("[a-z]*/**/*.py")
        if (lines := len(path.read_text().splitlines())) > 400
    }
    assert not long
