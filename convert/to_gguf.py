"""Any source to a GGUF file, written as a stream and read back before it gets its name."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np

from wiola_mlx import __version__
from wiola_mlx.errors import WiolaError

from .blocks import Packing, exact_type
from .families import complete_config
from .from_gguf import ROPE_FACTORS
from .gguf_format import ALIGNMENT, Record, encode_header, read_gguf
from .options import K_QUANTS, TYPES
from .output import (
    Job,
    Manifest,
    Overflow,
    Progress,
    check_target,
    new_hasher,
    read_back,
    staged,
    write_jobs,
)
from .report import Report, warn_overflow
from .source import Source, open_source
from .tensors import FLOATS, Part, Target, Tensor, block_size, packed, parts_of
from .tokenizer import vocabulary_metadata

FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9,
    "Q4_K": 14, "Q5_K": 16, "Q6_K": 18, "BF16": 32,
}  # fmt: skip
GUESSED = 1024  # llama.cpp's "type guessed": of no single type
NOT_EXACT = (
    "no GGUF type holds {} bits, scales {}, exactly, so they become F16, rounded "
    "(--type f32 does not round)"
)
READERS = (
    "the file is for wiola_mlx and for programs that know the architecture {}: "
    "llama.cpp, Ollama and LM Studio do not"
)


def to_gguf(source, target, kind: str | None = None, dry_run: bool = False) -> Report:
    """Writes a GGUF file.

    Args:
        source: a model folder, a GGUF file, a Hub id or "builtin".
        target: a file that does not exist yet, ending in .gguf.
        kind: one of ``TYPES``, for the matrices that its blocks divide. By default each tensor's
            own: packed weights by an exact map where there is one, else F16.
        dry_run: only plan.

    Returns:
        The report: tensors with types and sizes, what was kept at more bits, notes.

    Raises:
        WiolaError: for a source or a target that is not usable, before anything is written.
    """
    target = Path(target).expanduser()
    kind = None if kind is None else kind.upper()
    if kind is not None and kind not in TYPES:
        raise WiolaError(f"the type {kind} is not one of {', '.join(TYPES)}")
    if target.suffix != ".gguf":
        raise WiolaError(f"the target {target} must end in .gguf")
    opened = open_source(source)
    if kind in K_QUANTS:
        from .ggml_library import find_library

        find_library()
    wide = set()
    while True:
        report = Report(opened.name, str(target), dry_run=dry_run)
        jobs = plan(opened, kind, wide, report)
        metadata = metadata_of(opened, jobs)
        check_target(opened, target, sum(job.nbytes for job in jobs))
        if dry_run:
            return report
        try:
            with staged(target, folder=False) as made:
                write(made, opened, jobs, metadata)
            return report
        except Overflow as overflow:
            warn_overflow(overflow.names, kind or "F16")
            wide |= set(overflow.names)


def plan(source: Source, kind: str | None, wide: set[str], report: Report) -> list[Job]:
    """One job a tensor, in the model's order; refuses tensors without a GGUF name."""
    unmapped = [name for name in source.tensors if not source.family.to_gguf_name(name)]
    if unmapped:
        raise WiolaError(f"tensors without a GGUF name ({len(unmapped)}): {', '.join(unmapped)}")
    jobs = [
        Job(tensor, target_of(source, tensor, kind, wide, report), (gguf_name(source, tensor),))
        for tensor in source.tensors.values()
    ]
    report.add(jobs)
    report.notes.append(READERS.format(source.family.architecture))
    if not {"tokenizer.json", "tokenizer.model"} & source.texts.keys():
        report.notes.append("the source has no tokenizer, so the file has none either")
    return jobs


def gguf_name(source: Source, tensor: Tensor) -> str:
    return source.family.to_gguf_name(tensor.name)


def target_of(
    source: Source, tensor: Tensor, kind: str | None, wide: set[str], report: Report
) -> Target:
    if tensor.name in wide or stays_float32(source, tensor):
        return Target("F32")
    if kind is None:
        return own_target(tensor, report)
    if kind in FLOATS or tensor.encoding == kind:
        return Target(kind)
    if tensor.shape[-1] % block_size(kind)[0]:
        report.keep(
            f"F16, because rows are no multiple of {block_size(kind)[0]}, the block of {kind}",
            f"{tensor.name} {list(tensor.shape)}",
        )
        return Target("F16")
    mapped = isinstance(tensor.encoding, Packing) and exact_block(tensor) == kind
    if tensor.encoding not in FLOATS and not mapped:
        report.keep(f"quantized before, and {kind} rounds them once more", tensor.name)
    return Target(kind, mapped=mapped)


def stays_float32(source: Source, tensor: Tensor) -> bool:
    """Vectors, norms, gates and offsets: small, and ggml's operations want them in float32."""
    return len(tensor.shape) < 2 or source.family.keeps_float32(tensor.name)


def own_target(tensor: Tensor, report: Report) -> Target:
    if not isinstance(tensor.encoding, Packing):
        return Target(tensor.encoding)
    exact = exact_block(tensor)
    if exact is None:
        report.keep(NOT_EXACT.format(tensor.encoding.bits, tensor.scales), tensor.name)
    return Target(exact or "F16", mapped=exact is not None)


def exact_block(tensor: Tensor) -> str | None:
    """The block type that holds a packed weight as it is; None if there is none."""
    if tensor.encoding.mode != "affine":
        kind = exact_type(None, None, tensor.encoding)
        return kind if kind and tensor.shape[-1] % block_size(kind)[0] == 0 else None
    numbers = [part.read(0, part.rows) for part in tensor.parts[1:]]
    whole = packed(tensor, [np.empty(0), *numbers])
    return exact_type(whole.scales, whole.biases, tensor.encoding)


def metadata_of(source: Source, jobs: list[Job]) -> list[tuple[str, str, object]]:
    """All metadata but the hashes, in the order of the file."""
    family, config = source.family, complete_config(source.config)
    prefix = family.architecture
    kinds = {job.target.encoding for job in jobs if len(job.tensor.shape) > 1}
    kinds -= {"F32"} if len(kinds) > 1 else set()
    file_type = FILE_TYPES.get(kinds.pop(), GUESSED) if len(kinds) == 1 else GUESSED
    entries = [
        ("general.architecture", "str", prefix),
        ("general.type", "str", "model"),
        ("general.name", "str", source.name),
        ("general.file_type", "u32", file_type),
        ("general.quantization_version", "u32", 2),
        ("general.alignment", "u32", ALIGNMENT),
    ]
    for key, gguf, kind in family.metadata:
        value = float(config[key]) if kind == "f32" else config[key]
        entries.append((f"{prefix}.{gguf}", kind, value))
    entries += [(f"{prefix}.{k}", "u32", v) for k, v in family.derived(config).items()]
    entries.append((f"{prefix}.source.config", "str", json.dumps(source.config)))
    entries.append((f"{prefix}.source.converter", "str", f"wiola_mlx {__version__}"))
    for kind in ("F16", "BF16"):
        names = [
            job.names[0]
            for job in jobs
            if job.target.encoding == "F32" and source.own_dtype(job.tensor) == kind
        ]
        if names:
            entries.append((f"{prefix}.source.widened_{kind.lower()}", "[str]", names))
    return entries + vocabulary_metadata(source.texts, config, prefix)


def with_hashes(metadata: list, source: Source, hashes: dict[str, str]) -> list:
    lines = [f"{name} {digest}" for name, digest in hashes.items()]
    return [*metadata, (f"{source.family.architecture}.source.hashes", "[str]", lines)]


def write(path: Path, source: Source, jobs: list[Job], metadata: list):
    manifest = Manifest(source.files)
    factors = rope_factors(source)
    records, placed = lay_out(path, jobs, factors)
    header = encode_header(with_hashes(metadata, source, manifest.blank), records)
    placed = [moved(job, len(header)) for job in placed]
    progress = Progress(sum(job.nbytes for job in jobs))
    path.write_bytes(header)
    digests = write_jobs(placed, progress)
    with path.open("r+b") as file:
        file.write(filled_in(header, manifest))  # the same length: only the hashes are new
        if factors is not None:
            file.write(factors.tobytes())
            digests[ROPE_FACTORS] = new_hasher("blake3")(factors.tobytes()).digest()
        file.truncate(len(header) + aligned(records[-1].offset + records[-1].nbytes))
    progress.end()
    compare(path, with_hashes(metadata, source, manifest.hashes), records, len(header), digests)


def filled_in(header: bytes, manifest: Manifest) -> bytes:
    """The header with the hashes of the source in place of zeros."""
    blank = [f"{name} {digest}".encode() for name, digest in manifest.blank.items()]
    found = [f"{name} {digest}".encode() for name, digest in manifest.finish().items()]
    for old, new in zip(blank, found, strict=True):
        header = header.replace(old, new, 1)
    return header


def rope_factors(source: Source) -> np.ndarray | None:
    make = source.family.rope_factors
    return make and make(complete_config(source.config))


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def lay_out(path: Path, jobs: list[Job], factors) -> tuple[list[Record], list[Job]]:
    """Records with offsets from the header's end, and the jobs with such places."""
    records, placed, end = [], [], 0
    if factors is not None:
        records.append(Record(ROPE_FACTORS, factors.shape, "F32", 0, factors.nbytes))
        end = aligned(factors.nbytes)
    for job in jobs:
        ((dtype, width),) = parts_of(job.tensor, job.target)
        part = Part(path, end, dtype, job.tensor.rows, width)
        shape = job.tensor.shape or (1,)
        records.append(Record(job.names[0], shape, job.target.encoding, end, part.nbytes))
        placed.append(replace(job, parts=(part,)))
        end = aligned(end + part.nbytes)
    return records, placed


def moved(job: Job, by: int) -> Job:
    return replace(job, parts=tuple(replace(p, offset=p.offset + by) for p in job.parts))


def compare(path: Path, metadata: list, records: list[Record], start: int, digests: dict):
    """Reads the finished file and compares its metadata, its records and every byte."""
    contents = read_gguf(path)
    for key, kind, value in metadata:
        if kind.strip("[]") == "f32":
            value = np.float32(value).tolist()
        if contents.metadata.get(key) != value:
            raise WiolaError(f"the written file does not hold {key} as it should")
    wanted = {r.name: replace(r, offset=start + r.offset) for r in records}
    if contents.records != wanted:
        raise WiolaError("the written file's tensor records are not what they should be")
    parts = {
        r.name: Part(path, r.offset, "U8", prod(r.shape[:-1]), r.nbytes // prod(r.shape[:-1]))
        for r in contents.records.values()
    }
    read_back(parts, digests)
