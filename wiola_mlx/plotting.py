"""Pictures, with matplotlib if it is installed."""

import os
from pathlib import Path

from .errors import WiolaError

FORMATS = (".png", ".svg", ".pdf")


def new_figure(path: str | Path, width: float = 8.0, height: float = 5.0):
    """An empty matplotlib figure that needs no screen, after ``path`` and the library are checked.

    Raises:
        WiolaError: if matplotlib is missing or the file's name is of no picture.
    """
    if Path(path).suffix not in FORMATS:
        raise WiolaError(f"a picture's name ends in {', '.join(FORMATS)}, not {Path(path).name}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise WiolaError(
            "pictures need matplotlib: pip install matplotlib (or wiola-mlx[plot])"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure, path: str | Path):
    """Writes the picture; complete, or not at all."""
    path = Path(path)
    temporary = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        figure.savefig(temporary, dpi=150)
        os.replace(temporary, path)
    except OSError as error:
        raise WiolaError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
