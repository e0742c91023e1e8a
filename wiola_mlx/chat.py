"""``python -m wiola_mlx.chat``: talk with a model in the terminal."""

import argparse
import contextlib
import signal
import sys
from pathlib import Path

from .console import HelpFormatter, note, run
from .errors import WiolaError
from .generate import DEFAULT_MODEL, add_sampling, sampling_of

DESCRIPTION = """\
Talk with a Wiola model. Lines from a pipe are a conversation, too.

A model with a chat template answers. One without goes on with a running text: what you type is put
behind it, as with the built-in model, which tells stories.
"""
HELP = """\
/reset       start again
/save FILE   write the conversation to a new file
/help        this list
Ctrl-C stops an answer; at the prompt, Ctrl-C or Ctrl-D leaves."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m wiola_mlx.chat",
        description=DESCRIPTION,
        epilog=f"in the chat:\n{HELP}",
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="a model folder or Hub id, or builtin")
    add("--adapter-path", help="a folder with LoRA adapters")
    add("--system", help="a system prompt, for a model with a chat template")
    add("--max-tokens", "-m", type=int, default=256, help="tokens of an answer at most")
    add_sampling(parser, temp=0.8, top_p=0.95)
    return parser


def chat(args: argparse.Namespace) -> int:
    from .conversation import Conversation
    from .loading import load

    model, tokenizer = load(args.model, adapter_path=args.adapter_path)
    sampling = sampling_of(args)
    seed = sampling.pop("seed")
    if seed is not None:
        start_from_seed(seed)
    talk = Conversation(model, tokenizer, args.system, max_tokens=args.max_tokens, **sampling)
    if sys.stdin.isatty():
        note("/help lists the commands; Ctrl-D leaves")
    for line in lines():
        try:
            obey(line, talk) if line.startswith("/") else answer(line, talk)
        except WiolaError as error:
            if not sys.stdin.isatty():
                raise
            note(f"error: {error}")
    return 0


def start_from_seed(seed: int):
    """Once for the conversation: a seed in every turn would draw the same numbers again."""
    import mlx.core as mx

    from .generation import check_seed

    check_seed(seed)
    mx.random.seed(seed)


def lines():
    """What the user says: each line that is not empty, until Ctrl-D, Ctrl-C or the pipe's end."""
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() its editing and history
    try:
        while True:
            line = input("> " if on_terminal else "").strip()
            if line:
                yield line
    except EOFError:
        if on_terminal:
            print()
    except KeyboardInterrupt:
        print()
    except UnicodeDecodeError as error:
        raise WiolaError(f"the input is not text in UTF-8: {error.reason}") from error


def obey(line: str, talk):
    command, _, argument = line.partition(" ")
    if command == "/reset":
        talk.reset()
        note("a new conversation")
    elif command == "/save" and argument.strip():
        talk.save(Path(argument.strip()).expanduser())
        note(f"written: {argument.strip()}")
    elif command == "/help":
        print(HELP)
    else:
        note(f"there is no command {line!r}; /help lists them")


def answer(line: str, talk):
    """Prints the answer as it comes. Ctrl-C ends it between tokens, where the cache is whole."""
    with interrupts() as interrupted:
        pieces = talk.reply(line)
        for piece in pieces:
            print(piece, end="", flush=True)
            if interrupted:
                pieces.close()
                break
    print(flush=True)


@contextlib.contextmanager
def interrupts():
    """A list that Ctrl-C adds to; a second Ctrl-C within leaves the program."""
    seen: list[int] = []

    def handle(number, frame):
        if seen:
            signal.default_int_handler(number, frame)
        seen.append(number)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return run(lambda: chat(args))


if __name__ == "__main__":
    sys.exit(main())
