"""`megaspec from-megatron`: the flags of a pretrain_gpt.py command as a recipe, or its checkpoint as a run folder."""

import argparse
import sys
from pathlib import Path
from typing import Any

from megaspec.commands.paragraphs import Paragraphs
from megaspec.core.errors import Problem, RecipeError, printable
from megaspec.data.files import write_text

_DESCRIPTION = """Write the recipe that trains what a pretrain_gpt.py command of Megatron-LM trains.

FLAG: the flags after --, with or without the launcher and the program in front of them; or @FILE ARG..., a shell script
that starts the training, with its arguments ($1, $2, ...); NAME=VALUE in front of it sets a variable. It is followed
and never run: what decides what is trained and can't be known from its text is an error. Comments tell which flag each
key is from, which flags have no meaning here and why, and what Megatron changes without a word. What a recipe can't say
is an error.

With --checkpoint FOLDER --out RUN: make a run folder of the weights of a checkpoint, of --ckpt-format torch_dist or
torch. FOLDER is what --save names, or one of its iter_ folders. Its own args say the model; FLAGs behind -- say what
they leave open, such as --vocab-size. Nothing in it is executed, and what can't be known is an error."""


def add_parser(commands: Any) -> None:
    """The parser of `from-megatron`."""
    command = commands.add_parser(
        "from-megatron",
        help="a recipe from the flags of a pretrain_gpt.py command, or a run from its checkpoint",
        description=_DESCRIPTION,
        formatter_class=Paragraphs,
        allow_abbrev=False,
    )
    command.add_argument("flags", nargs="*", metavar="FLAG", help="flags after --, or [NAME=VALUE] @FILE ARG...")
    command.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="read the weights of this checkpoint; --out is a run folder then",
    )
    command.add_argument(
        "--out", type=Path, metavar="FILE", help="write it there, e.g. recipes/mine.yaml; with --checkpoint, runs/start"
    )
    command.add_argument("--name", metavar="NAME", help="name of the run (that of the file)")
    command.add_argument("--gpus", type=int, metavar="N", help="world size, where the launcher does not say it")
    command.add_argument("--partial", action="store_true", help="write it even if it can't say everything")


def run(args: argparse.Namespace) -> int:
    """Read, translate, check, write. RecipeError: wrong flags, broken rules, or what would train something else.

    With --checkpoint: megatron_checkpoint.run, and its errors."""
    # a table of 838 flags, only where it is needed
    if args.checkpoint is not None:
        from megaspec.commands import megatron_checkpoint

        return megatron_checkpoint.run(args)
    from megaspec.megatron.command import read_command
    from megaspec.megatron.translate import check, translate
    from megaspec.megatron.writing import recipe_text

    if args.gpus is not None and args.gpus < 1:
        raise RecipeError(f"--gpus {args.gpus} must be at least 1")
    draft = translate(read_command(args.flags), gpus=args.gpus)
    text = recipe_text(draft, name=args.name)
    problems = draft.problems or check(text, draft.sources)
    lost = [] if args.partial else draft.lost
    if lost:
        way_out = "give --partial for a recipe without these, which trains something else"
        problems = [*problems, *lost, Problem("", way_out, "", "megatron-lost")]
    if problems:
        raise RecipeError(problems)
    if args.out is None:
        print(text, end="")
    else:
        _write(args.out, text)
    for note in draft.command.notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    for problem in draft.lost:
        print(f"lost: {problem}", file=sys.stderr)
    return 0


def _write(out: Path, text: str) -> None:
    if out.exists():
        raise RecipeError(f"--out {out} exists; give another name")
    write_text(out, text)
    print(printable(f"{out}: written; megaspec plan recipe={out.stem} shows it"))
