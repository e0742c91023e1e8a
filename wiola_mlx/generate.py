"""``python -m wiola_mlx.generate``: text from a prompt, as it comes."""

import argparse
import json
import sys

from .console import HelpFormatter, note, run
from .errors import WiolaError

DEFAULT_MODEL = "builtin"
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

    sampling = parser.add_argument_group("choosing tokens").add_argument
    sampling("--temp", type=float, default=0.0, help="temperature; 0 takes the likeliest token")
    sampling("--top-p", type=float, default=1.0, help="sample from the likeliest with this sum")
    sampling("--top-k", type=int, default=0, help="sample from this many tokens; 0: from all")
    sampling(
        "--min-p", type=float, default=0.0, help="leave out tokens below this share of the top"
    )
    sampling("--repetition-penalty", type=float, help="above 1: the last 20 tokens come less often")
    sampling(
        "--seed", type=int, help="the same seed gives the same text; none: a new text each time"
    )
    sampling("--ignore-chat-template", action="store_true", help="the prompt as it is, always")

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
    memory("--num-draft-tokens", type=int, default=3, help="tokens that it drafts at a time")
    return parser


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt from the argument or the option, from stdin, or the built-in model's own."""
    given = [p for p in (args.prompt, args.prompt_option) if p is not None]
    if len(given) > 1:
        raise WiolaError("the prompt is given twice: as an argument and with --prompt")
    if given and given[0] != "-":
        prompt = given[0]
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
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise WiolaError(f"the prompt on stdin is not UTF-8 text: {error.reason}") from error


def generate(args: argparse.Namespace) -> int:
    prompt = read_prompt(args)
    from .generation import checked_max_tokens

    checked_max_tokens(args.max_tokens)  # before a model is loaded

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
        temp=args.temp,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        kv_bits=args.kv_bits,
        kv_group_size=args.kv_group_size,
        max_kv_size=args.max_kv_size,
        prompt_cache=cache,
        draft_model=draft_model,
        num_draft_tokens=args.num_draft_tokens,
    )
    write(responses, prompt if args.echo else "", args)
    return 0


def templated(prompt: str, tokenizer, args: argparse.Namespace):
    """Ids of a one-message chat where the model has a chat template, else the prompt as it is."""
    if args.ignore_chat_template or not tokenizer.has_chat_template or args.prompt_cache_file:
        return prompt
    messages = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))


def load_draft(name: str, tokenizer):
    from .loading import load

    draft_model, draft_tokenizer = load(name)
    if draft_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise WiolaError("the draft model has another tokenizer than the model")
    return draft_model


def load_cache(args: argparse.Namespace, model):
    from .prompt_cache import load_prompt_cache

    return load_prompt_cache(args.prompt_cache_file, model)


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
