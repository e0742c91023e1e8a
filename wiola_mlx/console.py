"""What every command does alike: one line for a mistake, notes on stderr, Ctrl-C ends quietly."""

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Callable

from .errors import WiolaError

TRACEBACK = "WIOLA_MLX_TRACEBACK"  # set it to see where an unforeseen error came from
INTERRUPTED = 130  # as a shell reports a program that Ctrl-C ended


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of descriptions, and shows defaults, but not that there is none."""

    def _get_help_string(self, action):
        if action.default in (None, False):
            return action.help
        return super()._get_help_string(action)


def note(text: str):
    print(f"wiola-mlx: {' '.join(str(text).split())}", file=sys.stderr, flush=True)


def run(command: Callable[[], int | None]) -> int:
    """Runs a command and returns its exit code: 1 for a user's mistake, 130 for Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 ends no story
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = show_warning
        try:
            code = command() or 0
            sys.stdout.flush()
            return code
        except WiolaError as error:
            note(f"error: {error}")
            return 1
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:  # the reader, such as `head`, has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except Exception as error:
            if os.environ.get(TRACEBACK):
                raise
            note(f"error: {type(error).__name__}: {error} ({TRACEBACK}=1 shows where)")
            return 1


def show_warning(message, category, *_args, **_kwargs):
    if issubclass(category, UserWarning):
        note(f"note: {message}")


@contextlib.contextmanager
def progress_line(label: str):
    """A function (done, total) that keeps one line on stderr up to date, on a terminal only."""
    shown = sys.stderr.isatty()

    def show(done: int, total: int):
        if shown:
            print(f"\r{label}: {done}/{total}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
