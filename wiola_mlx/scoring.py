"""How well a model predicts a text: the loss of every token, in windows."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np


@dataclass
class Score:
    """Sums over the scored tokens.

    ``loss`` is the mean in nats a token. ``standard_error`` is that of the loss, from the spread
    between windows (tokens of one window are not independent); None for a single window.
    """

    loss: float
    tokens: int
    standard_error: float | None

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    def bits_per_byte(self, size: int) -> float:
        return self.loss * self.tokens / (math.log(2) * size)


def token_losses(model, inputs: mx.array, targets: mx.array) -> mx.array:
    """Cross entropy of each target in nats, [B, T] float32; ``inputs`` and ``targets`` [B, T]."""
    return nn.losses.cross_entropy(model(inputs).astype(mx.float32), targets)


def window_spans(predictions: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, first scored, end) of windows that together score each position once."""
    scored = 0
    while scored < predictions:
        end = min(scored + (window if scored == 0 else stride), predictions)
        yield max(0, end - window), scored, end
        scored = end


def score_tokens(
    model,
    ids,
    window: int,
    stride: int | None = None,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> Score:
    """Scores every token of ``ids`` but the first, which is only context.

    Args:
        ids: token ids [N], a NumPy array (memory-mapped, too); N is 2 or more.
        window: tokens that the model sees at most.
        stride: tokens that a window scores; the others are context from the window before it.
            None means ``window``: no overlap.
        batch_size: windows at a time.
        progress: called with (tokens scored, tokens in all).
    """
    predictions = len(ids) - 1
    spans = list(window_spans(predictions, window, stride or window))
    sums, counts = [], []
    for i in range(0, len(spans), batch_size):
        batch = spans[i : i + batch_size]
        sums += score_windows(model, ids, batch)
        counts += [end - first for _, first, end in batch]
        if progress:
            progress(sum(counts), predictions)
    return summarize(np.array(sums), np.array(counts))


def score_windows(model, ids, spans: list[tuple[int, int, int]]) -> list[float]:
    """The summed loss of each window. Pads stand on the right, where no scored token sees them."""
    length = max(end - start for start, _, end in spans)
    rows = np.zeros((len(spans), length + 1), np.int32)
    scored = np.zeros((len(spans), length), bool)
    for row, mask, (start, first, end) in zip(rows, scored, spans, strict=True):
        row[: end - start + 1] = ids[start : end + 1]
        mask[first - start : end - start] = True
    tokens = mx.array(rows)
    losses = token_losses(model, tokens[:, :-1], tokens[:, 1:])
    return mx.where(mx.array(scored), losses, 0.0).sum(axis=1).tolist()


def summarize(sums: np.ndarray, counts: np.ndarray) -> Score:
    total, windows = int(counts.sum()), len(counts)
    loss = float(sums.sum() / total)
    error = None
    if windows > 1:
        spread = np.square(sums - loss * counts).sum() * windows / (windows - 1)
        error = float(math.sqrt(spread) / total)
    return Score(loss, total, error)
