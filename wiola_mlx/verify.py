"""``python -m wiola_mlx.verify``: is cached decoding with these weights equal to the full pass?"""

import argparse
import json
import sys
from pathlib import Path

from .console import HelpFormatter, progress_line, run
from .errors import WiolaError

DTYPES = ("float32", "float16", "bfloat16", "stored")
TOLERANCE = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}  # share of the largest logit
DESCRIPTION = """\
Compare cached decoding with one full pass, on a model's own weights.

A text is read token by token, in random pieces, with some of it taken back, in padded batches, and
from a cache that was saved; every logit is compared. In float32 nothing but rounding may differ.
"""
EXAMPLES = """\
examples:
  python -m wiola_mlx.verify builtin
  python -m wiola_mlx.verify path/to/wiola13m --tokens 600 --seed 1 --json
  python -m wiola_mlx.verify tests/reference/gsa-base --golden tests/reference/gsa-base/golden.npz
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m wiola_mlx.verify",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("model", help="a model folder or Hub id, or builtin")
    add("--prompt", help="the text to read (by default random tokens)")
    add("--tokens", type=int, default=64, help="how many random tokens")
    add("--seed", type=int, default=0, help="of the tokens and of the pieces")
    add("--dtype", choices=DTYPES, default="float32", help="compute in this dtype")
    add(
        "--tolerance",
        type=float,
        help="largest difference allowed, as a share of the largest logit "
        f"(by default {TOLERANCE['float32']:g} in float32, more in 16 bits)",
    )
    add("--golden", metavar="FILE", help="an .npz with input_ids and logits of the reference")
    add("--json", action="store_true", help="write one JSON object")
    return parser


def verify_model(
    model, ids, seed: int = 0, tolerance: float = TOLERANCE["float32"], golden=None, progress=None
) -> dict:
    """Runs every check of ``equivalence.CHECKS``.

    Args:
        model: any Wiola model in evaluation mode.
        ids: token ids [1, N], N of 2 or more.
        seed: of the random pieces.
        tolerance: the largest difference of logits, as a share of the largest logit.
        golden: a mapping with "input_ids" [B, T] and the reference's "logits" [B, T, V].
        progress: called with (checks done, checks in all).

    Returns:
        "checks": name → "logits", "relative", "probabilities", "passed"; "tolerance"; "passed".
    """
    import random

    import mlx.core as mx

    from .equivalence import CHECKS, differences

    results = {}
    for i, (name, check) in enumerate(CHECKS.items()):
        if progress:
            progress(i, len(CHECKS))
        results[name] = differences(check(model, ids, random.Random(seed)))
    if golden is not None:
        found = model(mx.array(golden["input_ids"]))
        results["golden"] = differences([(found, mx.array(golden["logits"]))])
    for result in results.values():
        result["passed"] = result["relative"] <= tolerance
    return {
        "tokens": ids.shape[1],
        "tolerance": tolerance,
        "checks": results,
        "passed": all(result["passed"] for result in results.values()),
    }


def open_model(args: argparse.Namespace):
    """(model, ids [1, N]): a tokenizer is only needed for a prompt."""
    import mlx.core as mx

    from .loading import load, load_model

    dtype = None if args.dtype == "stored" else getattr(mx, args.dtype)
    if args.prompt is None:
        model, _ = load_model(args.model, dtype=dtype)
        key = mx.random.key(args.seed)
        return model, mx.random.randint(0, model.args.vocab_size, (1, args.tokens), key=key)
    model, tokenizer = load(args.model, dtype=dtype)
    return model, mx.array([tokenizer.encode(args.prompt, add_special_tokens=False)], mx.int32)


def read_golden(path: str | None, model) -> dict | None:
    if path is None:
        return None
    import numpy as np

    try:
        with np.load(Path(path).expanduser()) as file:
            golden = {name: file[name] for name in ("input_ids", "logits")}
    except (OSError, ValueError, KeyError, EOFError, AttributeError) as error:
        raise WiolaError(f"{path} is no golden file with input_ids and logits: {error}") from error
    if golden["logits"].shape != (*golden["input_ids"].shape, model.args.vocab_size):
        raise WiolaError(f"{path} was made with a model of another vocabulary")
    return golden


def default_tolerance(model, dtype: str) -> float:
    from .info import kv_dtype

    name = str(kv_dtype(model)).removeprefix("mlx.core.") if dtype == "stored" else dtype
    return TOLERANCE[name]


def verify(args: argparse.Namespace) -> int:
    if args.tokens < 2:
        raise WiolaError(f"--tokens must be 2 or more, not {args.tokens}")
    model, ids = open_model(args)
    if ids.shape[1] < 2:
        raise WiolaError("the prompt is shorter than 2 tokens")
    tolerance = args.tolerance
    if tolerance is None:
        tolerance = default_tolerance(model, args.dtype)
    golden = read_golden(args.golden, model)
    with progress_line("checks") as progress:
        report = verify_model(model, ids, args.seed, tolerance, golden, progress)
    report = {"model": args.model, "dtype": args.dtype, "seed": args.seed, **report}
    print(json.dumps(finite(report))) if args.json else write(report)
    return 0 if report["passed"] else 1


def finite(report: dict) -> dict:
    """JSON has no infinity: null stands for it."""
    checks = {
        name: {k: None if v == float("inf") else v for k, v in result.items()}
        for name, result in report["checks"].items()
    }
    return {**report, "checks": checks}


def write(report: dict):
    print(f"{'largest difference of':22} {'logits':>10} {'relative':>10} {'probabilities':>14}")
    for name, r in report["checks"].items():
        verdict = "equal" if r["passed"] else "DIFFERENT"
        figures = f"{r['logits']:10.2e} {r['relative']:10.2e} {r['probabilities']:14.2e}"
        print(f"{name:22} {figures}  {verdict}")
    equal = "equals" if report["passed"] else "DOES NOT EQUAL"
    print(
        f"cached decoding {equal} the full pass: {report['tokens']} tokens, {report['dtype']}, "
        f"tolerance {report['tolerance']:g} of the largest logit"
    )


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return run(lambda: verify(args))


if __name__ == "__main__":
    sys.exit(main())
