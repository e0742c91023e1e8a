"""Checkpoints: a model folder in the released layout, with the training state in a folder inside.

    last/   config.json, generation_config.json, model.safetensors, the tokenizer's files
    last/training/   optimizer.safetensors, state.json
    best/   the same without the training state

A folder is written under another name and then put in place. Between the two renames the old one
is ``.NAME-old``; ``find`` takes it if a run was killed just then.

There is no random state to keep: weights and data order depend on the seed and the step only.
"""

import json
import shutil
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..checkpoint import read_json
from ..errors import WiolaError
from .settings import config_of
from .step import Trainer

OPTIMIZER, STATE = "training/optimizer.safetensors", "training/state.json"


def save(folder: Path, trainer: Trainer, tokenizer_folder: Path, tokenizer, state: dict | None):
    """Writes the checkpoint ``folder``; complete, or as it was before.

    Args:
        tokenizer_folder: its files are copied.
        state: what ``load`` returns later; None leaves the training state out.
    """
    new = folder.with_name(f".{folder.name}-new")
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir(parents=True)
        write_model(new, trainer.model, tokenizer_folder, tokenizer)
        if state is not None:
            (new / "training").mkdir()
            mx.save_safetensors(str(new / OPTIMIZER), flat_state(trainer))
            write(new / STATE, state)
        swap(new, folder)
    except OSError as error:
        raise WiolaError(f"{folder} cannot be written: {error.strerror or error}") from error


def swap(new: Path, folder: Path):
    old = folder.with_name(f".{folder.name}-old")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def find(folder: Path) -> Path | None:
    """The checkpoint at ``folder``, or what was there before a swap that was cut short."""
    old = folder.with_name(f".{folder.name}-old")
    return next((path for path in (folder, old) if (path / STATE).is_file()), None)


def write_model(folder: Path, model, tokenizer_folder: Path, tokenizer):
    weights = dict(sorted(tree_flatten(model.parameters())))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    config = config_of(model.args, tokenizer)
    write(folder / "config.json", config)
    ids = {key: value for key, value in config.items() if key.endswith("_token_id")}
    write(folder / "generation_config.json", ids)
    for file in sorted(tokenizer_folder.iterdir()):
        shutil.copyfile(file, folder / file.name)


def write(path: Path, content: dict):
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def flat_state(trainer: Trainer) -> dict[str, mx.array]:
    return dict(sorted(tree_flatten(trainer.optimizer.state)))


def load(folder: Path, trainer: Trainer) -> dict:
    """Puts weights and optimizer of a checkpoint back; returns its ``state``.

    Raises:
        WiolaError: for a checkpoint that is damaged or of another model.
    """
    state = read_json(folder / STATE)
    try:
        arrays = mx.load(str(folder / OPTIMIZER))
        weights = mx.load(str(folder / "model.safetensors"))
        trainer.model.load_weights(list(weights.items()), strict=True)
    except (RuntimeError, ValueError) as error:
        raise WiolaError(f"{folder} does not fit this run: {error}") from error
    expected = {name: array.shape for name, array in flat_state(trainer).items()}
    if {name: array.shape for name, array in arrays.items()} != expected:
        raise WiolaError(f"{folder / OPTIMIZER} is damaged or of another model")
    # An empty part, as of a family without biases, has only its step and learning rate.
    trainer.optimizer.state = tree_unflatten(list(arrays.items()))
    mx.eval(trainer.model.parameters(), trainer.optimizer.state)
    return state
