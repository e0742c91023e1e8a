"""Checkpoints that tie the head to the embedding, and yet carry a copy of it."""

import mlx.core as mx

EMBEDDING = "model.embed_tokens."
HEAD = "lm_head."


def drop_tied_head(weights: dict) -> dict:
    """``weights`` without the head's tensors, quantized ones included.

    Raises:
        ValueError: if a tensor of the head differs from the embedding's.
    """
    for name in weights:
        if not name.startswith(HEAD):
            continue
        twin = weights.get(EMBEDDING + name[len(HEAD) :])
        head = weights[name]
        if twin is None or twin.shape != head.shape or not mx.array_equal(twin, head).item():
            raise ValueError(
                f"{name} differs from {EMBEDDING}{name[len(HEAD) :]}, but the config ties them: "
                'set "tie_word_embeddings": false in config.json if the head is its own'
            )
    return {name: array for name, array in weights.items() if not name.startswith(HEAD)}
