"""Writing, alike for every conversion: checked first, complete or absent, and read back."""

import collections
import contextlib
import hashlib
import json
import os
import shutil
import struct
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from wiola_mlx.errors import WiolaError

from .blocks import Packing
from .floats import DTYPES
from .source import Source, safetensors_parts
from .tensors import FLOATS, Part, Target, Tensor, TooLarge, encode, parts_of

SHARD_BYTES = 5_000_000_000
SHA256_UP_TO = 1 << 28  # bytes; beyond, BLAKE3, which keeps pace with copying on any processor
SPARE_BYTES = 1 << 20
WORKERS = 2
AHEAD = 6  # pieces of a megabyte or so that wait to be written


@dataclass(frozen=True)
class Job:
    """A tensor, the encoding to make of it, and where its arrays go."""

    tensor: Tensor
    target: Target
    names: tuple[str, ...]  # of the arrays, in the output
    parts: tuple[Part, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(
            self.tensor.rows * width * np.dtype(DTYPES[dtype]).itemsize
            for dtype, width in parts_of(self.tensor, self.target)
        )


class Overflow(Exception):
    def __init__(self, names: list[str]):
        self.names = names


def check_target(source: Source, target: Path, nbytes: int):
    """WiolaError unless ``target`` is new, apart from the source, and there is room for it."""
    where, real = source.path.resolve(), target.parent.resolve() / target.name
    if os.path.lexists(target):
        if real.resolve() == where:
            raise WiolaError(f"{target} is the source itself; give another name")
        raise WiolaError(f"{target} exists already; give a new name")
    if source.path.is_dir() and where in real.parents:
        raise WiolaError(f"{target} is inside the source {source.path}; give a name outside of it")
    parent = next(p for p in real.parents if p.exists())
    try:
        free = shutil.disk_usage(parent).free
    except OSError as error:
        raise WiolaError(f"{target} cannot be written: {error.strerror or error}") from error
    if free < nbytes + SPARE_BYTES:
        raise WiolaError(
            f"{target} needs {nbytes / 1e9:.3f} GB, and {free / 1e9:.3f} GB are free there"
        )


@contextlib.contextmanager
def staged(target: Path, folder: bool) -> Iterator[Path]:
    """A temporary file or folder beside ``target``, which takes its name if all went well."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        room = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            made = room / target.name
            if folder:
                made.mkdir()
            yield made
            if os.path.lexists(target):
                raise WiolaError(f"{target} exists already; give a new name")
            os.rename(made, target)
        finally:
            shutil.rmtree(room, ignore_errors=True)
    except OSError as error:
        raise WiolaError(f"{target} cannot be written: {error.strerror or error}") from error


class Manifest:
    """Hashes of the source's files, computed in a thread while the weights are converted.

    ``blank`` has zeros in their places, so that a header can be written first and filled in.
    """

    def __init__(self, files: list[Path]):
        self.files = files
        self.blank = {file.name: f"{self.method(file)}:{'0' * 64}" for file in files}
        self.hashes = {}
        self.error = None
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    @staticmethod
    def method(file: Path) -> str:
        return "sha256" if file.stat().st_size <= SHA256_UP_TO else "blake3"

    def run(self):
        try:
            for file in self.files:
                method = self.method(file)
                hasher = new_hasher(method)()
                with file.open("rb") as opened:
                    while piece := opened.read(1 << 22):
                        hasher.update(piece)
                self.hashes[file.name] = f"{method}:{hasher.hexdigest()}"
        except OSError as error:
            self.error = error

    def finish(self) -> dict[str, str]:
        self.thread.join()
        if self.error:
            raise WiolaError(f"the source cannot be read: {self.error}")
        return self.hashes


def new_hasher(method: str):
    if method == "sha256":
        return hashlib.sha256
    import blake3

    return blake3.blake3


class Progress:
    """A line on stderr, if that is a terminal."""

    def __init__(self, total: int):
        self.total, self.done, self.shown = max(1, total), 0, -1
        self.live = sys.stderr is not None and sys.stderr.isatty()

    def add(self, nbytes: int):
        self.done += nbytes
        percent = 100 * self.done // self.total
        if self.live and percent != self.shown:
            self.shown = percent
            print(f"\rwiola-mlx: {percent} %", end="", file=sys.stderr, flush=True)

    def end(self):
        if self.live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def write_jobs(jobs: list[Job], progress: Progress) -> dict[str, bytes]:
    """Writes every job's arrays to their places; returns a digest of each by name.

    Raises:
        Overflow: names the tensors with values too large for their target.
    """
    digests, too_large = {}, []
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(WORKERS))
        opened = {
            path: stack.enter_context(path.open("r+b", buffering=0))
            for path in {part.path for job in jobs for part in job.parts}
        }
        for job in jobs:
            try:
                digests |= write_job(job, opened, pool)
            except TooLarge:
                too_large.append(job.tensor.name)
            progress.add(job.nbytes)
    if too_large:
        raise Overflow(too_large)
    return digests


def write_job(job: Job, opened: dict, pool: ThreadPoolExecutor) -> dict[str, bytes]:
    hashers = [new_hasher("blake3")() for _ in job.parts]
    places = [part.offset for part in job.parts]
    for encoded in encoded_pieces(job, pool):
        for i, (part, array) in enumerate(zip(job.parts, encoded, strict=True)):
            data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
            write_all(opened[part.path], data, places[i])
            places[i] += data.nbytes
            hashers[i].update(data)
    for part, place, name in zip(job.parts, places, job.names, strict=True):
        if place != part.offset + part.nbytes:
            raise WiolaError(f"internal error: {name} has {place - part.offset} bytes")
    return {name: h.digest() for name, h in zip(job.names, hashers, strict=True)}


def encoded_pieces(job: Job, pool: ThreadPoolExecutor) -> Iterator[list[np.ndarray]]:
    """What ``encode`` gives for all rows in turn; made in threads, in order."""

    def make(span: tuple[int, int]) -> list[np.ndarray]:
        return encode(job.tensor, job.tensor.read(*span), job.target)

    if uses_mlx(job):  # its streams belong to the thread that made them
        yield from map(make, job.tensor.spans())
        return
    waiting = collections.deque()
    try:
        for span in job.tensor.spans():
            waiting.append(pool.submit(make, span))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def uses_mlx(job: Job) -> bool:
    return isinstance(job.target.encoding, Packing) and job.tensor.encoding in FLOATS


def write_all(file, data: np.ndarray, place: int):
    file.seek(place)
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def read_back(parts: dict[str, Part], digests: dict[str, bytes]):
    """Compares what a finished file holds, by its own header, with what was meant."""
    if parts.keys() != digests.keys():
        raise WiolaError("the written file does not hold the tensors that it should")
    for name, part in parts.items():
        hasher = new_hasher("blake3")()
        step = max(1, (1 << 22) // max(1, part.width))
        for start in range(0, part.rows, step):
            rows = part.read(start, min(start + step, part.rows))
            hasher.update(rows.view(np.uint8).reshape(-1))
        if hasher.digest() != digests[name]:
            raise WiolaError(f"the disk gave back other bytes of {name} than were written")


def write_safetensors(
    folder: Path, jobs: list[Job], manifest: Manifest, metadata: dict, progress: Progress
):
    """``model.safetensors``, or shards, and an index; compared with what was meant."""
    shards = into_shards(jobs)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    weight_map = {}
    for name, shard in zip(names, shards, strict=True):
        path = folder / name
        header, placed = lay_out(path, shard, {**metadata, "sources": manifest.blank})
        path.write_bytes(header)
        digests = write_jobs(placed, progress)
        header, _ = lay_out(path, shard, {**metadata, "sources": manifest.finish()})
        with path.open("r+b") as file:  # the same length: only the hashes are new
            file.write(header)
        check_header(path, shard)
        read_back({key: part for key, (_, part) in safetensors_parts(path).items()}, digests)
        weight_map |= dict.fromkeys(digests, name)
    index = {
        "metadata": {
            "total_size": sum(job.nbytes for job in jobs),
            "total_parameters": sum(job.tensor.size for job in jobs),
        },
        "weight_map": dict(sorted(weight_map.items())),
    }
    write_json(folder / "model.safetensors.index.json", index)


def into_shards(jobs: list[Job]) -> list[list[Job]]:
    shards, size = [[]], 0
    for job in jobs:
        if shards[-1] and size + job.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(job)
        size += job.nbytes
    return shards


def lay_out(path: Path, jobs: list[Job], metadata: dict) -> tuple[bytes, list[Job]]:
    """A safetensors header, and the jobs with their places behind it."""
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in metadata.items()}
    entries, rows, end = {"__metadata__": texts}, [], 0
    arrays = [
        (name, job, dtype, width)
        for job in jobs
        for name, (dtype, width) in zip(job.names, parts_of(job.tensor, job.target), strict=True)
    ]
    arrays.sort(key=lambda a: (-np.dtype(DTYPES[a[2]]).itemsize, a[0]))  # aligned, as by the spec
    for name, job, dtype, width in arrays:
        part = Part(path, end, dtype, job.tensor.rows, width)
        shape = job.tensor.shape if len(job.names) == 1 else (job.tensor.rows, width)
        end += part.nbytes
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [part.offset, end]}
        rows.append((name, part))
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    places = {name: replace(part, offset=start + part.offset) for name, part in rows}
    placed = [replace(job, parts=tuple(places[name] for name in job.names)) for job in jobs]
    return struct.pack("<Q", len(text)) + text, placed


def check_header(path: Path, jobs: list[Job]):
    """The header as the safetensors library reads it holds the shapes that were meant."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise WiolaError(f"the written {path.name} holds less than it should: {error}") from error
    for job in jobs:
        if len(job.names) == 1 and shapes.get(job.names[0]) != job.tensor.shape:
            raise WiolaError(f"{job.names[0]} was written as {shapes.get(job.names[0])}")


def write_json(path: Path, content: dict):
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")
