"""`megaspec generate RUN TEXT`: what the newest good checkpoint of a run writes after a text."""

import argparse
from math import inf
from pathlib import Path
from typing import Any

from megaspec.core.errors import RecipeError, printable
from megaspec.estimate.target import detect_target
from megaspec.run_folder import read_run


def add_parser(commands: Any) -> None:
    """The parser of `generate`."""
    text = "write text with the newest checkpoint of a run"
    command = commands.add_parser("generate", help=text, description=text, allow_abbrev=False)
    command.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    command.add_argument("text", metavar="TEXT", help="what to go on from")
    command.add_argument("--tokens", type=int, default=64, metavar="N", help="how many tokens to write (64)")
    command.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 takes the likeliest (0.8)")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (0)")


def run(args: argparse.Namespace) -> int:
    """Print what the newest good checkpoint of a run writes after a text."""
    if args.tokens < 0 or not 0 <= args.temperature < inf or args.seed < 0:
        raise RecipeError("--tokens, --temperature and --seed must be at least 0, and finite")
    if any("\ud800" <= c <= "\udfff" for c in args.text):
        raise RecipeError("TEXT is not valid UTF-8; give it in the encoding of the terminal")
    trained = read_run(args.run).spec
    from megaspec.runtime.generate import generate_text  # torch, only where it is needed

    cuda = detect_target().device == "cuda"
    written = generate_text(
        args.run, trained, args.text, tokens=args.tokens, temperature=args.temperature, seed=args.seed, cuda=cuda
    )
    print(printable(f"{args.text}{written}", keep="\n\t"))
    return 0
