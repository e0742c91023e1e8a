"""Small models trained on real stories, beside n-gram models of the same text."""

import json

import numpy as np
import pytest
import tiny
from test_train import SMALL, losses

from wiola_mlx.train import __main__ as command

WIDE = {**SMALL, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


def train_on_stories(shared, out, capsys, size: int, *more, **changes) -> dict:
    """Width 64 and 512 tokens on the first ``size`` bytes of the stories; the command's result."""
    out.mkdir()
    for part, length in (("train", size), ("valid", min(size, 240_000) // 4)):
        whole = (shared / "corpus" / f"tinystories_{part}.txt").read_bytes()
        (out / f"{part}.txt").write_text(whole[:length].decode(errors="ignore"))
    tiny.write_json(out / "config.json", {**WIDE, **changes})
    argv = ["--text", out / "train.txt", "--valid", out / "valid.txt", "--bpe", 512]
    argv += ["--config", out / "config.json", "--out", out / "run", "--dtype", "float32"]
    argv += ["--batch-size", 8, "--learning-rate", "8e-3", "--ngram", "--json", *more]
    assert command.main([*map(str, argv)]) == 0
    return json.loads(capsys.readouterr().out)


def test_issue_7_a_short_run_on_stories_falls_clearly(shared, tmp_path, capsys):
    options = ("--steps", 30, "--warmup-steps", 4, "--sequence-length", 32)
    result = train_on_stories(shared, tmp_path / "a", capsys, 60_000, *options)
    assert losses(tmp_path / "a" / "run")[0] == pytest.approx(np.log(512), rel=0.01)
    assert result["best_valid_loss"] < 0.9 * np.log(512)
    assert result["ngram"] == sorted(result["ngram"], reverse=True)


@pytest.mark.slow
def test_issue_7_a_small_model_beats_the_trigrams_of_its_text(shared, tmp_path, capsys):
    options = ("--steps", 3000, "--warmup-steps", 50, "--sequence-length", 128)
    result = train_on_stories(
        shared, tmp_path / "a", capsys, 1_500_000, *options, num_hidden_layers=3
    )
    assert result["best_valid_loss"] < min(result["ngram"])
