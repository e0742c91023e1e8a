"""Tokenizers in GGUF files: the vocabulary, special tokens, templates, and the way back."""

import json
import random

import pytest
import tiny
from conversions import dump, rewrite, with_released_tokenizer
from wiola_mlx.convert.gguf_format import read_gguf
from wiola_mlx.convert.to_gguf import to_gguf
from wiola_mlx.convert.to_hf import to_hf
from wiola_mlx.convert.to_mlx import to_mlx
from wiola_mlx.convert.tokenizer import rebuild

import wiola_mlx
from wiola_mlx import WiolaError


def fuzz(count: int = 2000) -> list[str]:
    rng = random.Random(0)
    pieces = ["Once upon", " a", "  ", "\n\n", "\t", " 2024", "3.14", "don't", "<|user|>", "</s>"]
    pieces += [
        "<eos>",
        "<|end|>",
        "ß",
        "日本",
        "🙂",
        "👩‍👩‍👧",
        "नमस्ते",
        "e\u0301",
        "\u00a0",
        "_",
        "…",
        "I'LL",
    ]

    def piece() -> str:
        kind = rng.random()
        if kind < 0.5:
            return rng.choice(pieces)
        if kind < 0.8:
            return "".join(chr(rng.randrange(32, 127)) for _ in range(rng.randrange(1, 8)))
        return "".join(
            chr(c)
            for c in (rng.randrange(0x20, 0x30000) for _ in range(4))
            if not 0xD800 <= c < 0xE000
        )

    return ["".join(piece() for _ in range(rng.randrange(1, 12))) for _ in range(count)]


@pytest.mark.parametrize("name", ["wiola13m", "wiola360m"])
def test_the_released_tokenizers_live_in_the_file_alone(shared, name, tmp_path):
    from tokenizers import Tokenizer

    folder = with_released_tokenizer(shared, name, tmp_path / "model")
    path = tmp_path / "x.gguf"
    to_gguf(folder, path, "q8_0")
    metadata = read_gguf(path).metadata
    source = Tokenizer.from_file(str(folder / "tokenizer.json"))
    replayed = rebuild({k: v for k, v in metadata.items() if k.startswith("tokenizer.ggml.")})
    texts = fuzz()
    expected = [e.ids for e in source.encode_batch(texts, add_special_tokens=False)]
    assert [e.ids for e in replayed.encode_batch(texts, add_special_tokens=False)] == expected

    prefix = metadata["general.architecture"]
    assert metadata["tokenizer.ggml.pre"] == "gpt-2"
    assert len(metadata["tokenizer.ggml.tokens"]) == 32000 == metadata[f"{prefix}.vocab_size"]
    special = [i for i, t in enumerate(metadata["tokenizer.ggml.token_type"]) if t == 3]
    assert special == list(range(4 if name == "wiola13m" else 8))
    assert "tokenizer.chat_template" not in metadata
    assert metadata["tokenizer.ggml.eos_token_id"] == 2
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert metadata.get("tokenizer.ggml.eot_token_id") == (7 if name == "wiola360m" else None)
    tokenizer = wiola_mlx.load(path)[1]
    assert tokenizer.encode("Once upon a time")[0] == (434 if name == "wiola13m" else 18498)
    assert tokenizer.eos_token_ids == wiola_mlx.load_tokenizer(folder).eos_token_ids
    to_hf(path, tmp_path / "hf", dtype="float32")
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (tmp_path / "hf" / file).read_bytes() == (folder / file).read_bytes()
    generation = (tmp_path / "hf" / "generation_config.json").read_bytes()
    assert generation == (folder / "generation_config.json").read_bytes()
    assert "32000" in dump(path)


def test_chat_template_stop_tokens_and_unused_rows(own_checkpoint, tmp_path):
    tiny.write_tokenizer(own_checkpoint, tiny.CHAT_TEMPLATE)
    tiny.write_json(own_checkpoint / "generation_config.json", {"eos_token_id": [2, 3]})
    path = tmp_path / "x.gguf"
    to_gguf(own_checkpoint, path)
    metadata = read_gguf(path).metadata
    assert metadata["tokenizer.chat_template"] == tiny.CHAT_TEMPLATE
    assert metadata["wiolagsa.stop_token_ids"] == [2, 3]
    assert metadata["tokenizer.ggml.token_type"][258:] == [1, 1] + 40 * [5]
    assert metadata["tokenizer.ggml.tokens"][299] == "[PAD299]"
    for bare in (False, True):
        file = path
        if bare:
            file = tmp_path / "bare.gguf"
            rewrite(path, file, drop=".source.")
            rewrite(file, tmp_path / "barer.gguf", drop="huggingface")
            file = tmp_path / "barer.gguf"
        _, tokenizer = wiola_mlx.load(file)
        assert tokenizer.eos_token_ids == {2, 3}
        messages = [{"role": "user", "content": "hi"}]
        original = wiola_mlx.load_tokenizer(own_checkpoint)
        assert tokenizer.apply_chat_template(messages) == original.apply_chat_template(messages)
        assert tokenizer.encode("a b") == original.encode("a b")


def test_a_tokenizer_that_gguf_would_read_otherwise_is_refused(own_checkpoint, tmp_path):
    file = own_checkpoint / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    for change, word in (
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre-tokenizer"),
        ({"model": {"type": "Unigram", "vocab": []}}, "Unigram"),
    ):
        tiny.write_json(file, {**tokenizer, **change})
        with pytest.raises(WiolaError, match=word):
            to_gguf(own_checkpoint, tmp_path / "x.gguf")
    tiny.write_json(file, tokenizer)
    small = tiny.write_checkpoint(tmp_path / "small", vocab_size=200)
    with pytest.raises(WiolaError, match="259, but the embedding only 200 rows"):
        to_gguf(small, tmp_path / "x.gguf")


def test_an_embedded_tokenizer_must_be_the_vocabularys(checkpoint, tmp_path):
    to_gguf(checkpoint, tmp_path / "x.gguf")
    tokens = read_gguf(tmp_path / "x.gguf").metadata["tokenizer.ggml.tokens"]
    tokens[40], tokens[41] = tokens[41], tokens[40]
    rewrite(tmp_path / "x.gguf", tmp_path / "y.gguf", changes={"tokenizer.ggml.tokens": tokens})
    with pytest.raises(WiolaError, match="differ at token"):
        wiola_mlx.load(tmp_path / "y.gguf")


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"tokenizer.ggml.token_type": [1, 2]}, "token types"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "llama-bpe"),
        ({"tokenizer.ggml.model": "llama"}, "scores"),
        ({"tokenizer.ggml.model": "rwkv"}, "rwkv"),
    ],
)
def test_a_vocabulary_that_does_not_fit_together_is_one_line(checkpoint, tmp_path, changes, word):
    to_gguf(checkpoint, tmp_path / "x.gguf")
    rewrite(tmp_path / "x.gguf", tmp_path / "y.gguf", "huggingface", changes)
    with pytest.raises(WiolaError, match=word):
        wiola_mlx.load(tmp_path / "y.gguf")


def test_sentencepiece_models_go_out_and_come_back(own_checkpoint, tmp_path):
    import sentencepiece

    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"the little dog number {i} ran to the house" for i in range(300)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(tmp_path / "sp"),
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    model = (tmp_path / "sp.model").read_bytes()
    (own_checkpoint / "tokenizer.json").unlink()
    (own_checkpoint / "tokenizer.model").write_bytes(model)
    path = tmp_path / "x.gguf"
    to_gguf(own_checkpoint, path)
    metadata = read_gguf(path).metadata
    assert metadata["tokenizer.ggml.model"] == "llama"
    types = metadata["tokenizer.ggml.token_type"]
    assert types[:3] == [2, 3, 3] and types.count(6) == 256 and types[-1] == 5
    assert len(metadata["tokenizer.ggml.scores"]) == 300
    to_hf(path, tmp_path / "hf")
    back = sentencepiece.SentencePieceProcessor(str(tmp_path / "hf" / "tokenizer.model"))
    original = sentencepiece.SentencePieceProcessor(model_proto=model)
    for line in ("the little dog", " two  spaces", "🙂 house number 12"):
        assert back.encode(line) == original.encode(line)


def test_generate_takes_a_gguf_file(checkpoint, tmp_path, cli):
    to_gguf(checkpoint, tmp_path / "x.gguf", "q8_0")
    options = ("hi", "--max-tokens", 5, "--ignore-chat-template")
    result = cli("--model", tmp_path / "x.gguf", *options)
    assert result.returncode == 0, result.stderr
    to_mlx(tmp_path / "x.gguf", tmp_path / "mlx")
    assert result.stdout == cli("--model", tmp_path / "mlx", *options).stdout
