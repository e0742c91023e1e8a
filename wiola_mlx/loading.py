"""From a folder or a Hub id to a model and its tokenizer: strict, and nothing from it is run."""

import contextlib
import math
import os
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import get_args

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .checkpoint import Checkpoint, open_checkpoint, read_config, read_json, refuse_pointer
from .errors import WiolaError
from .models import wiola

BUILTIN = "builtin"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.json", "model*.safetensors", "tokenizer.model", "*.jinja"]
FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def register():
    """Makes mlx-lm in this process know ``model_type: wiola``, for all of its functions."""
    sys.modules["mlx_lm.models.wiola"] = wiola


def load(path_or_hub_id: str | os.PathLike, adapter_path=None, dtype: mx.Dtype | None = None):
    """A model and its tokenizer, ready to generate.

    Args:
        path_or_hub_id: a model folder (released PyTorch layout or MLX), a .gguf file, a Hugging
            Face Hub id such as "name/model", or "builtin".
        adapter_path: a folder with LoRA adapters that mlx-lm trained.
        dtype: cast floating-point weights to this; by default they stay as stored.

    Returns:
        (model, tokenizer): an ``mlx.nn.Module`` and an mlx-lm ``TokenizerWrapper``.

    Raises:
        WiolaError: for anything wrong with the files, in one line.
    """
    folder = resolve(path_or_hub_id)
    model, _ = load_model(folder, dtype=dtype)
    if adapter_path is not None:
        attach_adapters(model, Path(adapter_path).expanduser())
    tokenizer = load_tokenizer(folder)
    if len(tokenizer.get_vocab()) > model.args.vocab_size:
        raise WiolaError(
            f"the tokenizer in {folder} has {len(tokenizer.get_vocab())} tokens, "
            f"but the model only {model.args.vocab_size}"
        )
    return model, tokenizer


def load_model(path_or_hub_id: str | os.PathLike, dtype: mx.Dtype | None = None):
    """A model without its tokenizer: (model, config). Arguments and errors as for ``load``."""
    path = resolve(path_or_hub_id)
    checkpoint, weights = (read_gguf if is_gguf(path) else read_folder)(path)
    model = build_model(checkpoint)
    try:
        weights = model.sanitize(weights)
    except ValueError as error:
        raise WiolaError(str(error)) from error
    quantize_like(model, weights, checkpoint.config)
    compare(dict(tree_flatten(model.parameters())), weights)
    read_weights(model, weights, dtype)
    model.eval()
    return model, checkpoint.config


def is_gguf(path: Path) -> bool:
    return path.is_file() and path.suffix == ".gguf"


def read_folder(folder: Path) -> tuple[Checkpoint, dict[str, mx.array]]:
    checkpoint = open_checkpoint(folder)
    return checkpoint, lazy_weights(checkpoint)


def read_gguf(path: Path) -> tuple[Checkpoint, dict[str, mx.array]]:
    from .convert.gguf_model import read_weights

    weights, config = read_weights(path)
    return Checkpoint(path, config, dict.fromkeys(weights, path)), weights


def resolve(path_or_hub_id: str | os.PathLike) -> Path:
    """The folder of a local path, of the built-in model, or of a download from the Hub."""
    name = str(path_or_hub_id)
    if name == BUILTIN:  # a folder of this name is ./builtin
        return Path(__file__).parent / "builtin"
    path = Path(name).expanduser()
    if name and os.path.exists(path):  # unlike path.exists(), no error for an endless name
        return path
    if not HUB_ID.fullmatch(name):
        raise WiolaError(f"there is no model folder {name!r}, and it is no Hub id (name/model)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise WiolaError(
            f"there is no folder {name!r}, and it could not be had from the Hub: {reason}"
        ) from error


def build_model(checkpoint: Checkpoint) -> nn.Module:
    """The model that the config describes; its weights are not computed."""
    config = checkpoint.config
    try:
        check_types(wiola.family_module(config).ModelArgs, config)
        if config.get("rope_scaling"):
            raise ValueError("rope_scaling is set, which Wiola does not have")
        args = wiola.ModelArgs.from_dict(config)
        layers = args.num_hidden_layers
        if layers > len(checkpoint.files):
            raise ValueError(f"num_hidden_layers is {layers}, more than there are tensors")
        return wiola.Model(args)
    except (ValueError, TypeError, OverflowError, ZeroDivisionError) as error:
        raise WiolaError(f"{checkpoint.folder / 'config.json'}: {error}") from error


def check_types(args_class: type, config: dict):
    """ValueError for a config value that is not of its field's type, or out of all bounds."""
    for field in fields(args_class):
        kinds = get_args(field.type) or (field.type,)
        value = config.get(field.name, field.default)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if float in kinds:
            fits, wanted = number and math.isfinite(value), "a number"
        elif int in kinds:
            fits = number and isinstance(value, int) and value > 0
            wanted = "a whole number above 0"
        else:
            fits, wanted = isinstance(value, kinds), f"a {kinds[0].__name__}"
        if not fits and not (value is None and NoneType in kinds):
            raise ValueError(f"{field.name} is {value!r}, which is not {wanted}")


def lazy_weights(checkpoint: Checkpoint) -> dict[str, mx.array]:
    """All tensors, none of them read yet. Nothing else may refer to them, or memory doubles."""
    weights = {}
    for file in sorted(set(checkpoint.files.values())):
        try:
            arrays = mx.load(str(file))
        except (RuntimeError, ValueError) as error:
            raise WiolaError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
        weights |= {name: arrays[name] for name, home in checkpoint.files.items() if home == file}
    return weights


def quantize_like(model: nn.Module, weights: dict, config: dict):
    """Quantizes the layers whose ``.scales`` are there, as the config or the shapes say."""
    from mlx_lm.utils import infer_quant_config

    quantization = config.get("quantization")
    if quantization is None:
        return
    if not isinstance(quantization, dict):
        raise WiolaError(f"the config's quantization is {quantization!r}, not an object")

    def params(path: str, module: nn.Module):
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        own = quantization.get(path)
        return own if isinstance(own, dict) else infer_quant_config(path, module, weights)

    try:
        nn.quantize(model, class_predicate=params)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise WiolaError(f"the quantized weights do not fit the config: {error}") from error


def compare(wanted: dict[str, mx.array], found: dict[str, mx.array]):
    """WiolaError that names every tensor that is missing, extra or of another shape."""
    shapes = [
        f"{name} is {list(found[name].shape)}, the config needs {list(array.shape)}"
        for name, array in wanted.items()
        if name in found and found[name].shape != array.shape
    ]
    kinds = [
        f"{name} is {found[name].dtype}"
        for name, array in wanted.items()
        if name in found
        and (found[name].dtype in FLOATS) != (array.dtype in FLOATS)  # packed weights are integers
    ]
    problems = [
        f"{what} ({len(names)}): {', '.join(names)}"
        for what, names in (
            ("missing tensors", sorted(wanted.keys() - found.keys())),
            ("extra tensors", sorted(found.keys() - wanted.keys())),
            ("tensors of the wrong shape", shapes),
            ("tensors of the wrong kind", kinds),
        )
        if names
    ]
    if problems:
        raise WiolaError("the weights do not fit the config: " + "; ".join(problems))


def read_weights(model: nn.Module, weights: dict[str, mx.array], dtype: mx.Dtype | None):
    """Reads tensor by tensor, the largest first, so that little is ever held twice."""
    keeps_dtype = model.cast_predicate
    broken = []
    for name in sorted(weights, key=lambda name: -weights[name].nbytes):
        array = weights.pop(name)
        if array.dtype in FLOATS:
            if not mx.isfinite(array).all().item():
                broken.append(name)
            if dtype is not None and keeps_dtype(name):
                array = array.astype(dtype)
        mx.eval(array)
        model.load_weights([(name, array)], strict=False)
    if broken:
        raise WiolaError(f"NaN or infinity in the weights: {', '.join(broken)}")


def attach_adapters(model: nn.Module, folder: Path):
    """Adds mlx-lm's LoRA layers to ``model``; every tensor of the adapter must find its place."""
    from mlx_lm.tuner.utils import load_adapters

    for name in ("adapter_config.json", "adapters.safetensors"):
        if not (folder / name).is_file():
            raise WiolaError(f"there is no {name} in the adapter folder {folder}")
        refuse_pointer(folder / name)
    read_json(folder / "adapter_config.json")
    try:
        adapter = mx.load(str(folder / "adapters.safetensors"))
        load_adapters(model, str(folder))
        check_adapter(adapter, dict(tree_flatten(model.parameters())))
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise WiolaError(f"the adapters in {folder} do not fit this model: {reason}") from error
    mx.eval(model.parameters())
    model.eval()


def check_adapter(adapter: dict[str, mx.array], parameters: dict[str, mx.array]):
    """ValueError for an adapter that is empty, lacks a tensor or holds NaN."""
    leaves = ("lora_a", "lora_b", "m")
    lacking = sorted(
        name
        for name in parameters
        if name.rpartition(".")[2] in leaves and name not in adapter  # these start at random
    )
    if not adapter or lacking:
        raise ValueError(f"it lacks {', '.join(lacking) or 'any tensor'}")
    broken = [name for name, array in adapter.items() if not mx.isfinite(array).all().item()]
    if broken:
        raise ValueError(f"NaN or infinity in {', '.join(broken)}")


def load_tokenizer(path_or_hub_id: str | os.PathLike):
    """The tokenizer of a model folder, with all of its stop tokens.

    Generation stops at any end token that config.json, generation_config.json or the tokenizer
    names: released configs leave one or another out.
    """
    from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, TokenizerWrapper
    from transformers import AutoTokenizer

    folder = resolve(path_or_hub_id)
    if is_gguf(folder):
        from .convert.gguf_model import load_tokenizer as load_from_gguf

        return load_from_gguf(folder)
    tokenizer_files = [folder / name for name in ("tokenizer.json", "tokenizer.model")]
    present = [file for file in tokenizer_files if file.is_file()]
    if not present:
        raise WiolaError(f"there is no tokenizer.json or tokenizer.model in {folder}")
    for file in present:
        refuse_pointer(file)
    try:
        with quiet_transformers():  # it warns of a model type that it does not know
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise bare Exception for a bad file
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise WiolaError(f"the tokenizer in {folder} cannot be read: {reason[0]}") from error
    # Not mlx-lm's detokenizer for byte-level BPE: it drops the space before the first word.
    return TokenizerWrapper(tokenizer, NaiveStreamingDetokenizer, eos_token_ids=stop_ids(folder))


@contextlib.contextmanager
def quiet_transformers():
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def stop_ids(folder: Path) -> set[int]:
    """The end tokens that the two config files name, each one id or a list."""
    named = [read_config(folder).get("eos_token_id")]
    generation = folder / "generation_config.json"
    if generation.is_file():
        named.append(read_json(generation).get("eos_token_id"))
    ids = []
    for value in named:
        ids += value if isinstance(value, list) else [] if value is None else [value]
    wrong = [i for i in ids if not isinstance(i, int) or isinstance(i, bool)]
    if wrong:
        raise WiolaError(f"eos_token_id in {folder} is no token id: {wrong[0]!r}")
    return set(ids)
