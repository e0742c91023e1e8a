"""The model that ships: small, close to its float32 original, and it ends its stories."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import dequantize_model

import wiola_mlx
from wiola_mlx.loading import resolve


def test_it_is_at_most_7_megabytes_with_its_card():
    files = [file for file in resolve("builtin").iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 7_000_000
    assert {"README.md", "model.safetensors", "tokenizer.json"} <= {file.name for file in files}


def test_it_writes_a_story_and_ends_it():
    model, tokenizer = wiola_mlx.load("builtin")
    pieces = list(
        wiola_mlx.stream_text(
            model, tokenizer, "Once upon a time", temp=0.7, top_p=0.9, seed=2, max_tokens=400
        )
    )
    text = "".join(piece.text for piece in pieces)
    assert pieces[-1].finish_reason == "stop"
    assert "</s>" not in text and len(text.split()) > 20
    assert len(set(text.split())) > 15


def perplexity(model, ids: mx.array) -> float:
    loss = nn.losses.cross_entropy(model(ids)[:, :-1].astype(mx.float32), ids[:, 1:])
    return mx.exp(loss.mean()).item()


def test_its_perplexity_is_within_one_percent_of_float32(shared):
    original, tokenizer = wiola_mlx.load(shared / "released" / "pico")
    text = Path(shared / "corpus" / "tinystories_valid.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text[:32_000].replace("<|endoftext|>", "</s>"))
    ids = mx.array(ids[: len(ids) // 256 * 256]).reshape(-1, 256)
    small = dequantize_model(wiola_mlx.load("builtin")[0])  # quantized matmuls are slow on a CPU
    assert perplexity(small, ids) == pytest.approx(perplexity(original, ids), rel=0.01)
