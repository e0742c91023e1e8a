"""Any source to the released PyTorch layout, dequantized if need be."""

from pathlib import Path

from wiola_mlx import __version__

from .cards import config_with_dtype, write_card, write_texts
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
from .report import Report, warn_overflow
from .source import Source, open_source
from .tensors import FLOATS, Target, Tensor
from .to_mlx import dtype_named, facts_of, main_dtype

METADATA = {"format": "pt", "converter": f"wiola_mlx {__version__}"}  # transformers wants "pt"


def to_hf(source, target, dtype=None, dry_run: bool = False) -> Report:
    """Writes a folder as the PyTorch packages save and load it.

    Args:
        source: a model folder, a GGUF file, a Hub id or "builtin".
        target: a folder that does not exist yet; it appears only when it is complete.
        dtype: "float32", "float16" or "bfloat16"; by default the tensors' own, and float32 for
            what was quantized, which is exact.
        dry_run: only plan.

    Raises:
        WiolaError: for a source or a target that is not usable, before anything is written.
    """
    target, kind = Path(target).expanduser(), dtype_named(dtype)
    opened = open_source(source)
    wide = set()
    while True:
        report = Report(opened.name, str(target), dry_run=dry_run, notes=list(opened.notes))
        jobs = [job_of(opened, t, kind, wide) for t in opened.tensors.values()]
        report.add(jobs)
        if opened.quantized:
            report.notes.append(f"quantized weights are dequantized to {kind or 'F32'}")
        check_target(opened, target, report.nbytes)
        if dry_run:
            return report
        try:
            with staged(target, folder=True) as made:
                write(made, opened, jobs, report)
            return report
        except Overflow as overflow:
            warn_overflow(overflow.names, kind or "F16")
            wide |= set(overflow.names)


def job_of(source: Source, tensor: Tensor, dtype: str | None, wide: set[str]) -> Job:
    own = source.own_dtype(tensor) if tensor.encoding in FLOATS else "F32"
    keeps = source.family.keeps_float32(tensor.name)
    kind = "F32" if tensor.name in wide else own if keeps else dtype or own
    return Job(tensor, Target(kind), (tensor.name,))


def write(folder: Path, source: Source, jobs: list[Job], report: Report):
    manifest = Manifest(source.files)
    progress = Progress(report.nbytes)
    write_safetensors(folder, jobs, manifest, {**METADATA, "source": source.name}, progress)
    progress.end()
    if (folder / "model.safetensors").is_file():
        (folder / "model.safetensors.index.json").unlink()  # as save_pretrained leaves it
    config = config_with_dtype(source.config, main_dtype(jobs))
    config = {"architectures": ["WiolaForCausalLM"], "model_type": "wiola", **config}
    write_json(folder / "config.json", dict(sorted(config.items())))
    write_texts(folder, source)
    write_card(folder, source, "released PyTorch", facts_of(jobs, report))
