"""The files beside the weights: config, tokenizer files, generation config, and a model card."""

import json
import re
from pathlib import Path

from wiola_mlx import __version__

from .output import write_json
from .source import Source
from .tokenizer import parse

DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
DTYPE_KEYS = ("torch_dtype", "dtype")
FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.S)
LICENSE = re.compile(r"^license: *([\w.-]+)\s*$", re.M)
# What transformers 5 and mlx-lm write, and transformers 4 does not know.
NEW_CLASSES = ("TokenizersBackend", "PreTrainedTokenizer")
NEW_KEYS = ("backend", "is_local", "local_files_only")
ROLE_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


def config_with_dtype(config: dict, kind: str) -> dict:
    """The config with the dtype of the tensors, under the key that it has."""
    keys = [key for key in DTYPE_KEYS if key in config] or ["torch_dtype"]
    return {**config, **dict.fromkeys(keys, DTYPE_NAMES[kind])}


def write_texts(folder: Path, source: Source):
    """The source's tokenizer files and generation config, so that transformers 4 reads them."""
    for name, content in source.texts.items():
        if name == "tokenizer_config.json":
            (folder / name).write_bytes(tokenizer_config(source, content))
        elif name != "README.md":
            (folder / name).write_bytes(content)
    if "tokenizer_config.json" in source.texts and "special_tokens_map.json" not in source.texts:
        write_json(folder / "special_tokens_map.json", special_tokens_map(source))


def tokenizer_config(source: Source, content: bytes) -> bytes:
    """The file as it is, unless a newer transformers has rewritten it."""
    settings = parse(source.texts, "tokenizer_config.json")
    older = dict(settings)
    if settings.get("tokenizer_class") in NEW_CLASSES:
        older["tokenizer_class"] = "PreTrainedTokenizerFast"
    for key in NEW_KEYS:
        older.pop(key, None)
    if isinstance(extra := settings.get("extra_special_tokens"), list):
        older["additional_special_tokens"] = extra
        older["extra_special_tokens"] = {}
    if older == settings:
        return content
    return (json.dumps(older, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def special_tokens_map(source: Source) -> dict:
    settings = json.loads(tokenizer_config(source, source.texts["tokenizer_config.json"]))
    names = (*ROLE_TOKENS, "additional_special_tokens")
    return {name: settings[name] for name in names if settings.get(name)}


def write_card(folder: Path, source: Source, layout: str, facts: list[str]):
    """README.md: what this is, how it was made, and the source's own card below it."""
    card = source.texts.get("README.md", b"").decode("utf-8", errors="replace")
    matter = FRONT_MATTER.match(card)
    license_line = LICENSE.search(matter[1]) if matter else None
    lines = ["---", *([f"license: {license_line[1]}"] if license_line else [])]
    lines += [
        f"library_name: {'mlx' if layout == 'MLX' else 'transformers'}",
        "pipeline_tag: text-generation",
        "tags:",
        "- wiola",
        *(["- mlx"] if layout == "MLX" else []),
        "---",
        "",
        f"# {source.name}",
        "",
        f"A Wiola language model in the {layout} layout, converted from `{source.name}` by "
        f"wiola_mlx {__version__}.",
        "",
        *(f"- {fact}" for fact in facts),
        "",
    ]
    if layout == "MLX":
        lines += [
            "    import wiola_mlx",
            f'    model, tokenizer = wiola_mlx.load("{folder.name}")',
            "",
        ]
    if body := FRONT_MATTER.sub("", card).strip():
        lines += ["## The source's card", "", body, ""]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")
