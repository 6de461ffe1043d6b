"""`megaspec checkpoint save RUN --out NEW`: the weights of a checkpoint alone, as a run folder of their own."""

import argparse
from pathlib import Path
from typing import Any

from megaspec.checkpoint.files import refuse_existing
from megaspec.commands.hf_export import DTYPES
from megaspec.commands.paragraphs import Paragraphs
from megaspec.commands.weights_source import open_source, write_taken
from megaspec.core.errors import printable
from megaspec.core.units import bytes_in_words
from megaspec.run_folder import read_run

_DESCRIPTION = """Write the weights of a checkpoint into a new run folder, without the optimizer's state.

With the run's Spec and tokenizer, so that init.load, generate, eval, hf export and checkpoint take it as any run.
There is nothing to resume in it."""


def add_parser(commands: Any) -> None:
    """The parser of `checkpoint save`."""
    text = "write the weights of a checkpoint alone, as a run folder of their own"
    command = commands.add_parser("save", help=text, description=_DESCRIPTION, formatter_class=Paragraphs)
    command.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    command.add_argument("--out", required=True, metavar="NEW", type=Path, help="run folder to make")
    command.add_argument("--step", type=int, metavar="N", help="checkpoint; without it the newest good one")
    text = "round weights to it; without it each stays as it is stored: master weights in fp32"
    command.add_argument("--dtype", choices=DTYPES, help=text)


def run(args: argparse.Namespace) -> int:
    """Write it, and say what was written. Raises RecipeError, CheckpointError, WriteError; nothing is left then."""
    # before anything is read
    refuse_existing(args.out)
    saved = read_run(args.run, allows_gone=True)

    from megaspec.checkpoint.streamed import WeightsOf  # torch, only where it is needed
    from megaspec.runtime.build import DTYPES as TORCH_DTYPES

    source = open_source(saved, args.step)
    with source.reader as reader:
        weights = WeightsOf(reader, TORCH_DTYPES.get(args.dtype))
        write_taken(args.out, weights, saved, [source.taken()])
        print(printable(f"{args.out}: step {reader.step} of {args.run}, {in_words(weights)}"))
        left = reader.manifest.bytes
    print(printable(f"without optimizer state: {bytes_in_words(left)} there"))
    print(printable(f"megaspec train recipe=NAME init.load={args.out} trains from it"))
    return 0


def in_words(weights: Any) -> str:
    """How many weights a source holds, in which formats, and their size."""
    from megaspec.weights_run import bytes_of

    names = weights.names()
    formats = sorted({str(weights.dtype(name)).removeprefix("torch.") for name in names})
    return f"{len(names)} weights in {' and '.join(formats)}, {bytes_in_words(bytes_of(weights))}"
