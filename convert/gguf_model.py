"""A GGUF file straight into memory: the arrays and the config of a model, and its tokenizer."""

import tempfile
import warnings
from pathlib import Path

import mlx.core as mx
import numpy as np

from wiola_mlx.errors import WiolaError

from .cards import write_texts
from .from_gguf import open_gguf
from .output import Job, write_json
from .report import Report
from .tensors import encode, parts_of
from .to_mlx import plan_mlx


def read_weights(path: Path) -> tuple[dict[str, mx.array], dict]:
    """The tensors by their checkpoint names, packed ones packed, and the config."""
    source = open_gguf(path)
    report = Report(source.name, "")
    plan = plan_mlx(source, None, None, set(), report)
    if report.kept:
        warnings.warn("; ".join(report.kept_lines()), stacklevel=2)
    weights = {}
    for job in plan.jobs:
        weights |= arrays_of(job)
    return weights, plan.config


def arrays_of(job: Job) -> dict[str, mx.array]:
    tensor = job.tensor
    chunks = [encode(tensor, tensor.read(*span), job.target) for span in tensor.spans()]
    parts = parts_of(job.tensor, job.target)
    arrays = {}
    for i, (name, (dtype, _)) in enumerate(zip(job.names, parts, strict=True)):
        array = mx.array(np.concatenate([chunk[i] for chunk in chunks]))
        array = array.view(mx.bfloat16) if dtype == "BF16" else array
        arrays[name] = array.reshape(job.tensor.shape) if len(parts) == 1 else array
    mx.eval(arrays)
    return arrays


def load_tokenizer(path: Path):
    """The tokenizer in a GGUF file; WiolaError if it has none."""
    from wiola_mlx.loading import load_tokenizer as load_from_folder

    source = open_gguf(path)
    if not {"tokenizer.json", "tokenizer.model"} & source.texts.keys():
        raise WiolaError(f"there is no tokenizer in {path}")
    with tempfile.TemporaryDirectory(prefix="wiola-mlx-") as folder:
        write_texts(Path(folder), source)
        write_json(Path(folder) / "config.json", source.config)
        return load_from_folder(folder)
