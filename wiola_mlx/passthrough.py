"""What is checked before one of mlx-lm's own commands runs on a Wiola model.

mlx-lm reads every file it finds and takes some options that cannot work; both are found here, also
where an option is shortened or a model is named in a configuration file.
"""

import itertools
from pathlib import Path

from .checkpoint import open_checkpoint, read_json
from .console import note
from .errors import WiolaError

MODEL_OPTIONS = ("--model", "--hf-path", "--draft-model", "--quantized-model", "--path")
CONFIG_OPTIONS = ("--config", "-c")
DEAD = {
    "--max-kv-size": "a rotating cache forgets tokens that the running sums remember; "
    "use --kv-bits for a smaller cache",
    "--export-gguf": "mlx-lm would label the file as a Llama",
}
DEAD_IN = {
    ("server", "--draft-model"): "the server's prefix reuse cuts caches of drafted text wrongly",
}


def checked_arguments(command: str, argv: list[str]) -> list[str]:
    """The arguments for mlx-lm, with ``builtin`` as its folder.

    Raises:
        WiolaError: for an option that could not work, or a model folder that is not whole or safe.
    """
    argv = [piece for word in argv for piece in split_option(word)]
    for word in argv:
        for option, reason in DEAD.items():
            if means(word, option):
                raise WiolaError(f"{option} is not supported: {reason}")
        for (name, option), reason in DEAD_IN.items():
            if command == name and means(word, option):
                raise WiolaError(f"{command} {option} is not supported: {reason}")
    for place, (option, value) in enumerate(itertools.pairwise(argv), 1):
        if any(means(option, name) for name in MODEL_OPTIONS):
            argv[place] = str(checked_model(value))
        elif option in CONFIG_OPTIONS and Path(value).is_file():
            check_configuration(Path(value))
    if command == "fuse" and not any(means(word, "--dequantize") for word in argv):
        note_rounding(argv)
    return argv


def split_option(word: str) -> list[str]:
    return word.split("=", 1) if word.startswith("--") else [word]


def means(word: str, option: str) -> bool:
    """Whether argparse takes ``word`` for ``option``: it may be shortened."""
    return word == option or (len(word) > 3 and word.startswith("--") and option.startswith(word))


def checked_model(value: str) -> Path | str:
    """The folder, if it is one; a Hub id as it is."""
    from .loading import BUILTIN, HUB_ID, resolve

    if value != BUILTIN and not Path(value).expanduser().exists():
        if HUB_ID.fullmatch(value):
            return value
        raise WiolaError(f"there is no model folder {value!r}, and it is no Hub id (name/model)")
    folder = resolve(value)
    config = folder / "config.json"
    if config.is_file() and read_json(config).get("model_type") == "wiola":
        read_too = [n for n in open_checkpoint(folder).strays() if n.startswith("model")]
        if read_too:
            raise WiolaError(
                f"mlx-lm would read {', '.join(read_too)}, too, which is no part of the model "
                f"in {folder}: move it away"
            )
    return folder


def check_configuration(path: Path):
    """The model that a YAML configuration of ``lora`` names, by the same rules."""
    import yaml

    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise WiolaError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if isinstance(settings, dict) and isinstance(settings.get("model"), str):
        checked_model(settings["model"])


def note_rounding(argv: list[str]):
    folders = [Path(word) / "config.json" for word in argv]
    if any(file.is_file() and "quantization" in read_json(file) for file in folders):
        note(
            "note: fusing into a quantized model rounds the adapter's change; "
            "--dequantize keeps it, in a larger model"
        )
