"""The loss curve of a run as a picture, with the released 13M run's beside it."""

from ..plotting import new_figure, save_figure

RELEASED = {  # step → validation loss, from the trainer_state of the released 13M model
    1_000: 3.011,
    2_000: 2.396,
    5_000: 1.988,
    10_000: 1.822,
    15_000: 1.747,
    20_000: 1.7258,
}
RELEASED_TOKENS = 32 * 512  # a step


def draw_curve(rows: list[dict], path: str, baselines: list[float] | None = None):
    """Draws metrics over tokens seen.

    Args:
        rows: of ``metrics.jsonl``: "tokens" with "loss" or "valid_loss".
        path: the picture to write.
        baselines: losses of the 1-gram, 2-gram, … model.
    """
    figure = new_figure(path)
    axes = figure.subplots()
    for key, label in (("loss", "training"), ("valid_loss", "validation")):
        points = [(row["tokens"], row[key]) for row in rows if key in row]
        if points:
            axes.plot(
                *zip(*points, strict=True), label=label, marker="o" if len(points) < 9 else ""
            )
    released = [(step * RELEASED_TOKENS, loss) for step, loss in RELEASED.items()]
    axes.plot(*zip(*released, strict=True), "k--o", label="released 13M, its validation")
    for n, loss in enumerate(baselines or [], 1):
        axes.axhline(loss, linestyle=":", color=f"C{n + 1}", label=f"{n}-gram")
    axes.set(xlabel="tokens seen", ylabel="loss (nats a token)", xscale="log")
    axes.legend()
    save_figure(figure, path)
