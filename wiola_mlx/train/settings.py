"""What a run is: its settings, with the released 13M run as defaults, and the model it trains."""

import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from ..errors import WiolaError

DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class Settings:
    """Everything that the losses of a run depend on, but the model, the text and the tokenizer."""

    steps: int = 20_000
    batch_size: int = 32  # sequences a step, over all processes
    sequence_length: int = 512  # tokens that are predicted in a sequence
    learning_rate: float = 3e-4
    warmup_steps: int = 1_000  # linear from 0; then a cosine to 0
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    clip: float = 1.0  # of the gradients' global norm; 0 clips nothing
    dtype: str = "bfloat16"  # of the computation; weights and optimizer are float32
    seed: int = 42
    micro_batch_size: int = 0  # sequences at once in a process; 0: all that it has
    checkpoint_layers: bool = False
    token_merging: bool = False

    def __post_init__(self):
        for name in ("steps", "batch_size", "sequence_length"):
            self.check(name, getattr(self, name) >= 1, "1 or more")
        for name in ("warmup_steps", "weight_decay", "clip", "seed", "micro_batch_size"):
            self.check(name, getattr(self, name) >= 0, "0 or more")
        self.check("learning_rate", self.learning_rate > 0, "above 0")
        self.check("epsilon", self.epsilon > 0, "above 0")
        for name in ("beta1", "beta2"):
            self.check(name, 0 <= getattr(self, name) < 1, "0 or more and below 1")
        self.check("warmup_steps", self.warmup_steps < self.steps, "less than the steps")
        self.check("dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}")

    def check(self, name: str, right: bool, wanted: str):
        if not right:
            raise WiolaError(f"{name} must be {wanted}, not {getattr(self, name)!r}")

    def micro_batches(self, processes: int) -> tuple[int, int]:
        """(sequences of a process, sequences at once); both divide evenly.

        Raises:
            WiolaError: if they do not.
        """
        own, rest = divmod(self.batch_size, processes)
        if rest:
            raise WiolaError(f"{processes} processes do not divide a batch of {self.batch_size}")
        micro = self.micro_batch_size or own
        if own % micro:
            raise WiolaError(f"micro batches of {micro} do not divide {own} sequences")
        return own, micro

    def difference(self, other: dict) -> str:
        """How ``other`` differs, in words; empty if it does not."""
        return ", ".join(
            f"{f.name} was {other.get(f.name)!r} and is {getattr(self, f.name)!r}"
            for f in fields(self)
            if other.get(f.name) != getattr(self, f.name)
        )


def model_arguments(preset: str | None, config: str | None, vocab_size: int):
    """The arguments of the model to train.

    Args:
        preset: a name out of ``budget.PRESETS``; it gets the tokenizer's vocabulary.
        config: a config.json instead; its vocabulary must hold the tokenizer's.
        vocab_size: entries of the tokenizer.

    Raises:
        WiolaError: for names, files and shapes that do not fit.
    """
    from ..budget import PRESETS
    from ..checkpoint import read_json
    from ..loading import check_types
    from ..models import wiola

    if config is None:
        if preset not in PRESETS:
            raise WiolaError(f"there is no preset {preset!r}; there are {', '.join(PRESETS)}")
        return replace(PRESETS[preset], vocab_size=vocab_size)
    content = read_json(Path(config))
    try:
        check_types(wiola.family_module(content).ModelArgs, content)
        args = wiola.ModelArgs.from_dict({"vocab_size": vocab_size, **content})
    except ValueError as error:
        raise WiolaError(f"{config}: {error}") from error
    if args.vocab_size < vocab_size:
        raise WiolaError(
            f"{config} has a vocabulary of {args.vocab_size}, the tokenizer one of {vocab_size}"
        )
    return args


def build(args):
    """An untrained model for ``args``."""
    return sys.modules[type(args).__module__].Model(args)


def config_of(args, tokenizer) -> dict:
    """config.json in the released layout."""
    dtype_key = "dtype" if hasattr(args, "gcla_lookback") else "torch_dtype"
    ids = {
        f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")
    }
    return {
        "architectures": ["WiolaForCausalLM"],
        **asdict(args),
        **{key: i for key, i in ids.items() if i is not None},
        dtype_key: "float32",
        "use_cache": True,
    }
