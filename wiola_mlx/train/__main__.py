"""``python -m wiola_mlx.train``: a model from scratch."""

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path

from ..console import INTERRUPTED, HelpFormatter, note, run
from ..errors import WiolaError
from .settings import DTYPES, Settings

DESCRIPTION = """\
Train a model of either family from scratch on text files. The defaults are the released 13M run's.

OUT gets last/ and best/ (model folders), metrics.jsonl, the tokenizer and the tokenized text.
Ctrl-C saves and ends; the same command with --resume goes on exactly. Under mlx.launch the batch is
shared out among the processes; to resume there, all of them must see the same OUT.
"""
EXAMPLES = """\
examples:
  python -m wiola_mlx.train --text train.txt --valid valid.txt --tokenizer wiola13m --out run
  python -m wiola_mlx.train --text train.txt --bpe 4096 --preset nano --steps 2000 --out run
  mlx.launch -n 2 -- python -m wiola_mlx.train --text train.txt --bpe 4096 --out run
"""
HELP = {
    "steps": "optimizer steps",
    "batch_size": "sequences a step, over all processes",
    "sequence_length": "tokens a sequence",
    "learning_rate": "the highest",
    "warmup_steps": "steps of linear warm-up; then a cosine to 0",
    "beta1": "of AdamW",
    "beta2": "of AdamW",
    "epsilon": "of AdamW",
    "weight_decay": "of AdamW, on everything but biases",
    "clip": "largest norm of the gradients; 0: any",
    "dtype": "computation; weights and optimizer stay float32",
    "seed": "of the weights and of the order of the text",
    "micro_batch_size": "sequences at once in a process, the gradients added up; 0: all",
    "checkpoint_layers": "keep less in memory: compute each layer again in the backward pass",
    "token_merging": "cross layer: merge similar neighbours in training (leaks the future)",
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m wiola_mlx.train",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("--out", required=True, type=Path, help="the folder of the run")
    add("--text", nargs="+", required=True, metavar="FILE", help="text to train on; see evaluate")
    add("--valid", nargs="+", metavar="FILE", help="text to evaluate on")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--preset", default="nano", help="nano, micro, small, 120m, 360m, 700m, 1.5b"
    )
    which.add_argument("--config", metavar="FILE", help="a config.json instead")
    words = parser.add_mutually_exclusive_group(required=True)
    words.add_argument("--tokenizer", help="a folder with a tokenizer, or a SentencePiece .model")
    words.add_argument("--bpe", type=int, metavar="SIZE", help="train a byte-level BPE on the text")
    add("--cache-dir", type=Path, help="where tokenized text is kept (by default OUT/tokens)")
    add_settings(parser.add_argument_group("settings that the losses depend on"))
    rest = parser.add_argument_group("course of the run").add_argument
    rest("--eval-every", type=int, default=1000, metavar="STEPS", help="evaluate this often")
    rest("--save-every", type=int, default=1000, metavar="STEPS", help="save this often")
    rest("--log-every", type=int, default=10, metavar="STEPS", help="write metrics this often")
    rest(
        "--patience",
        type=int,
        default=0,
        help="end after so many evaluations without a best; 0: no",
    )
    rest("--stop-at", type=int, default=0, metavar="STEP", help="save and end there; 0: no")
    rest("--resume", action="store_true", help="go on with the run in OUT")
    rest("--ngram", action="store_true", help="compare with n-gram models of the same text")
    rest("--plot", metavar="FILE", help="draw the loss curve, the released run's beside it")
    rest("--json", action="store_true", help="write the result as one JSON object")
    return parser


def add_settings(group):
    for field in fields(Settings):
        option = "--" + field.name.replace("_", "-")
        if field.type in (bool, "bool"):
            group.add_argument(option, action="store_true", help=HELP[field.name])
            continue
        choices = DTYPES if field.name == "dtype" else None
        kind, metavar = type(field.default), None if choices else "N"
        group.add_argument(
            option,
            type=kind,
            default=field.default,
            choices=choices,
            metavar=metavar,
            help=HELP[field.name],
        )


def train(args: argparse.Namespace) -> int:
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    for option in ("eval_every", "save_every", "log_every"):
        if getattr(args, option) < 1:
            raise WiolaError(f"--{option.replace('_', '-')} must be 1 or more")
    if args.ngram and not args.valid:
        raise WiolaError("--ngram compares on the validation text: give --valid")
    if args.plot:
        from ..plotting import new_figure

        new_figure(args.plot)  # before hours of work
    from .loop import Run

    progress = Progress(settings)
    try:
        this = Run(job_of(args), settings, progress.show)
        progress.on = progress.on and this.leads
        progress.begin(this)
        result = this.train_all()
    except OSError as error:  # no room, no right to write
        raise WiolaError(f"{error.filename or args.out}: {error.strerror or error}") from error
    progress.end()
    if this.leads:
        write(result, this, args)
    return INTERRUPTED if result["stopped"] == "signal" else 0


def job_of(args: argparse.Namespace):
    from .loop import Job

    names = [f.name for f in fields(Job) if f.name != "bpe_size"]
    return Job(bpe_size=args.bpe, **{name: getattr(args, name) for name in names})


class Progress:
    """One line on stderr, on a terminal only; evaluations are notes of their own."""

    def __init__(self, settings: Settings):
        self.steps, self.on, self.first = settings.steps, sys.stderr.isatty(), None

    def begin(self, this):
        from ..budget import parameter_formula

        count = sum(parameter_formula(this.args).values())
        if this.leads:
            note(
                f"{count:,} parameters, {len(this.train.ids):,} tokens of {this.train.documents:,} "
                f"documents, {this.batches.sequences:,} sequences, step {this.state['step']}"
            )

    def show(self, row: dict):
        if not self.on:
            return
        if "valid_loss" in row:
            print("\r\033[K", end="", file=sys.stderr)
            note(f"step {row['step']}: validation {row['valid_loss']:.4f} nats a token")
            return
        if self.first is None:
            self.first = row
        tokens, seconds = (row[k] - self.first[k] for k in ("tokens", "seconds"))
        speed = f", {tokens / seconds:.0f} tokens/s" if seconds else ""
        text = f"step {row['step']}/{self.steps}: loss {row['loss']:.4f}{speed}"
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def end(self):
        if self.on:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def write(result: dict, this, args: argparse.Namespace):
    if args.plot:
        from .curve import draw_curve

        draw_curve(this.rows(), args.plot, result["ngram"])
    if args.json:
        print(json.dumps(result))
        return
    why = {None: "finished", "early": "stopped early", "step": "stopped as asked"}
    how = why.get(result["stopped"], "stopped by a signal")
    print(f"{how} at step {result['step']}: {this.job.out / 'last'}")
    if result["loss"] is not None:
        print(f"training loss   {result['loss']:.4f} nats a token")
    if result["best_valid_loss"] is not None:
        best = f"{result['best_valid_loss']:.4f}, at step {result['best_step']}"
        print(f"validation loss {best}: {this.job.out / 'best'}")
    for n, loss in enumerate(result["ngram"] or [], 1):
        print(f"{n}-gram model    {loss:.4f}")


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return run(lambda: train(args))


if __name__ == "__main__":
    sys.exit(main())
