"""``python -m wiola_mlx COMMAND`` and ``wiola-mlx COMMAND``: ours, else mlx-lm's own."""

import importlib
import os
import sys

from . import __version__
from .console import note, run
from .errors import WiolaError
from .passthrough import checked_arguments

OURS = {
    "generate": "write on from a prompt (the built-in model needs no download)",
    "chat": "talk with a model in the terminal",
    "train": "a model of either family from scratch, on text files",
    "evaluate": "loss, perplexity and bits per byte of models on a text",
    "verify": "is cached decoding equal to the full pass, with these weights?",
    "info": "parameters, FLOPs and bytes of a model",
    "gates": "the gate of each head and layer over the tokens of a text",
    "dispatches": "GPU dispatches of a decoded token, with and without the Metal kernels",
}
MLX_LM = {
    "benchmark": "speed of prompt and generation",
    "cache_prompt": "save the cache of a prompt, for generate --prompt-cache-file",
    "convert": "mlx-lm's; but convert to-mlx, to-gguf, to-hf are ours",
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
    if command == "convert" and rest and rest[0].startswith("to-"):
        return importlib.import_module(".convert.__main__", __package__).main(rest)
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
    """Runs a command of mlx-lm with Wiola registered, after our own checks."""
    from .loading import register

    command = module.split(".")[-1]
    argv = checked_arguments(command, argv)
    register()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns of unknown model types
    sys.argv = [f"wiola-mlx {command}", *argv]
    try:
        importlib.import_module(f"mlx_lm.{module}").main()
    except ModuleNotFoundError as error:
        raise WiolaError(f"{command} needs a package: pip install {error.name}") from error
    except (ValueError, OSError, NotImplementedError) as error:  # a user's mistake, in mlx-lm
        raise WiolaError(str(error) or type(error).__name__) from error


if __name__ == "__main__":
    sys.exit(main())
