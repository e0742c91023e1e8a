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
DEAD = {
    "--max-kv-size": "a rotating cache forgets tokens that the running sums remember; "
    "use --kv-bits for a smaller cache",
}
DEAD_IN = {
    ("fuse", "--export-gguf"): "mlx-lm would label the file as a Llama",
    ("server", "--draft-model"): "the server's prefix reuse cuts caches of drafted text wrongly",
}


def checked_arguments(command: str, argv: list[str]) -> list[str]:
    """The arguments for mlx-lm, with ``builtin`` as its folder.

    Raises:
        WiolaError: for an option that could not work, or a model folder that is not whole or safe.
    """
    words = [piece for word in argv for piece in split_option(word)]
    for word in words:
        for option, reason in DEAD.items():
            if means(word, option) and len(word) > len("--max-"):  # shorter is --max-tokens, too
                raise WiolaError(f"{option} is not supported: {reason}")
        for (name, option), reason in DEAD_IN.items():
            if command == name and means(word, option):
                raise WiolaError(f"{command} {option} is not supported: {reason}")
    checked = []
    for option, value in itertools.pairwise(["", *words]):
        if any(means(option, name) for name in MODEL_OPTIONS):
            value = str(checked_model(value))
        elif option == "-c" or means(option, "--config"):
            check_configuration(Path(value))
        checked.append(value)
    if command == "fuse" and not any(means(word, "--dequantize") for word in words):
        note_rounding(checked)
    return checked


def split_option(word: str) -> list[str]:
    """``--model=X`` and ``-cX`` in two; other options stay whole: a value may begin with a dash."""
    option, equals, value = word.partition("=")
    known = (*MODEL_OPTIONS, "--config")
    if equals and any(means(option, name) for name in known):
        return [option, value]
    if word.startswith("-c") and len(word) > 2:
        return ["-c", word[2:]]
    return [word]


def means(word: str, option: str) -> bool:
    """Whether argparse takes ``word`` for ``option``: shortened, perhaps, and with =VALUE."""
    name = word.partition("=")[0]
    return name == option or (len(name) > 3 and name.startswith("--") and option.startswith(name))


def checked_model(value: str) -> Path | str:
    """The folder, if it is one; a Hub id as it is."""
    from .loading import BUILTIN, HUB_ID, resolve

    if value.endswith(".gguf"):
        raise WiolaError(
            f"mlx-lm's commands read folders, not {value}: first "
            "python -m wiola_mlx.convert to-mlx FILE.gguf FOLDER"
        )
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

    if not path.is_file():
        raise WiolaError(f"there is no configuration file {path}")
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise WiolaError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    model = settings.get("model") if isinstance(settings, dict) else None
    if isinstance(model, str) and str(checked_model(model)) != model:
        raise WiolaError(f"{path} names the model {model!r}: give it with --model {model} instead")


def note_rounding(argv: list[str]):
    folders = [Path(word) / "config.json" for word in argv]
    if any(file.is_file() and "quantization" in read_json(file) for file in folders):
        note(
            "note: fusing into a quantized model rounds the adapter's change; "
            "--dequantize keeps it, in a larger model"
        )
