"""SentencePiece models: their vocabulary as GGUF metadata, and a model file out of it."""

from wiola_mlx.errors import WiolaError

from .tokenizer import NORMAL, UNUSED

NAMES = {2: "llama", 1: "t5"}  # SentencePiece's BPE and unigram models
UNUSED_SCORE = -1000.0


def sentencepiece_metadata(model: bytes, size: int) -> tuple[list[str], list[int], list[tuple]]:
    """Tokens, types (SentencePiece's own numbers are GGUF's) and the metadata that holds them."""
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2 as protocol

    parsed = protocol.ModelProto()
    try:
        parsed.ParseFromString(model)
    except DecodeError as error:
        raise WiolaError(f"tokenizer.model is not a SentencePiece model: {error}") from error
    kind = parsed.trainer_spec.model_type
    if kind not in NAMES or not parsed.pieces:
        raise WiolaError("tokenizer.model is neither a BPE nor a unigram SentencePiece model")
    if len(parsed.pieces) > size:
        raise WiolaError(
            f"the tokenizer has {len(parsed.pieces)} tokens, but the embedding only {size} rows"
        )
    more = range(len(parsed.pieces), size)
    tokens = [piece.piece for piece in parsed.pieces] + [f"[PAD{i}]" for i in more]
    scores = [piece.score for piece in parsed.pieces] + [UNUSED_SCORE for _ in more]
    types = [piece.type for piece in parsed.pieces] + [UNUSED for _ in more]
    normalizer = parsed.normalizer_spec
    return (
        tokens,
        types,
        [
            ("tokenizer.ggml.model", "str", NAMES[kind]),
            ("tokenizer.ggml.pre", "str", "default"),
            ("tokenizer.ggml.tokens", "[str]", tokens),
            ("tokenizer.ggml.scores", "[f32]", scores),
            ("tokenizer.ggml.token_type", "[i32]", types),
            ("tokenizer.ggml.add_space_prefix", "bool", normalizer.add_dummy_prefix),
            (
                "tokenizer.ggml.remove_extra_whitespaces",
                "bool",
                normalizer.remove_extra_whitespaces,
            ),
        ],
    )


def sentencepiece_model(metadata: dict) -> bytes:
    """A ``tokenizer.model`` from a GGUF's tokens, scores and types."""
    from sentencepiece import sentencepiece_model_pb2 as protocol

    name = metadata.get("tokenizer.ggml.model")
    kinds = {value: key for key, value in NAMES.items()}
    if name not in kinds:
        raise WiolaError(f"the GGUF's tokenizer is of an unknown kind: {name!r}")
    if len(metadata["tokenizer.ggml.tokens"]) != len(metadata.get("tokenizer.ggml.scores", [])):
        raise WiolaError("the GGUF's tokens and scores are not of the same number")
    try:
        return build(protocol, metadata, kinds[name]).SerializeToString()
    except (TypeError, ValueError) as error:
        raise WiolaError(f"the GGUF's SentencePiece vocabulary is damaged: {error}") from error


def build(protocol, metadata: dict, kind: int):
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    model = protocol.ModelProto()
    model.trainer_spec.model_type = kind
    model.trainer_spec.byte_fallback = 6 in types
    model.normalizer_spec.add_dummy_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    model.normalizer_spec.remove_extra_whitespaces = metadata.get(
        "tokenizer.ggml.remove_extra_whitespaces", False
    )
    model.normalizer_spec.name = "identity"
    for token, score, token_type in zip(tokens, scores, types, strict=True):
        if token_type != UNUSED:
            model.pieces.add(piece=token, score=score, type=token_type)
    return model
