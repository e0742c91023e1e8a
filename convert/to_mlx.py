"""Released PyTorch weights (or an MLX folder) to an MLX folder, quantized if asked."""

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from wiola_mlx.errors import WiolaError
from wiola_mlx.loading import load_model, resolve

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
COPIED = ("tokenizer*", "special_tokens_map.json", "generation_config.json", "chat_template*")


def to_mlx(source: str, target: str, bits: int | None = None, group_size: int = 64, dtype=None):
    """Writes ``target``, a folder that ``wiola_mlx.load`` and mlx-lm read.

    Args:
        source: a model folder, a Hub id or "builtin".
        target: a folder that does not exist yet; it appears only when it is complete.
        bits, group_size: affine quantization; gates and norms are never quantized, and a layer
            that the group size does not divide stays as it is.
        dtype: an MLX floating dtype; by default the tensors' own.

    Returns:
        The saved config.
    """
    target = Path(target).expanduser()
    if target.exists():
        raise WiolaError(f"{target} exists already; give the name of a new folder")
    if bits is not None and (bits not in BITS or group_size not in GROUP_SIZES):
        raise WiolaError(f"bits must be one of {BITS} and the group size one of {GROUP_SIZES}")
    folder = resolve(source)
    model, config = load_model(folder, dtype=dtype)
    if bits is not None and "quantization" in config:
        raise WiolaError(f"{folder} is quantized already; quantize from the original weights")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            config = write(temporary, folder, model, config, bits, group_size)
            temporary.chmod(0o755)
            os.rename(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise WiolaError(f"{target} cannot be written: {error.strerror or error}") from error
    return config


def write(target: Path, folder: Path, model, config: dict, bits: int | None, group_size: int):
    from mlx_lm.utils import quantize_model, save_config, save_model

    if bits is not None:
        with contextlib.redirect_stdout(sys.stderr):  # mlx-lm prints the bits per weight
            model, config = quantize_model(model, dict(config), group_size, bits)
    save_model(target, model)
    save_config(dict(config), target / "config.json")
    for pattern in COPIED:
        for file in folder.glob(pattern):
            shutil.copyfile(file, target / file.name)
    return config
