"""``python -m wiola_mlx.evaluate``: loss, perplexity and bits per byte of models on a text."""

import argparse
import json
import sys
import time
from itertools import islice

from .console import HelpFormatter, note, progress_line, run
from .errors import WiolaError

DTYPES = ("float32", "float16", "bfloat16")
DESCRIPTION = """\
Loss, perplexity and bits per byte of one or more models on text files.

Documents follow each other with the end token between; each token is scored once, in a window that
slides by the stride. The end of a document counts as one byte.
"""
EXAMPLES = """\
examples:
  python -m wiola_mlx.evaluate builtin --text stories.txt
  python -m wiola_mlx.evaluate original quantized --text stories.txt --window 256 --stride 256
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m wiola_mlx.evaluate",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="model folders or Hub ids, or builtin")
    add(
        "--text",
        nargs="+",
        required=True,
        metavar="FILE",
        help="text with <|endoftext|> between documents, or .jsonl with a text in each line",
    )
    add("--window", type=int, help="tokens that a model sees (by default its trained length)")
    add("--stride", type=int, help="tokens that a window scores (by default half the window)")
    add("--batch-size", type=int, default=8, help="windows at a time")
    add("--max-documents", type=int, help="only the first documents")
    add("--dtype", choices=DTYPES, help="compute in this dtype (by default as stored)")
    add("--json", action="store_true", help="write one JSON object")
    return parser


def evaluate_model(
    name: str,
    documents: list[str],
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    dtype: str | None = None,
    progress=None,
) -> dict:
    """One model's figures on ``documents``.

    Args:
        name: what ``wiola_mlx.load`` takes.
        window, stride: in tokens; None means the trained length, and half the window.
        progress: called with (tokens scored, tokens in all).

    Returns:
        "loss" (nats a token), "standard_error" (of the loss), "perplexity", "bits_per_byte",
        "tokens", "bytes", "documents", "window", "stride", "tokens_per_second".

    Raises:
        WiolaError: for a model that does not load or sizes that make no sense.
    """
    import mlx.core as mx

    from .loading import load
    from .scoring import score_tokens

    model, tokenizer = load(name, dtype=getattr(mx, dtype) if dtype else None)
    window = window or model.args.max_position_embeddings
    stride = stride or max(1, window // 2)
    if stride > window:
        raise WiolaError(f"the stride ({stride}) must not be larger than the window ({window})")
    ids = token_stream(tokenizer, documents)
    start = time.perf_counter()
    score = score_tokens(model, ids, window, stride, batch_size, progress)
    seconds = time.perf_counter() - start
    size = sum(len(text.encode()) + 1 for text in documents)
    return {
        "model": name,
        "loss": score.loss,
        "standard_error": score.standard_error,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte(size),
        "tokens": score.tokens,
        "bytes": size,
        "documents": len(documents),
        "window": window,
        "stride": stride,
        "tokens_per_second": round(score.tokens / seconds, 1),
    }


def token_stream(tokenizer, documents: list[str]):
    """Ids [N] of all documents, an end token before the first and after each."""
    import numpy as np

    from .documents import end_token

    end = end_token(tokenizer)
    ids = [end]
    for text in documents:
        ids += [*tokenizer.encode(text, add_special_tokens=False), end]
    return np.array(ids, np.int32)


def check_sizes(args: argparse.Namespace):
    for option in ("window", "stride", "batch_size", "max_documents"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise WiolaError(f"--{option.replace('_', '-')} must be 1 or more, not {value}")


def evaluate(args: argparse.Namespace):
    from .documents import read_documents

    check_sizes(args)
    documents = list(islice(read_documents(args.text), args.max_documents))
    if not documents:
        raise WiolaError(f"there is no text in {', '.join(args.text)}")
    results = []
    for name in args.models:
        with progress_line(name) as progress:
            results.append(
                evaluate_model(
                    name, documents, args.window, args.stride, args.batch_size, args.dtype, progress
                )
            )
    if args.json:
        print(json.dumps({"text": args.text, "models": results}, ensure_ascii=False))
    else:
        write(results)


def write(results: list[dict]):
    width = max(len("model"), *(len(row["model"]) for row in results))
    print(f"{'model':{width}}  {'loss':>17}  perplexity  bits/byte   tokens  tokens/s")
    for row in results:
        error = row["standard_error"]
        loss = f"{row['loss']:.4f}" + (f" ± {error:.4f}" if error is not None else "")
        print(
            f"{row['model']:{width}}  {loss:>17}  {row['perplexity']:10.4f}  "
            f"{row['bits_per_byte']:9.4f}  {row['tokens']:7}  {row['tokens_per_second']:8.0f}"
        )
    first = results[0]
    note(f"{first['documents']} documents, {first['bytes']} bytes; ± is one standard error")


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return run(lambda: evaluate(args))


if __name__ == "__main__":
    sys.exit(main())
