"""Any source to an MLX folder: quantized if asked, packed GGUF types kept packed."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from wiola_mlx import __version__
from wiola_mlx.errors import WiolaError

from .blocks import PACKINGS, Packing
from .cards import config_with_dtype, write_card, write_texts
from .options import DTYPES
from .output import (
    Job,
    Manifest,
    Overflow,
    Progress,
    check_target,
    staged,
    write_json,
    write_safetensors,
)
from .recipes import Quantize, asked
from .report import Report, warn_overflow
from .source import Source, open_source
from .tensors import FLOATS, Target, Tensor, named

METADATA = {"format": "mlx", "converter": f"wiola_mlx {__version__}"}


@dataclass
class Plan:
    jobs: list[Job]
    config: dict


def to_mlx(
    source,
    target,
    bits: int | None = None,
    group_size: int | None = None,
    dtype=None,
    *,
    mode: str = "affine",
    recipe: str | None = None,
    quantize: bool = False,
    dry_run: bool = False,
) -> Report:
    """Writes a folder that ``wiola_mlx.load`` and mlx-lm read.

    Args:
        source: a model folder, a GGUF file, a Hub id or "builtin".
        target: a folder that does not exist yet; it appears only when it is complete.
        bits, group_size, mode: how to quantize; without any of these and of the next two, the
            weights stay as they are, packed ones too.
        recipe: mlx-lm's "mixed_3_6" and the like, or "small_4_6", the default here.
        quantize: by the default recipe, if nothing else is asked for.
        dtype: "float32", "float16" or "bfloat16", or MLX's; by default the tensors' own.
        dry_run: only plan.

    Returns:
        The report: tensors with encodings and sizes, layers that were not quantized, notes.

    Raises:
        WiolaError: for a source or a target that is not usable, before anything is written.
    """
    target, kind = Path(target).expanduser(), dtype_named(dtype)
    how = None
    if quantize or bits is not None or recipe is not None or mode != "affine":
        how = asked(bits, group_size, mode, recipe)
    elif group_size is not None:
        raise WiolaError("a group size without quantization changes nothing: give the bits, too")
    opened = open_source(source)
    wide = set()
    while True:
        report = Report(opened.name, str(target), dry_run=dry_run, notes=list(opened.notes))
        plan = plan_mlx(opened, how, kind, wide, report)
        report.add(plan.jobs)
        report.config = plan.config
        check_target(opened, target, report.nbytes)
        if dry_run:
            return report
        try:
            with staged(target, folder=True) as made:
                write(made, opened, plan, report)
            return report
        except Overflow as overflow:
            warn_overflow(overflow.names, kind or "F16")
            wide |= set(overflow.names)


def dtype_named(dtype) -> str | None:
    """ "F32", "F16" or "BF16" of a dtype's name or of MLX's dtype; None of None."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("mlx.core.")
    if name not in DTYPES:
        raise WiolaError(f"the dtype {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def plan_mlx(
    source: Source, quantize: Quantize | None, dtype: str | None, wide: set[str], report: Report
) -> Plan:
    """A job for each tensor, and the config that describes the result."""
    if quantize is not None and source.quantized:
        raise WiolaError(f"{source.path} is quantized already; quantize from the original weights")
    choices = quantize.choose(source, report) if quantize else {}
    jobs = []
    for tensor in source.tensors.values():
        layer = tensor.name.removesuffix(".weight")
        own = "F32" if tensor.name in wide else dtype
        chosen = choices.get(layer) if tensor.name.endswith(".weight") else None
        if chosen:
            target = Target(chosen, own or source.own_dtype(tensor))
        else:
            target = kept_target(source, tensor, own, report)
        jobs.append(Job(tensor, target, array_names(tensor, target)))
    return Plan(jobs, config_of(source, jobs, quantize))


def kept_target(source: Source, tensor: Tensor, dtype: str | None, report: Report) -> Target:
    """What a tensor becomes without a new quantization."""
    if isinstance(tensor.encoding, Packing):
        affine = tensor.encoding.mode == "affine"
        return Target(tensor.encoding, (dtype or tensor.scales) if affine else "F32")
    if tensor.encoding in FLOATS:
        keeps = source.family.keeps_float32(tensor.name)
        return Target(source.own_dtype(tensor) if dtype is None or keeps else dtype)
    packing = PACKINGS.get(tensor.encoding)
    layer = tensor.name.removesuffix(".weight")
    if packing and layer in source.modules and tensor.shape[-1] % packing.group_size == 0:
        return Target(packing, dtype or "F32")  # float32: the products of a block are exact in it
    report.keep(f"{tensor.encoding} has no packed form in MLX, so dequantized", tensor.name)
    return Target(dtype or "F32")


def array_names(tensor: Tensor, target: Target) -> tuple[str, ...]:
    if not isinstance(target.encoding, Packing):
        return (tensor.name,)
    layer = tensor.name.removesuffix(".weight")
    last = ("biases",) if target.encoding.mode == "affine" else ()
    return tuple(f"{layer}.{part}" for part in ("weight", "scales", *last))


def config_of(source: Source, jobs: list[Job], quantize: Quantize | None) -> dict:
    """The released keys, the dtype of the tensors, and each layer's quantization."""
    config = config_with_dtype(source.config, main_dtype(jobs))
    packings = {
        job.tensor.name.removesuffix(".weight"): job.target.encoding
        for job in jobs
        if isinstance(job.target.encoding, Packing)
    }
    if not packings:
        return config
    most = quantize.packing if quantize else None
    if most is None or most not in packings.values():
        most = Counter(packings.values()).most_common(1)[0][0]
    quantization = settings(most)
    for path in (name.removesuffix(".weight") for name in source.tensors):
        if path in source.modules and path not in packings:
            quantization[path] = False
        elif packings.get(path, most) != most:
            quantization[path] = settings(packings[path])
    return {**config, "quantization": quantization, "quantization_config": quantization}


def settings(packing: Packing) -> dict:
    return {"group_size": packing.group_size, "bits": packing.bits, "mode": packing.mode}


def main_dtype(jobs: list[Job]) -> str:
    """The dtype of most values: what the model computes in."""
    sizes = Counter()
    for job in jobs:
        packed = isinstance(job.target.encoding, Packing)
        sizes[job.target.scales if packed else job.target.encoding] += job.tensor.size
    return sizes.most_common(1)[0][0]


def write(folder: Path, source: Source, plan: Plan, report: Report):
    manifest = Manifest(source.files)
    progress = Progress(report.nbytes)
    metadata = {**METADATA, "source": source.name}
    write_safetensors(folder, plan.jobs, manifest, metadata, progress)
    progress.end()
    write_json(folder / "config.json", dict(sorted(plan.config.items())))
    write_texts(folder, source)
    write_card(folder, source, "MLX", facts_of(plan.jobs, report))


def facts_of(jobs: list[Job], report: Report) -> list[str]:
    kinds = Counter()
    for job in jobs:
        kinds[named(job.target.encoding, job.target.scales)] += job.tensor.size
    shares = ", ".join(f"{kind}: {size:,}" for kind, size in kinds.most_common())
    return [
        f"{report.parameters:,} parameters ({shares})",
        f"{report.bits_per_weight:.3f} bits a weight, {report.nbytes / 1e6:.1f} MB",
        *card_lines(report),
    ]


def card_lines(report: Report) -> list[str]:
    """What was kept, with * for the number of a layer."""
    lines = []
    for reason, names in report.kept.items():
        short = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)
        lines.append(f"{reason}: {', '.join(short)}")
    return lines
