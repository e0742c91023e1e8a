"""``python -m wiola_mlx.generate``: text from a prompt, as it comes."""

import argparse
import json
import sys
from pathlib import Path

from .console import HelpFormatter, note, run
from .errors import WiolaError

DEFAULT_MODEL = "builtin"
PROGRESS_FROM = 512  # tokens of a prompt
MARK = "<prompt>"
DEFAULT_PROMPT = "Once upon a time"

DESCRIPTION = """\
Write on from a prompt with a Wiola model.

The text goes to stdout as it comes; speeds and notes go to stderr.
"""
EXAMPLES = """\
examples:
  python -m wiola_mlx.generate "Once upon a time" --echo --temp 0.8
  python -m wiola_mlx.generate --model path/to/wiola13m "The little dog" --seed 7
  echo "One day, Lily" | python -m wiola_mlx.generate -
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m wiola_mlx.generate",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("prompt", nargs="?", help="the text to go on from; - reads it from stdin, as does a pipe")
    add("--prompt", "-p", dest="prompt_option", metavar="PROMPT", help="the same, as an option")
    add("--model", default=DEFAULT_MODEL, help="a model folder, .gguf file or Hub id, or builtin")
    add("--adapter-path", help="a folder with LoRA adapters")
    add("--max-tokens", "-m", type=int, default=256, help="tokens to write at most; 0 writes none")
    add("--echo", action="store_true", help="write the prompt, too, before the text")
    add(
        "--json", action="store_true", help="write one JSON object with text and figures, no stream"
    )
    add("--quiet", "-q", action="store_true", help="no figures on stderr")

    add_sampling(parser)
    add("--ignore-chat-template", action="store_true", help="the prompt as it is, always")

    memory = parser.add_argument_group("cache and speed").add_argument
    memory("--kv-bits", type=int, help="keep K and V in 2, 3, 4, 5, 6 or 8 bits, from the start")
    memory("--kv-group-size", type=int, help="values a scale: 32, 64 or 128 (by default what fits)")
    memory("--max-kv-size", type=int, help=argparse.SUPPRESS)  # refused with its reason
    memory("--prompt-cache-file", metavar="FILE", help="go on from a cache that cache_prompt saved")
    memory(
        "--draft-model",
        metavar="MODEL",
        help="a smaller model that drafts; the text stays the same",
    )
    memory("--num-draft-tokens", type=int, help="tokens that it drafts at a time; by default 3")
    return parser


def add_sampling(parser: argparse.ArgumentParser, temp: float = 0.0, top_p: float = 1.0):
    """The options that say how tokens are chosen; ``sampling_of`` takes them back out."""
    add = parser.add_argument_group("choosing tokens").add_argument
    add("--temp", type=float, default=temp, help="temperature; 0 takes the likeliest token")
    add("--top-p", type=float, default=top_p, help="sample from the likeliest with this sum")
    add("--top-k", type=int, default=0, help="sample from this many tokens; 0: from all")
    add("--min-p", type=float, default=0.0, help="leave out tokens below this share of the top")
    add("--repetition-penalty", type=float, help="above 1: the last 20 tokens come less often")
    add("--seed", type=int, help="the same seed gives the same text; none: a new text each time")


def sampling_of(args: argparse.Namespace) -> dict:
    names = ("temp", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
    return {name: getattr(args, name) for name in names}


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt from the argument or the option, from stdin, or the built-in model's own."""
    given = [p for p in (args.prompt, args.prompt_option) if p is not None]
    if len(given) > 1:
        raise WiolaError("the prompt is given twice: as an argument and with --prompt")
    if given and given[0] != "-":
        prompt = given[0]
    elif sys.stdin is None:
        raise WiolaError("there is no prompt, and no stdin to read it from")
    elif given or not sys.stdin.isatty():
        prompt = read_stdin()
    elif args.model == DEFAULT_MODEL:
        note(f"note: no prompt given, so it is: {DEFAULT_PROMPT}")
        prompt = DEFAULT_PROMPT
    else:
        raise WiolaError('there is no prompt: give one, as in: generate "Once upon a time"')
    if not prompt.strip():
        raise WiolaError("the prompt is empty")
    return prompt


def read_stdin() -> str:
    """All of stdin as UTF-8, without the line end that ``echo`` adds."""
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise WiolaError(f"the prompt on stdin is not UTF-8 text: {error.reason}") from error


def generate(args: argparse.Namespace) -> int:
    prompt = read_prompt(args)
    from .generation import checked_max_tokens

    checked_max_tokens(args.max_tokens)  # before a model is loaded
    refuse_dead_options(args)

    from .generation import stream_text
    from .loading import load

    model, tokenizer = load(args.model, adapter_path=args.adapter_path)
    draft_model = load_draft(args.draft_model, tokenizer) if args.draft_model else None
    cache = load_cache(args, model) if args.prompt_cache_file else None
    responses = stream_text(
        model,
        tokenizer,
        templated(prompt, tokenizer, args),
        max_tokens=args.max_tokens,
        **sampling_of(args),
        kv_bits=args.kv_bits,
        kv_group_size=args.kv_group_size,
        max_kv_size=args.max_kv_size,
        prompt_cache=cache,
        draft_model=draft_model,
        num_draft_tokens=3 if args.num_draft_tokens is None else args.num_draft_tokens,
        progress=show_progress if sys.stderr.isatty() else None,
    )
    write(responses, prompt if args.echo else "", args)
    return 0


def refuse_dead_options(args: argparse.Namespace):
    if args.num_draft_tokens is not None and not args.draft_model:
        raise WiolaError("--num-draft-tokens needs --draft-model")
    if args.temp == 0 and (args.top_p != 1 or args.top_k or args.min_p):
        raise WiolaError(
            "--top-p, --top-k and --min-p need a --temp above 0: at 0 nothing is drawn"
        )


def show_progress(read: int, total: int):
    """One line on a terminal while a long prompt is read; gone when it is."""
    if total > PROGRESS_FROM:
        text = f"reading the prompt: {read} of {total} tokens" if read < total else ""
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def templated(prompt: str, tokenizer, args: argparse.Namespace):
    """Ids of a one-message chat where the model has a chat template, else the prompt as it is."""
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        return prompt
    from .generation import apply_template

    if not args.prompt_cache_file:
        return list(apply_template(tokenizer, [{"role": "user", "content": prompt}]))
    # The cache holds the template's beginning: only what comes from the prompt on is new.
    with_mark, whole = (
        apply_template(tokenizer, [{"role": "user", "content": text}], tokenize=False)
        for text in (MARK, prompt)
    )
    return tokenizer.encode(whole[with_mark.index(MARK) :], add_special_tokens=False)


def load_draft(name: str, tokenizer):
    from .loading import load

    draft_model, draft_tokenizer = load(name)
    if draft_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise WiolaError("the draft model has another tokenizer than the model")
    return draft_model


def load_cache(args: argparse.Namespace, model):
    from .prompt_cache import FINGERPRINT, load_prompt_cache

    file = args.prompt_cache_file
    cache, metadata = load_prompt_cache(file, model, return_metadata=True)
    made_with = metadata.get("model", args.model)  # mlx-lm's cache_prompt tells the name only
    if FINGERPRINT not in metadata and Path(made_with).resolve() != Path(args.model).resolve():
        raise WiolaError(f"{file} was made with the model {made_with}, not with {args.model}")
    return cache


def write(responses, echo: str, args: argparse.Namespace):
    text, last = [], None
    if echo and not args.json:
        print(echo, end="", flush=True)
    for last in responses:
        text.append(last.text)
        if not args.json:
            print(last.text, end="", flush=True)
    figures = figures_of(last)
    if args.json:
        print(json.dumps({"text": echo + "".join(text), **figures}, ensure_ascii=False))
        return
    print()
    if not args.quiet and last is not None:
        note(
            "prompt {prompt_tokens} tokens at {prompt_tps:.1f} tokens/s, text {generation_tokens} "
            "tokens at {generation_tps:.1f} tokens/s, peak memory {peak_memory_gb:.3f} GB".format(
                **figures
            )
        )


def figures_of(response) -> dict:
    if response is None:
        return {"generation_tokens": 0, "finish_reason": "length"}
    return {
        "prompt_tokens": response.prompt_tokens,
        "prompt_tps": round(response.prompt_tps, 3),
        "generation_tokens": response.generation_tokens,
        "generation_tps": round(response.generation_tps, 3),
        "peak_memory_gb": round(response.peak_memory, 4),
        "finish_reason": response.finish_reason,
    }


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return run(lambda: generate(args))


if __name__ == "__main__":
    sys.exit(main())
