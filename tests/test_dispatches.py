"""Dispatches per decoded token: on a Mac, what a small model's speed is made of."""

import json
import re

import mlx.core as mx
import pytest
import tiny
from conftest import ROOT

from wiola_mlx import dispatches


@pytest.mark.parametrize("dtype", dispatches.DTYPES)
def test_the_fused_path_needs_no_more_than_llama(dtype):
    counts = {path: c["total"] for path, c in dispatches.count_all(dtype).items()}
    assert counts["fused"] <= counts["llama"] < counts["plain"]


def test_the_readmes_numbers_are_these():
    text = " ".join((ROOT / "README.md").read_text().split())
    found = re.search(
        r"counts (\d+) for the Nano shape, (\d+) in plain operations, and (\d+)", text
    )
    counts = dispatches.count_all()
    assert [int(n) for n in found.groups()] == [
        counts[path]["total"] for path in ("fused", "plain", "llama")
    ]


def test_each_layer_is_one_kernel():
    model = tiny.random_model(num_attention_heads=4, num_hidden_layers=3)
    names = dispatches.count_model(model, kernels=True)
    assert names["wiola_decode_gated"] == 3
    assert not {"rope", "scaled_dot_product_attention", "Concatenate", "AsType"} & set(names)
    assert names["SliceUpdate"] == 12  # K, V and the two halves of the sums


def test_the_model_is_as_before_after_counting():
    model, ids = tiny.random_model(num_attention_heads=4), mx.array([[1, 2, 3]])
    before, rope = model(ids), mx.fast.rope
    dispatches.count_model(model, kernels=True)
    assert mx.fast.rope is rope
    assert mx.array_equal(model(ids), before)


def step_of(function):
    x = mx.ones((2, 8))
    mx.eval(x)
    return dispatches.count_step(lambda: [function(x)])


def test_what_counts_and_what_does_not():
    fused = mx.compile(lambda a: mx.exp(a) * a + 1, shapeless=True)
    counts = {
        "views": lambda x: x.reshape(4, 4)[1:].T[None].swapaxes(0, 1).squeeze(1),
        "one": lambda x: mx.exp(x[:, ::2]),
        "compiled": fused,
        "fast": lambda x: mx.fast.rms_norm(x, None, 1e-5),
        "three": lambda x: mx.fast.rms_norm(mx.exp(x), None, 1e-5) * x,
        "joined": lambda x: mx.concatenate([x, x]),
    }
    found = {name: step_of(function).total() for name, function in counts.items()}
    assert found == dict(views=0, one=1, compiled=1, fast=1, three=3, joined=2)


def test_the_command_prints_a_table_and_json(cli):
    plain = cli(module="wiola_mlx.dispatches")
    assert plain.returncode == 0, plain.stderr.decode()
    lines = plain.stdout.decode().splitlines()
    assert len(lines) == 4 and "256/6/8/512" in lines[0]
    result = json.loads(cli("--json", module="wiola_mlx.dispatches").stdout)
    numbers = [int(line.split()[0]) for line in lines[1:]]
    assert numbers == [result[path]["total"] for path in dispatches.PATHS]
    for path in dispatches.PATHS:
        assert sum(result[path]["by_name"].values()) == result[path]["total"]
