"""The manners of all conversions: plans, hashes, refusals, and what a kill leaves."""

import hashlib
import json
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import mlx.core as mx
import pytest
import tiny
from conftest import ROOT, relative_difference
from conversions import every_conversion, logits, snapshot, tensors
from wiola_mlx.convert import output
from wiola_mlx.convert.__main__ import main
from wiola_mlx.convert.gguf_format import read_gguf
from wiola_mlx.convert.to_gguf import to_gguf
from wiola_mlx.convert.to_hf import to_hf
from wiola_mlx.convert.to_mlx import to_mlx

from wiola_mlx import WiolaError


@every_conversion
def test_sources_are_hashed_into_the_output(checkpoint, tmp_path, convert, name):
    target = tmp_path / name
    convert(checkpoint, target)
    digest = hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()
    if convert is to_gguf:
        hashes = read_gguf(target).metadata["wiolagsa.source.hashes"]
        assert f"model.safetensors sha256:{digest}" in hashes
        assert len(hashes) == 4
        return
    with (target / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    hashes = json.loads(header["__metadata__"]["sources"])
    assert hashes["model.safetensors"] == f"sha256:{digest}"
    assert hashes.keys() >= {"config.json", "tokenizer.json"}
    card = (target / "README.md").read_text()
    assert card.startswith("---\n") and "bits a weight" in card and "/" not in card.split("`")[1]


def test_large_files_are_hashed_by_blake3(checkpoint, tmp_path, monkeypatch):
    import blake3

    monkeypatch.setattr(output, "SHA256_UP_TO", 1000)
    to_gguf(checkpoint, tmp_path / "x.gguf")
    digest = blake3.blake3((checkpoint / "model.safetensors").read_bytes()).hexdigest()
    hashes = read_gguf(tmp_path / "x.gguf").metadata["wiolagsa.source.hashes"]
    assert f"model.safetensors blake3:{digest}" in hashes


def test_large_outputs_are_sharded(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(output, "SHARD_BYTES", 100_000)
    to_hf(checkpoint, tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 2
    assert tensors(tmp_path / "hf") == tensors(checkpoint)
    assert mx.array_equal(logits(tmp_path / "hf"), logits(checkpoint)).item()


@every_conversion
def test_a_dry_run_prints_the_plan_and_writes_nothing(checkpoint, tmp_path, capsys, convert, name):
    command = convert.__name__.replace("_", "-")
    argv = [command, str(checkpoint), str(tmp_path / name), "--dry-run"]
    assert main(argv) == 0
    plan = capsys.readouterr().out
    assert "ffn_up.weight" in plan or "mlp.up_proj.weight" in plan
    assert "F32" in plan and "bytes" in plan and "would be written" in plan
    assert main([*argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["dry_run"] and not list(tmp_path.iterdir())
    assert main([*argv[:-1], "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["tensors"] == report["tensors"] and done["bytes"] == report["bytes"]


@every_conversion
def test_it_never_writes_where_it_reads(own_checkpoint, tmp_path, convert, name):
    before = snapshot(own_checkpoint)
    link = tmp_path / "link"
    link.symlink_to(own_checkpoint)
    for target in (own_checkpoint / name, link / name, link / "new" / name):
        with pytest.raises(WiolaError, match="inside the source"):
            convert(own_checkpoint, target)
    if convert is not to_gguf:
        for target in (own_checkpoint, link):
            with pytest.raises(WiolaError, match="is the source itself"):
                convert(own_checkpoint, target)
    assert snapshot(own_checkpoint) == before
    to_gguf(own_checkpoint, tmp_path / "s.gguf")
    (tmp_path / "t.gguf").symlink_to(tmp_path / "s.gguf")
    with pytest.raises(WiolaError, match=r"s\.gguf is the source|t\.gguf is the source"):
        to_gguf(tmp_path / "s.gguf", tmp_path / "t.gguf", "q8_0")
    (tmp_path / name).write_text("")
    with pytest.raises(WiolaError, match="exists already"):
        convert(own_checkpoint, tmp_path / name)


@every_conversion
def test_what_cannot_be_written_leaves_nothing(checkpoint, tmp_path, monkeypatch, convert, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(WiolaError, match="cannot be written"):
        convert(checkpoint, tmp_path / "file" / name)
    monkeypatch.setattr(output.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(WiolaError, match="GB are free"):
        convert(checkpoint, tmp_path / name)
    monkeypatch.undo()
    monkeypatch.setattr(output, "write_all", lambda file, data, place: None)
    with pytest.raises(WiolaError, match=r"holds less|other bytes"):
        convert(checkpoint, tmp_path / name)

    def write_with_a_flipped_bit(file, data, place):
        data[0] ^= 1
        file.seek(place)
        file.write(data)
        data[0] ^= 1

    monkeypatch.setattr(output, "write_all", write_with_a_flipped_bit)
    with pytest.raises(WiolaError, match="other bytes of"):
        convert(checkpoint, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_stdout_is_for_the_answer_and_a_pipe_sees_no_progress(checkpoint, tmp_path, cli):
    argv = ("convert", "to-gguf", checkpoint, tmp_path / "x.gguf", "--type", "q4_0")
    result = cli(*argv, module="wiola_mlx")
    assert result.returncode == 0 and result.stdout == b""
    assert b"\r" not in result.stderr and b"bits a weight" in result.stderr
    again = cli(*argv, module="wiola_mlx")
    assert again.returncode == 1 and again.stderr.count(b"\n") == 1
    assert b"exists already" in again.stderr


def test_the_library_is_silent(checkpoint, tmp_path, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        to_mlx(checkpoint, tmp_path / "a", quantize=True)
        to_gguf(tmp_path / "a", tmp_path / "a.gguf")
        to_hf(tmp_path / "a.gguf", tmp_path / "b")
    assert capfd.readouterr() == ("", "")


KILLED = """
import os, signal, sys, time
from pathlib import Path
from wiola_mlx.convert.to_gguf import to_gguf
from wiola_mlx.convert.to_mlx import to_mlx
import wiola_mlx.models.gated_spiral
source, room = Path(sys.argv[1]), Path(sys.argv[2])
start = time.monotonic()
to_gguf(source, room / "whole.gguf", "q8_0")
seconds = time.monotonic() - start
for i in range(12):
    child = os.fork()
    if not child:
        os.setsid()
        convert = (lambda t: to_gguf(source, t, "q8_0")) if i % 2 else (lambda t: to_mlx(source, t))
        convert(room / f"{i}.gguf" if i % 2 else room / f"{i}")
        os._exit(0)
    time.sleep(seconds * (i + 0.5) / 12)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_killed_at_any_moment_the_target_is_whole_or_absent(tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "m", hidden_size=256, vocab_size=20_000)
    before, room = snapshot(folder), tmp_path / "room"
    room.mkdir()
    code = [sys.executable, "-c", KILLED, str(folder), str(room)]
    result = subprocess.run(code, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert snapshot(folder) == before
    whole = (room / "whole.gguf").read_bytes()
    made = [path for path in room.iterdir() if not path.name.startswith(".")]
    for path in made:
        if path.is_file():
            assert path.read_bytes() == whole
        else:
            assert tensors(path) == tensors(folder)
            assert (path / "README.md").is_file()
    assert len(made) < 13  # some were killed in time


def test_builtin_is_a_source_like_any_other(tmp_path):
    to_hf("builtin", tmp_path / "hf", dtype="float16")
    assert relative_difference(logits(tmp_path / "hf"), logits("builtin")) < 0.02
    assert os.environ.get("HF_HUB_OFFLINE") == "1"
