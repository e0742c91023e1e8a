"""Tokenizers: from a model folder into GGUF metadata, and back to files.

The metadata holds the vocabulary as llama.cpp reads it. Beside it lie the source's own files as
texts, so that a GGUF alone gives back the very same tokenizer.
"""

import json

from wiola_mlx.errors import WiolaError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
END_OF_TURN = ("<|end|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>")
ROLES = ("bos", "eos", "unk", "pad")
ROLE_KEYS = {
    "bos": "tokenizer.ggml.bos_token_id",
    "eos": "tokenizer.ggml.eos_token_id",
    "unk": "tokenizer.ggml.unknown_token_id",
    "pad": "tokenizer.ggml.padding_token_id",
}
HUGGINGFACE = "tokenizer.huggingface.json"
# Kept as texts under the architecture's prefix, for the way back.
SIDE_FILES = {
    "tokenizer_config.json": "source.tokenizer_config",
    "special_tokens_map.json": "source.special_tokens_map",
    "generation_config.json": "source.generation_config",
    "added_tokens.json": "source.added_tokens",
}


def parse(texts: dict[str, bytes], name: str) -> dict:
    """A JSON file of the source; {} where there is none."""
    try:
        content = json.loads(texts.get(name, b"{}").decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise WiolaError(f"{name} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise WiolaError(f"{name} is not a JSON object")
    return content


def vocabulary_metadata(texts: dict[str, bytes], config: dict, architecture: str) -> list[tuple]:
    """GGUF metadata of the source's tokenizer; empty where it has none.

    Raises:
        WiolaError: for a tokenizer that GGUF's readers would read in another way.
    """
    size = config["vocab_size"]
    if "tokenizer.model" in texts:
        from .sentencepiece_vocabulary import sentencepiece_metadata

        tokens, types, entries = sentencepiece_metadata(texts["tokenizer.model"], size)
    elif "tokenizer.json" in texts:
        tokens, types, entries = bpe_metadata(parse(texts, "tokenizer.json"), size)
    else:
        return []
    if "tokenizer.json" in texts:
        entries.append((HUGGINGFACE, "str", texts["tokenizer.json"].decode("utf-8")))
    entries += special_ids(texts, config, tokens, types, architecture)
    for name, key in SIDE_FILES.items():
        if name in texts:
            entries.append((f"{architecture}.{key}", "str", texts[name].decode("utf-8")))
    return entries


def bpe_metadata(tokenizer: dict, size: int) -> tuple[list[str], list[int], list[tuple]]:
    model = tokenizer.get("model", {})
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise WiolaError(
            f"tokenizer.json holds a {model.get('type')} model: GGUF takes byte-level BPE, "
            "or SentencePiece from a tokenizer.model beside it"
        )
    added = tokenizer.get("added_tokens") or []
    by_id = {i: token for token, i in model["vocab"].items()}
    by_id |= {entry["id"]: entry["content"] for entry in added}
    kinds = {e["id"]: CONTROL if e.get("special") else USER_DEFINED for e in added}
    tokens, types = fill(by_id, kinds, size)
    entries = [
        ("tokenizer.ggml.model", "str", "gpt2"),
        ("tokenizer.ggml.pre", "str", pre_tokenizer_name(tokenizer)),
        ("tokenizer.ggml.tokens", "[str]", tokens),
        ("tokenizer.ggml.token_type", "[i32]", types),
    ]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])]
    if merges:  # gguf-py cannot write an empty array
        entries.append(("tokenizer.ggml.merges", "[str]", merges))
    return tokens, types, entries


def pre_tokenizer_name(tokenizer: dict) -> str:
    """llama.cpp's name of the pre-tokenizer. Only GPT-2's own split is known to agree."""
    pre = tokenizer.get("pre_tokenizer") or {}
    plain = pre.get("type") == "ByteLevel" and pre.get("use_regex", True)
    if not plain or pre.get("add_prefix_space") or tokenizer.get("normalizer"):
        raise WiolaError(
            f"the tokenizer's pre-tokenizer ({pre.get('type')}) or normalizer has no GGUF name: "
            "byte-level BPE as in GPT-2 is supported, without added space or normalizer"
        )
    return "gpt-2"


def fill(by_id: dict[int, str], kinds: dict[int, int], size: int) -> tuple[list[str], list[int]]:
    """Tokens and types by id, padded to the embedding's rows."""
    largest = max(by_id, default=-1)
    if largest >= size:
        raise WiolaError(
            f"the tokenizer has a token with id {largest}, but the embedding only {size} rows"
        )
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(size)]
    types = [kinds.get(i, NORMAL) if i in by_id else UNUSED for i in range(size)]
    return tokens, types


def special_ids(
    texts: dict[str, bytes], config: dict, tokens: list[str], types: list[int], architecture: str
) -> list[tuple]:
    settings = parse(texts, "tokenizer_config.json")
    generation = parse(texts, "generation_config.json")
    ids = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    entries = []
    for role in ROLES:
        token = settings.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        named = ids.get(token, generation.get(f"{role}_token_id", config.get(f"{role}_token_id")))
        first = named[0] if isinstance(named, list) and named else named
        if isinstance(first, int) and 0 <= first < len(tokens):
            entries.append((ROLE_KEYS[role], "u32", first))
    stops = stop_ids(config, generation, [v for k, _, v in entries if k == ROLE_KEYS["eos"]])
    turn = next((ids[token] for token in END_OF_TURN if token in ids), None)
    if turn is not None:
        entries.append(("tokenizer.ggml.eot_token_id", "u32", turn))
    if stops:
        entries.append((f"{architecture}.stop_token_ids", "[i32]", sorted(stops)))
    for name in ("bos", "eos"):
        adds = bool(settings.get(f"add_{name}_token", False))
        entries.append((f"tokenizer.ggml.add_{name}_token", "bool", adds))
    if template := chat_template(texts, settings):
        entries.append(("tokenizer.chat_template", "str", template))
    return entries


def stop_ids(config: dict, generation: dict, more: list[int]) -> set[int]:
    stops = set(more)
    for value in (config.get("eos_token_id"), generation.get("eos_token_id")):
        stops.update(value if isinstance(value, list) else [value])
    return {i for i in stops if isinstance(i, int)}


def chat_template(texts: dict[str, bytes], settings: dict) -> str | None:
    if "chat_template.jinja" in texts:
        return texts["chat_template.jinja"].decode("utf-8")
    template = parse(texts, "chat_template.json").get("chat_template")
    template = template or settings.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {t.get("name"): t.get("template") for t in template}.get("default")
    return template if isinstance(template, str) else None


def texts_of(metadata: dict, architecture: str) -> dict[str, bytes]:
    """The tokenizer's files out of a GGUF's metadata; {} where it has no vocabulary."""
    texts = {}
    for name, key in SIDE_FILES.items():
        if isinstance(text := metadata.get(f"{architecture}.{key}"), str):
            texts[name] = text.encode("utf-8")
    check_vocabulary(metadata)
    if isinstance(whole := metadata.get(HUGGINGFACE), str):
        check_embedded(whole, metadata)
        texts["tokenizer.json"] = whole.encode("utf-8")
    elif metadata.get("tokenizer.ggml.model") == "gpt2":
        texts["tokenizer.json"] = rebuild(metadata).to_str().encode("utf-8")
    elif "tokenizer.ggml.tokens" in metadata:
        from .sentencepiece_vocabulary import sentencepiece_model

        texts["tokenizer.model"] = sentencepiece_model(metadata)
    else:
        return texts
    if "tokenizer_config.json" not in texts:
        settings = json.dumps(settings_of(metadata), ensure_ascii=False, indent=2)
        texts["tokenizer_config.json"] = settings.encode("utf-8")
    settings = parse(texts, "tokenizer_config.json")
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and chat_template(texts, settings) != template:
        texts["chat_template.jinja"] = template.encode("utf-8")
    return texts


def check_vocabulary(metadata: dict):
    """WiolaError unless tokens, merges, scores and types are lists of what they should be."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return
    kinds = {"tokens": str, "merges": str, "scores": float, "token_type": int}
    for name, kind in kinds.items():
        values = metadata.get(f"tokenizer.ggml.{name}", [])
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise WiolaError(f"the GGUF's tokenizer.ggml.{name} is not a list of {kind.__name__}")
    if len(metadata.get("tokenizer.ggml.token_type", tokens)) != len(tokens):
        raise WiolaError("the GGUF's tokens and token types are not of the same number")


def check_embedded(whole: str, metadata: dict):
    """The embedded tokenizer.json and the vocabulary beside it must be the same."""
    tokenizer = parse({"tokenizer.json": whole.encode("utf-8")}, "tokenizer.json")
    tokens = metadata.get("tokenizer.ggml.tokens")
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict) or not isinstance(tokens, list):
        return
    for token, i in vocab.items():
        if not (isinstance(i, int) and 0 <= i < len(tokens) and tokens[i] == token):
            raise WiolaError(
                f"the GGUF's tokenizer.json and its vocabulary differ at token {token!r}"
            )


def settings_of(metadata: dict) -> dict:
    """A tokenizer_config.json for a GGUF that has none."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        settings["tokenizer_class"] = "LlamaTokenizer"
        for name in ("bos", "eos"):
            adds = metadata.get(f"tokenizer.ggml.add_{name}_token", False)
            settings[f"add_{name}_token"] = adds
    for role, key in ROLE_KEYS.items():
        i = metadata.get(key)
        if isinstance(i, int) and 0 <= i < len(tokens):
            settings[f"{role}_token"] = tokens[i]
    return settings


def rebuild(metadata: dict):
    """A ``tokenizers.Tokenizer`` from a GGUF's tokens, merges and pre-tokenizer alone."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if metadata.get("tokenizer.ggml.pre") != "gpt-2":
        raise WiolaError(f"unknown pre-tokenizer: {metadata.get('tokenizer.ggml.pre')!r}")
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    try:
        merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", [])]
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    except Exception as error:  # tokenizers raises bare Exception
        raise WiolaError(f"the GGUF's tokenizer cannot be built: {error}") from error
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, found in zip(tokens, types, strict=True)
            if found == kind
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    return tokenizer
