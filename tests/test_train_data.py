"""What a run reads: tokens on disk, their order, tokenizers, and the n-gram baseline."""

import json
import math
import os

import numpy as np
import pytest
import tiny

import wiola_mlx
from wiola_mlx.models import wiola
from wiola_mlx.train import data, ngram, settings, tokenizer
from wiola_mlx.train.data import Batches

STORIES = ["One day, a cat sat.", "Zoë said: “no”.", "The end"]


@pytest.fixture
def words(checkpoint):
    return tokenizer.open_tokenizer(checkpoint)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "stories.txt"
    path.write_text("\n<|endoftext|>\n".join(STORIES), encoding="utf-8")
    return path


def test_tokens_on_disk_are_the_documents_with_end_tokens_between(words, text, tmp_path):
    tokens = data.tokenized([text], words, tmp_path / "cache")
    expected = [2]
    for story in STORIES:
        expected += [*words.encode(story, add_special_tokens=False), 2]
    assert tokens.ids.tolist() == expected
    assert isinstance(tokens.ids, np.memmap) and tokens.ids.dtype == np.uint16
    assert tokens.documents == 3
    assert tokens.bytes == sum(len(story.encode()) + 1 for story in STORIES)


def test_text_is_tokenized_once_until_it_changes(words, text, tmp_path, monkeypatch):
    first = data.tokenized([text], words, tmp_path / "cache")
    monkeypatch.setattr(data, "token_ids", None)
    assert data.tokenized([text], words, tmp_path / "cache").key == first.key
    monkeypatch.undo()
    text.write_text("Another story", encoding="utf-8")
    assert data.tokenized([text], words, tmp_path / "cache").key != first.key


def test_text_that_breaks_off_leaves_no_tokens(words, text, tmp_path):
    broken = tmp_path / "broken.txt"
    broken.write_bytes(text.read_bytes() + b"\xff")
    with pytest.raises(wiola_mlx.WiolaError, match="UTF-8"):
        data.tokenized([text, broken], words, tmp_path / "cache")
    assert not os.listdir(tmp_path / "cache")


def test_tokens_are_written_group_by_group_as_if_at_once(words, text, tmp_path, monkeypatch):
    whole = data.tokenized([text], words, tmp_path / "whole").ids.tolist()
    monkeypatch.setattr(data, "DOCUMENTS_AT_ONCE", 1)
    assert data.tokenized([text], words, tmp_path / "parts").ids.tolist() == whole


def test_an_epoch_has_every_sequence_once_and_each_epoch_its_own_order():
    ids = np.arange(101)
    batches = Batches(ids, length=10, batch_size=5, seed=3)
    epochs = [np.concatenate([batches.batch(2 * e), batches.batch(2 * e + 1)]) for e in range(2)]
    for rows in epochs:
        assert sorted(rows[:, 0].tolist()) == list(range(0, 100, 10))
        assert (rows == rows[:, :1] + np.arange(11)).all()  # 10 inputs, and the last one's target
    assert epochs[0].tolist() != epochs[1].tolist()


def test_a_batch_depends_on_seed_and_step_only():
    ids = np.arange(1000)
    forward, fresh = (Batches(ids, 7, 4, seed=1) for _ in range(2))
    seen = [forward.batch(step).tolist() for step in range(90)]
    assert fresh.batch(80).tolist() == seen[80]
    assert fresh.batch(3).tolist() == seen[3]  # an earlier epoch
    assert Batches(ids, 7, 4, seed=2).batch(3).tolist() != seen[3]


def test_a_trained_bpe_reads_every_text_and_ends_documents(text, tmp_path):
    words = tokenizer.prepare_tokenizer(tmp_path / "t", None, 280, [text])
    assert len(words) == 280
    ids = words.encode("Zoë 🙂", add_special_tokens=False)
    assert words.decode(ids) == "Zoë 🙂"
    kinds = ("unk", "bos", "eos", "pad")
    assert [getattr(words, f"{kind}_token_id") for kind in kinds] == [0, 1, 2, 3]
    again = tokenizer.prepare_tokenizer(tmp_path / "t", None, 280, [text], keep=True)
    assert again.get_vocab() == words.get_vocab()


def test_a_sentencepiece_model_gives_its_own_ids(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    source = tmp_path / "corpus.txt"
    source.write_text("\n".join(STORIES * 20), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(source),
        model_prefix=str(tmp_path / "sp"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    words = tokenizer.prepare_tokenizer(tmp_path / "t", str(tmp_path / "sp.model"), None, [])
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sp.model"))
    assert words.eos_token_id == pieces.eos_id()
    for story in STORIES:
        assert words.encode(story, add_special_tokens=False) == pieces.encode(story)


def test_a_tokenizers_folder_is_copied(checkpoint, tmp_path, shared):
    words = tokenizer.prepare_tokenizer(
        tmp_path / "t", str(shared / "released" / "wiola13m"), None, []
    )
    assert words.encode("Once upon a time", add_special_tokens=False) == [434, 450, 262, 399]


def test_sources_that_are_no_tokenizer_are_named(tmp_path):
    (tmp_path / "bad.model").write_bytes(b"no")
    (tmp_path / "empty").mkdir()
    for source in ("bad.model", "missing.model", "empty", "missing"):
        with pytest.raises(wiola_mlx.WiolaError, match=source):
            tokenizer.prepare_tokenizer(tmp_path / "t", str(tmp_path / source), None, [])
        assert not (tmp_path / "t").exists()


def test_a_config_is_the_released_layout_and_reads_back(words):
    for preset in ("nano", "120m"):
        args = settings.model_arguments(preset, None, len(words))
        assert args.vocab_size == len(words)
        config = json.loads(json.dumps(settings.config_of(args, words)))
        assert wiola.ModelArgs.from_dict(config) == args
        assert config["model_type"] == "wiola" and config["eos_token_id"] == 2


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(tmp_path):
    tiny.write_json(tmp_path / "config.json", {**tiny.CONFIG, "vocab_size": 100})
    with pytest.raises(wiola_mlx.WiolaError, match="vocabulary of 100"):
        settings.model_arguments(None, str(tmp_path / "config.json"), 260)
    with pytest.raises(wiola_mlx.WiolaError, match="nanu"):
        settings.model_arguments("nanu", None, 260)


def witten_bell_by_hand(train, history, word, vocab_size):
    lower = 1 / vocab_size
    if history is not None:
        lower = witten_bell_by_hand(train, history[1:] if history else None, word, vocab_size)
    n = len(history or ())
    if history is None:
        return lower
    followers = [
        train[i + n] for i in range(len(train) - n) if tuple(train[i : i + n]) == tuple(history)
    ]
    if not followers:
        return lower
    kinds = len(set(followers))
    return (followers.count(word) + kinds * lower) / (len(followers) + kinds)


def test_ngram_probabilities_are_interpolated_witten_bell_and_sum_to_one():
    random = np.random.default_rng(0)
    train, valid = random.integers(0, 5, 60), random.integers(0, 5, 20)
    losses = ngram.ngram_losses(train, valid, 5, order=3)
    for n, loss in enumerate(losses, 1):
        by_hand = [
            witten_bell_by_hand(train.tolist(), tuple(valid[t - n + 1 : t].tolist()), valid[t], 5)
            for t in range(2, 20)
        ]
        assert loss == pytest.approx(-np.mean(np.log(by_hand)))
    for history in ((), (1,), (1, 2)):
        total = sum(witten_bell_by_hand(train.tolist(), history, w, 5) for w in range(5))
        assert total == pytest.approx(1)


def test_ngrams_of_a_pattern_are_sure_and_those_of_noise_are_not():
    pattern = np.tile([0, 1, 2, 1], 200)
    losses = ngram.ngram_losses(pattern, pattern[:100], 4)
    assert losses[2] < 0.05 < losses[1] < losses[0]
    noise = np.random.default_rng(0).integers(0, 4, 4000)
    assert ngram.ngram_losses(noise, noise[:50], 4)[0] == pytest.approx(math.log(4), rel=0.05)
