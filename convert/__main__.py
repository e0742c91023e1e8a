"""``python -m wiola_mlx.convert``: bring weights along, and take them away again."""

import argparse
import json
import sys

from wiola_mlx.console import HelpFormatter, run

from .options import DTYPES, MODES, RECIPES, TYPES

SOURCE = "a model folder (released or MLX layout), a .gguf file, a Hub id, or builtin"
NEW_FOLDER = "the folder to make; it must not exist yet"
EXAMPLES = """\
examples:
  python -m wiola_mlx.convert to-mlx path/to/wiola13m wiola13m-4bit -q
  python -m wiola_mlx.convert to-gguf path/to/wiola13m wiola13m-q8_0.gguf --type q8_0
  python -m wiola_mlx.convert to-mlx wiola13m-q8_0.gguf wiola13m-8bit
  python -m wiola_mlx.convert to-hf wiola13m-tuned wiola13m-tuned-pytorch
"""
TO_MLX = """\
Write an MLX folder; the source stays as it is.

-q alone takes the default for small models: 4 bits in groups of 64, and 6 bits for the
embedding and the value and down projections, which feel it most. --q-bits makes all layers
alike. Gates and norms are never quantized; a layer that the group size does not divide stays
as it is, and is named.
Packed types of a .gguf stay packed, exactly.
"""
TO_GGUF = """\
Write a GGUF file; the source stays as it is.

Without --type each tensor keeps its own type: packed MLX weights by an exact map where there
is one, else F16. Vectors, norms and gates are float32 always. The file is read back and
compared before it gets its name.
"""
TO_HF = """\
Write a folder in the released PyTorch layout, for the PyTorch packages; quantized weights are
dequantized. The source stays as it is.
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m wiola_mlx.convert",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_to_mlx(add_command(commands, "to-mlx", "to an MLX folder, quantized if asked", TO_MLX))
    add_to_gguf(add_command(commands, "to-gguf", "to a GGUF file", TO_GGUF))
    to_hf = add_command(commands, "to-hf", "to the released PyTorch layout", TO_HF)
    to_hf.add_argument("target", help=NEW_FOLDER)
    add_dtype(to_hf)
    for command in commands.choices.values():
        command.add_argument(
            "--dry-run", action="store_true", help="print the plan and write nothing"
        )
        command.add_argument("--json", action="store_true", help="the report as JSON on stdout")
    return parser


def add_command(commands, name: str, help_text: str, description: str):
    command = commands.add_parser(
        name, help=help_text, description=description, formatter_class=HelpFormatter
    )
    command.add_argument("source", help=SOURCE)
    return command


def add_dtype(command):
    command.add_argument(
        "--dtype", choices=DTYPES, help="cast the weights; by default they stay as they are"
    )


def add_to_mlx(command):
    add = command.add_argument
    add("target", help=NEW_FOLDER)
    add_dtype(command)
    add("-q", "--quantize", action="store_true", help="quantize; alone, by the default recipe")
    add("--q-bits", type=int, help="2, 3, 4, 5, 6 or 8 bits for every layer")
    add("--q-group-size", type=int, help="values a scale: 32, 64 or 128")
    add("--q-mode", choices=MODES, help="affine, or one of MLX's float modes")
    add("--quant-predicate", choices=RECIPES, help="a recipe: bits chosen by layer")


def add_to_gguf(command):
    command.add_argument("target", help="the file to make; it must not exist yet")
    command.add_argument(
        "--type",
        type=str.upper,
        choices=TYPES,
        help="the type of all matrices; K-quants need ggml's library (pip install "
        "'wiola-mlx[ggml]')",
    )


def convert(args: argparse.Namespace) -> int:
    report = {"to-mlx": convert_to_mlx, "to-gguf": convert_to_gguf, "to-hf": convert_to_hf}[
        args.command
    ](args)
    report.tell()
    if args.json:
        print(json.dumps(report.to_json(), ensure_ascii=False))
    elif args.dry_run:
        print(report.table())
    return 0


def convert_to_mlx(args: argparse.Namespace):
    from wiola_mlx.errors import WiolaError

    from .to_mlx import to_mlx

    options = (args.q_bits, args.q_group_size, args.q_mode, args.quant_predicate)
    if not args.quantize and any(option is not None for option in options):
        raise WiolaError("options of the quantization without -q: add -q")
    return to_mlx(
        args.source,
        args.target,
        args.q_bits,
        args.q_group_size,
        args.dtype,
        mode=args.q_mode or "affine",
        recipe=args.quant_predicate,
        quantize=args.quantize,
        dry_run=args.dry_run,
    )


def convert_to_gguf(args: argparse.Namespace):
    from .to_gguf import to_gguf

    return to_gguf(args.source, args.target, args.type, args.dry_run)


def convert_to_hf(args: argparse.Namespace):
    from .to_hf import to_hf

    return to_hf(args.source, args.target, args.dtype, args.dry_run)


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return run(lambda: convert(args))


if __name__ == "__main__":
    sys.exit(main())
