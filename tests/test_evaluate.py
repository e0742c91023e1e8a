"""``python -m wiola_mlx.evaluate``: each token is scored once, and figures are what they say."""

import json
import math

import mlx.core as mx
import numpy as np
import pytest
import tiny
from test_cross_layer import write_checkpoint as write_cross_layer
from wiola_mlx.convert.to_mlx import to_mlx

import wiola_mlx
from wiola_mlx import documents, evaluate, scoring

STORIES = ["One day, a cat sat.", "Zoë said: “no”.", "The end"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "stories.txt"
    path.write_text("\n<|endoftext|>\n".join(STORIES) + "\n<|endoftext|>\n", encoding="utf-8")
    return path


@pytest.fixture
def quick(capsys):
    def run(*argv):
        code = evaluate.main([*map(str, argv)])
        return code, *capsys.readouterr()

    return run


def loss_of_each(model, ids, window, stride):
    """Token by token: the loss given exactly the context that its window holds."""
    losses = []
    for start, first, end in scoring.window_spans(len(ids) - 1, window, stride):
        for t in range(first, end):
            logits = model(mx.array(ids[start : t + 1])[None])[0, -1].astype(mx.float32)
            losses.append((mx.logsumexp(logits) - logits[int(ids[t + 1])]).item())
    return losses


@pytest.mark.parametrize(("window", "stride"), [(16, 16), (16, 5), (16, 1), (100, 50), (1, 1)])
def test_every_token_is_scored_once_in_its_window(loaded, window, stride):
    model, _ = loaded
    ids = np.arange(7, 48) % tiny.VOCAB_SIZE
    score = scoring.score_tokens(model, ids, window, stride, batch_size=3)
    losses = loss_of_each(model, ids, window, stride)
    assert score.tokens == len(losses) == 40
    assert score.loss == pytest.approx(np.mean(losses), rel=1e-6)


@pytest.mark.parametrize(("n", "window", "stride"), [(10, 4, 4), (10, 4, 1), (3, 8, 4), (9, 4, 3)])
def test_windows_are_as_long_as_they_may_be_and_score_each_position_once(n, window, stride):
    spans = list(scoring.window_spans(n, window, stride))
    assert [t for _, first, end in spans for t in range(first, end)] == list(range(n))
    assert all(end - start == min(window, end) for start, _, end in spans)


def test_the_standard_error_is_that_of_the_windows():
    sums, counts = np.array([10.0, 14.0, 9.0]), np.array([4, 4, 4])
    score = scoring.summarize(sums, counts)
    assert score.standard_error == pytest.approx(np.std(sums / 4, ddof=1) / math.sqrt(3))
    assert scoring.summarize(sums[:1], counts[:1]).standard_error is None


def test_figures_of_several_models_side_by_side(own_checkpoint, text, tmp_path, quick, capsys):
    to_mlx(own_checkpoint, tmp_path / "q8", bits=8, group_size=32)
    capsys.readouterr()
    models = (own_checkpoint, tmp_path / "q8", write_cross_layer(tmp_path / "cross"))
    code, out, err = quick(*models, "--text", text, "--window", 16, "--json")
    assert code == 0 and err == ""
    rows = json.loads(out)["models"]
    assert [row["model"] for row in rows] == [str(m) for m in models]
    size = sum(len(story.encode()) + 1 for story in STORIES)
    for row in rows:
        assert row["tokens"] == row["bytes"] == size  # one token a byte, and the end tokens
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
        assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2))
        assert row["standard_error"] > 0 and row["documents"] == 3
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=0.05)
    model, tokenizer = wiola_mlx.load(own_checkpoint)
    ids = evaluate.token_stream(tokenizer, STORIES)
    assert rows[0]["loss"] == pytest.approx(np.mean(loss_of_each(model, ids, 16, 8)), rel=1e-6)


def test_jsonl_and_text_say_the_same(checkpoint, text, tmp_path, quick):
    lines = tmp_path / "stories.jsonl"
    rows = "\n".join(json.dumps({"text": f" {s}\n", "id": i}) for i, s in enumerate(STORIES))
    lines.write_text(rows + "\n\n")
    results = [
        json.loads(quick(checkpoint, "--text", p, "--json")[1])["models"] for p in (text, lines)
    ]
    for (row,) in results:
        row.pop("tokens_per_second")
    assert results[0] == results[1]


def test_a_separator_across_two_reads_is_found(text, monkeypatch):
    for chunk in (1, 5, 7, 1000):
        monkeypatch.setattr(documents, "CHUNK", chunk)
        assert list(documents.read_documents([text, text])) == STORIES * 2


def test_the_table_names_model_and_error(checkpoint, text, quick):
    code, out, err = quick(checkpoint, "--text", text, "--window", 8, "--max-documents", 2)
    assert code == 0
    assert "±" in out and str(checkpoint) in out
    assert "2 documents" in err


def test_mistakes_are_one_line(checkpoint, text, tmp_path, quick):
    (tmp_path / "empty.txt").write_text(" \n<|endoftext|>\n")
    (tmp_path / "latin.txt").write_bytes("Zoë".encode("latin-1"))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"txt": 1}\n')
    for argv, word in (
        ([checkpoint, "--text", tmp_path / "empty.txt"], "no text"),
        ([checkpoint, "--text", tmp_path / "latin.txt"], "UTF-8"),
        ([checkpoint, "--text", tmp_path / "bad.jsonl"], "line 2"),
        ([checkpoint, "--text", tmp_path / "missing.txt"], "missing.txt"),
        ([checkpoint, "--text", tmp_path], "read"),
        (["nonsense", "--text", text], "nonsense"),
        ([checkpoint, "--text", text, "--window", 0], "--window"),
        ([checkpoint, "--text", text, "--window", 8, "--stride", 9], "stride"),
    ):
        code, out, err = quick(*argv)
        assert code == 1 and out == "" and err.count("\n") == 1 and word in err, err


def log_of_pico(shared) -> dict:
    return json.loads((shared / "released" / "pico" / "training_log.json").read_text())


def evaluate_pico(shared, count: int | None = None) -> dict:
    texts = documents.read_documents([shared / "corpus" / "tinystories_valid.txt"])
    stories = [story for story, _ in zip(texts, range(count or 10**9), strict=False)]
    return evaluate.evaluate_model(
        str(shared / "released" / "pico"), stories, window=256, stride=256, dtype="float32"
    )


def test_issue_7_three_stories_are_near_picos_training_log(shared):
    found = evaluate_pico(shared, count=3)
    assert found["bits_per_byte"] == pytest.approx(log_of_pico(shared)["bits_per_byte"], rel=0.25)


@pytest.mark.slow
def test_issue_7_pico_agrees_with_its_training_log_to_1_percent(shared):
    found, log = evaluate_pico(shared), log_of_pico(shared)
    assert found["tokens"] == 142_642
    assert found["loss"] == pytest.approx(log["valid_loss"], rel=0.01)
    assert found["bits_per_byte"] == pytest.approx(log["bits_per_byte"], rel=0.01)
