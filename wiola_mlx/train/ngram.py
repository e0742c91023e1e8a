"""An n-gram model on the same tokens: what a trained model must beat.

Interpolated Witten-Bell smoothing (Witten and Bell 1991), from unigrams on a uniform base:
p(w | h) = (c(h w) + t(h) · p(w | h')) / (c(h) + t(h)), where t(h) is the number of different tokens
seen after h, and h' is h without its first token.
"""

import numpy as np


def ngram_losses(train, valid, vocab_size: int, order: int = 3) -> list[float]:
    """Loss of the 1-gram to ``order``-gram model, in nats a token.

    Args:
        train, valid: token ids [N]. The first ``order`` − 1 of ``valid`` only give context.
        order: at most as many as fit in 63 bits: order · log2(vocab_size) < 63.
    """
    train, valid = (np.asarray(ids).astype(np.int64) for ids in (train, valid))
    probability = np.full(len(valid) - order + 1, 1 / vocab_size)
    losses = []
    for n in range(1, order + 1):
        # The same targets in every order, so that the losses can be compared.
        asked = grams(valid, n, vocab_size)[order - n :]
        probability = witten_bell(grams(train, n, vocab_size), asked, vocab_size, probability)
        losses.append(float(-np.log(probability).mean()))
    return losses


def grams(ids: np.ndarray, n: int, vocab_size: int) -> np.ndarray:
    """One number for each run of ``n`` ids, [N − n + 1]; the last id is its lowest digit."""
    codes = np.zeros(len(ids) - n + 1, np.int64)
    for i in range(n):
        codes = codes * vocab_size + ids[i : len(ids) - n + 1 + i]
    return codes


def witten_bell(seen, asked, vocab_size: int, lower: np.ndarray) -> np.ndarray:
    kinds, counts = np.unique(seen, return_counts=True)
    contexts, first = np.unique(kinds // vocab_size, return_index=True)  # kinds are sorted
    followers = np.diff(np.append(first, len(kinds)))
    totals = np.add.reduceat(counts, first)
    count = look_up(kinds, counts, asked)
    total, different = (look_up(contexts, t, asked // vocab_size) for t in (totals, followers))
    # A context that was never seen leaves the lower order as it is.
    return np.where(total, (count + different * lower) / np.maximum(total + different, 1), lower)


def look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)
