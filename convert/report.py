"""What a conversion did, or would do: for people, and as JSON."""

import warnings
from dataclasses import dataclass, field

from wiola_mlx.console import note

from .output import Job
from .tensors import named


@dataclass
class Report:
    """One conversion.

    Attributes:
        kept: what is not as asked for: a reason, and the tensors or layers it applies to.
        notes: what else its user should know.
        config: the saved config, of an MLX folder.
    """

    source: str
    target: str
    tensors: list[dict] = field(default_factory=list)
    kept: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    dry_run: bool = False
    config: dict = field(default_factory=dict)

    def keep(self, reason: str, what: str):
        self.kept.setdefault(reason, []).append(what)

    def add(self, jobs: list[Job]):
        for job in jobs:
            scales = job.tensor.scales if len(job.tensor.parts) > 1 else ""
            self.tensors.append(
                {
                    "name": job.names[0],
                    "source": job.tensor.name,
                    "shape": list(job.tensor.shape),
                    "from": named(job.tensor.encoding, scales),
                    "to": named(job.target.encoding, job.target.scales),
                    "bytes": job.nbytes,
                }
            )

    @property
    def nbytes(self) -> int:
        return sum(row["bytes"] for row in self.tensors)

    @property
    def parameters(self) -> int:
        total = 0
        for row in self.tensors:
            size = 1
            for length in row["shape"]:
                size *= length
            total += size
        return total

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / max(1, self.parameters)

    def to_json(self) -> dict:
        return {
            "source": self.source,
            "target": self.target,
            "dry_run": self.dry_run,
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "bits_per_weight": round(self.bits_per_weight, 4),
            "kept": self.kept,
            "notes": self.notes,
            "tensors": self.tensors,
        }

    def table(self) -> str:
        """The plan, a line a tensor."""
        lines = [
            f"{row['name']}  {row['shape']}  {row['from']} -> {row['to']}  {row['bytes']} bytes"
            for row in self.tensors
        ]
        return "\n".join([*lines, self.summary()])

    def summary(self) -> str:
        verb = "would be written" if self.dry_run else "written"
        return (
            f"{verb}: {self.target}, {len(self.tensors)} tensors, {self.parameters:,} parameters, "
            f"{self.nbytes / 1e6:.1f} MB, {self.bits_per_weight:.3f} bits a weight"
        )

    def kept_lines(self) -> list[str]:
        return [f"{reason}: {', '.join(names)}" for reason, names in self.kept.items()]

    def tell(self):
        """What matters, on stderr."""
        for line in (*self.kept_lines(), *self.notes):
            note(f"note: {line}")
        if not self.dry_run:
            note(self.summary())


def warn_overflow(names: list[str], kind: str):
    warnings.warn(
        f"values beyond the range of {kind}, so kept in float32: {', '.join(sorted(names))}",
        stacklevel=2,
    )
