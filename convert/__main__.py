"""``python -m wiola_mlx.convert``: bring weights along."""

import argparse
import sys

from wiola_mlx.console import HelpFormatter, note, run

DTYPES = ("float32", "float16", "bfloat16")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m wiola_mlx.convert", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    to_mlx = commands.add_parser(
        "to-mlx",
        help="a released or MLX folder to a new MLX folder",
        description="Write a new MLX folder; the source stays as it is.",
        formatter_class=HelpFormatter,
    )
    to_mlx.add_argument("source", help="a model folder, a Hub id, or builtin")
    to_mlx.add_argument("target", help="the folder to make; it must not exist yet")
    to_mlx.add_argument("--bits", type=int, help="quantize to 2, 3, 4, 5, 6 or 8 bits")
    to_mlx.add_argument("--group-size", type=int, default=64, help="values a scale: 32, 64 or 128")
    to_mlx.add_argument("--dtype", choices=DTYPES, help="cast the weights; by default as they are")
    return parser


def convert(args: argparse.Namespace):
    import mlx.core as mx

    from .to_mlx import to_mlx

    dtype = getattr(mx, args.dtype) if args.dtype else None
    to_mlx(args.source, args.target, args.bits, args.group_size, dtype)
    note(f"written: {args.target}")


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return run(lambda: convert(args))


if __name__ == "__main__":
    sys.exit(main())
