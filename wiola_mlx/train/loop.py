"""The run: steps, evaluations, metrics, checkpoints; resumed exactly, stopped cleanly."""

import json
import os
import signal
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx

from ..errors import WiolaError
from ..scoring import score_tokens
from . import checkpoint
from .data import Batches, Tokens, tokenized
from .ngram import ngram_losses
from .settings import Settings, build, model_arguments
from .step import Trainer, initialize
from .tokenizer import prepare_tokenizer

NGRAM_ORDER = 3


@dataclass
class Job:
    """Where a run reads and writes, and how often; the losses do not depend on it."""

    out: Path
    text: list[str]
    valid: list[str] | None = None
    tokenizer: str | None = None
    bpe_size: int | None = None
    preset: str | None = "nano"
    config: str | None = None
    cache_dir: Path | None = None  # by default out/tokens
    eval_every: int = 1_000
    save_every: int = 1_000
    log_every: int = 10
    patience: int = 0  # evaluations without a better one before the run ends; 0: never
    stop_at: int = 0  # a step to stop and save at; 0: none
    resume: bool = False
    ngram: bool = False


class Run:
    """A run of ``settings.steps`` steps, of which some may be done.

    Args:
        report: called with a metrics row after each logged step and each evaluation.
    """

    def __init__(self, job: Job, settings: Settings, report=None):
        self.job, self.settings, self.report = job, settings, report or (lambda row: None)
        self.group = mx.distributed.init()
        self.leads = self.group.rank() == 0
        settings.micro_batches(self.group.size())  # before any work
        self.last = self.checkpoint_to_resume()
        self.in_turn(self.open_data)
        self.args = model_arguments(job.preset, job.config, len(self.tokenizer))
        model = build(self.args)
        self.batches = Batches(
            self.train.ids, settings.sequence_length, settings.batch_size, settings.seed
        )
        self.trainer = Trainer(model, settings, self.group)
        self.state = {"step": 0, "best": None, "best_step": 0, "worse": 0}
        if self.last is None:
            initialize(model, settings.seed, self.tokenizer.pad_token_id)
        else:
            self.resume()
        self.seconds, self.stopping = 0.0, False

    def checkpoint_to_resume(self) -> Path | None:
        last = checkpoint.find(self.job.out / "last")
        if self.job.resume and last is None:
            raise WiolaError(f"there is no checkpoint in {self.job.out / 'last'} to resume from")
        if last is not None and not self.job.resume:
            raise WiolaError(
                f"{self.job.out} holds a run already: go on with --resume, or give another --out"
            )
        return last

    def in_turn(self, work):
        """One process after the other: on one machine the first one's files serve all."""
        for rank in range(self.group.size()):
            if rank == self.group.rank():
                work()
            mx.eval(mx.distributed.all_sum(mx.array(1.0), group=self.group))

    def open_data(self):
        job = self.job
        self.tokenizer_folder = job.out / "tokenizer"
        self.tokenizer = prepare_tokenizer(
            self.tokenizer_folder, job.tokenizer, job.bpe_size, job.text, keep=job.resume
        )
        cache = job.cache_dir or job.out / "tokens"
        self.train = tokenized(job.text, self.tokenizer, cache)
        self.valid: Tokens | None = (
            tokenized(job.valid, self.tokenizer, cache) if job.valid else None
        )

    def facts(self) -> dict:
        """What a resumed run must have in common with the one before."""
        facts = {"model": asdict(self.args), "train": self.train.key[:16]}
        return facts | {"valid": self.valid.key[:16] if self.valid else None}

    def resume(self):
        saved = checkpoint.load(self.last, self.trainer)
        difference = self.settings.difference(saved["settings"])
        if difference:
            raise WiolaError(f"the run in {self.job.out} has other settings: {difference}")
        for name, value in self.facts().items():
            if saved["facts"][name] != value:
                raise WiolaError(f"the run in {self.job.out} had another {name}")
        self.state = saved["progress"]
        if self.leads:
            self.drop_later_metrics()

    @property
    def metrics(self) -> Path:
        return self.job.out / "metrics.jsonl"

    def rows(self) -> list[dict]:
        """The metrics so far. A last line that a crash cut short is left out."""
        rows = []
        for line in self.metrics.read_text().splitlines() if self.metrics.is_file() else []:
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
        return rows

    def drop_later_metrics(self):
        """What came after the checkpoint will come again."""
        rows = [row for row in self.rows() if row["step"] <= self.state["step"]]
        temporary = self.metrics.with_name(f".{self.metrics.name}")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(temporary, self.metrics)

    def log(self, **row):
        step = self.state["step"]
        tokens = step * self.settings.batch_size * self.settings.sequence_length
        row = {"step": step, "tokens": tokens, **row}
        if self.leads:
            with self.metrics.open("a") as file:
                file.write(json.dumps(row) + "\n")
        self.report(row)

    def train_all(self) -> dict:
        """Runs to the last step, or until it is stopped.

        Returns:
            "step", "stopped" (None, "early", "step" or "signal"), "loss", "valid_loss",
            "best_valid_loss", "best_step", "ngram" losses if asked for.
        """
        stopped, loss, saved = None, None, self.state["step"]
        with self.stop_on_signals():
            while stopped is None and self.state["step"] < self.settings.steps:
                loss, stopped = self.one_step()
                step = self.state["step"]
                if stopped is None and step == self.job.stop_at:
                    stopped = "step"
                if stopped or step % self.job.save_every == 0 or step == self.settings.steps:
                    self.save()
                    saved = step
        if saved != self.state["step"]:
            self.save()
        return {
            "step": self.state["step"],
            "stopped": stopped,
            "loss": loss,
            "best_valid_loss": self.state["best"],
            "best_step": self.state["best_step"],
            "ngram": self.ngram() if self.job.ngram else None,
        }

    def one_step(self) -> tuple[float, str | None]:
        """(loss, why to stop or None)."""
        start = time.perf_counter()
        batch = mx.array(self.batches.batch(self.state["step"]))
        loss, norm, stop = self.trainer.step(batch, self.stopping)
        self.state["step"] += 1
        self.seconds += time.perf_counter() - start
        if not loss < float("inf"):
            raise WiolaError(
                f"the loss is {loss} at step {self.state['step']}; the last checkpoint is kept: "
                "resume is no help, a lower learning rate may be"
            )
        step = self.state["step"]
        if step % self.job.log_every == 0 or step in (1, self.settings.steps):
            rate = self.trainer.learning_rate
            self.log(loss=loss, grad_norm=norm, learning_rate=rate, seconds=self.seconds)
        early = False
        if self.valid and (step % self.job.eval_every == 0 or step == self.settings.steps):
            early = self.evaluate()
        return loss, "signal" if stop else "early" if early else None

    def evaluate(self) -> bool:
        """Scores the validation text; whether the run should end early."""
        length = self.settings.sequence_length
        with self.trainer.computing() as model:
            score = score_tokens(model, self.valid.ids, length, batch_size=self.trainer.micro)
        loss = self.of_the_leader(score.loss)
        bits = score.bits_per_byte(self.valid.bytes)
        self.log(valid_loss=loss, standard_error=score.standard_error, bits_per_byte=bits)
        better = self.state["best"] is None or loss < self.state["best"]
        if better:
            self.state |= {"best": loss, "best_step": self.state["step"], "worse": 0}
            self.write("best", None)
        else:
            self.state["worse"] += 1
        return 0 < self.job.patience <= self.state["worse"]

    def of_the_leader(self, value: float) -> float:
        """The same number in every process, so that all of them decide alike."""
        if self.group.size() == 1:
            return value
        mine = mx.array(value if self.leads else 0.0)
        return mx.distributed.all_sum(mine, group=self.group).item()

    def save(self):
        settings = asdict(self.settings)
        self.write("last", {"progress": self.state, "settings": settings, "facts": self.facts()})

    def write(self, name: str, state: dict | None):
        if self.leads:
            folder = self.job.out / name
            checkpoint.save(folder, self.trainer, self.tokenizer_folder, self.tokenizer, state)

    def ngram(self) -> list[float] | None:
        """Losses of n-gram models on the same tokens: 1-gram, 2-gram, 3-gram."""
        if self.valid is None:
            return None
        return ngram_losses(self.train.ids, self.valid.ids, self.args.vocab_size, NGRAM_ORDER)

    @contextmanager
    def stop_on_signals(self):
        """Ctrl-C or a termination ends the run after the step and saves; a second Ctrl-C at once.

        Outside of the main thread nothing is changed.
        """

        def stop(number, _frame):
            if self.stopping and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.stopping = True

        numbers, before = (signal.SIGINT, signal.SIGTERM), {}
        with suppress(ValueError):  # raised outside of the main thread
            before = {number: signal.signal(number, stop) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
