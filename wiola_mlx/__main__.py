"""``python -m wiola_mlx COMMAND`` and ``wiola-mlx COMMAND``: ours, else mlx-lm's own."""

import importlib
import itertools
import os
import sys
from pathlib import Path

from . import __version__
from .console import note, run
from .errors import WiolaError

OURS = {
    "evaluate": "loss, perplexity and bits per byte of models on a text",
    "generate": "write on from a prompt (the built-in model needs no download)",
    "gates": "the gate of each head and layer over the tokens of a text",
    "info": "parameters, FLOPs and bytes of a model",
    "train": "a model of either family from scratch, on text files",
    "verify": "is cached decoding equal to the full pass, with these weights?",
}
MLX_LM = {
    "benchmark": "speed of prompt and generation",
    "cache_prompt": "save the cache of a prompt, for generate --prompt-cache-file",
    "chat": "chat in the terminal",
    "convert": "quantize, or change the dtype",
    "fuse": "merge LoRA adapters into a model",
    "lm_eval": "benchmarks of lm-evaluation-harness (mlx-lm calls it evaluate)",
    "lora": "fine-tune: LoRA, DoRA or full",
    "manage": "list and delete downloaded models",
    "perplexity": "perplexity on a data set",
    "quant.dwq": "quantization with distillation",
    "quant.dynamic_quant": "quantization with bits chosen by layer",
    "quant.gptq": "GPTQ quantization",
    "server": "an OpenAI-compatible server",
    "upload": "upload a model to the Hub",
}
RENAMED = {"lm_eval": "evaluate"}  # our evaluate took the name
MODEL_OPTIONS = ("--model", "--hf-path", "--mlx-path", "--draft-model")


def usage() -> str:
    def rows(commands: dict) -> str:
        return "\n".join(f"  {name.split('.')[-1]:14} {text}" for name, text in commands.items())

    return (
        "usage: python -m wiola_mlx COMMAND [options]\n\n"
        f"Wiola small language models on MLX, version {__version__}.\n\n"
        f"commands:\n{rows(OURS)}\n\n"
        f"mlx-lm's own commands, which know Wiola here:\n{rows(MLX_LM)}\n\n"
        "COMMAND --help tells what each takes."
    )


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    command, rest = (argv[0], argv[1:]) if argv else (None, [])
    if command in (None, "-h", "--help"):
        print(usage())
        return 0 if command else 2
    if command == "--version":
        print(f"wiola-mlx {__version__}")
        return 0
    if command in OURS:
        return our_module(command).main(rest)
    modules = {name.split(".")[-1]: RENAMED.get(name, name) for name in MLX_LM}
    if command not in modules:
        note(f"error: there is no command {command!r}; `python -m wiola_mlx --help` lists them")
        return 2
    return run(lambda: run_mlx_lm(modules[command], rest))


def our_module(command: str):
    module = importlib.import_module(f".{command}", __package__)
    is_package = hasattr(module, "__path__")
    return importlib.import_module(f"{module.__name__}.__main__") if is_package else module


def run_mlx_lm(module: str, argv: list[str]):
    """Runs a command of mlx-lm with Wiola registered, after our own checks of the model folder."""
    from .loading import register

    refuse_dead_options(argv)
    check_folders(argv)
    register()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns of unknown model types
    sys.argv = [f"wiola-mlx {module.split('.')[-1]}", *argv]
    try:
        importlib.import_module(f"mlx_lm.{module}").main()
    except (ValueError, OSError, NotImplementedError) as error:  # a user's mistake, in mlx-lm
        raise WiolaError(str(error) or type(error).__name__) from error


def refuse_dead_options(argv: list[str]):
    if any(arg.split("=")[0] == "--max-kv-size" for arg in argv):
        raise WiolaError(
            "--max-kv-size is not supported: a rotating cache forgets tokens that the running "
            "sums remember; use --kv-bits for a smaller cache"
        )


def check_folders(argv: list[str]):
    """mlx-lm reads any file it finds; a Wiola folder on the command line is checked first."""
    from .checkpoint import open_checkpoint, read_json

    words = [word for arg in argv for word in arg.split("=", 1)]
    for option, value in itertools.pairwise(words):
        config = Path(value).expanduser() / "config.json"
        if option in MODEL_OPTIONS and config.is_file():
            if read_json(config).get("model_type") == "wiola":
                open_checkpoint(config.parent)


if __name__ == "__main__":
    sys.exit(main())
