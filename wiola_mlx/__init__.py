"""Wiola small language models on MLX.

    import wiola_mlx
    model, tokenizer = wiola_mlx.load("builtin")
    print(wiola_mlx.generate_text(model, tokenizer, "Once upon a time", temp=0.8))

Nothing happens at import: MLX is loaded when a name below is first used.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "WiolaError": "errors",
    "load": "loading",
    "load_model": "loading",
    "load_tokenizer": "loading",
    "register": "loading",
    "generate_text": "generation",
    "stream_text": "generation",
    "load_prompt_cache": "prompt_cache",
    "save_prompt_cache": "prompt_cache",
}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str):
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
