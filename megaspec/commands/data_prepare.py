"""`megaspec data prepare INPUT... --out PREFIX`. What it needs is imported when it runs."""

import argparse
import os
from typing import Any

from megaspec.commands.numbers import count, positive

_PREPARE = """Turn text into PREFIX.bin and PREFIX.idx (Megatron's format) with PREFIX.manifest.json beside them.

INPUT is a .jsonl, .ndjson, .txt, .md or .parquet file, a folder of them, or the word python: the manual and the
standard library of this Python. A job that was stopped goes on where it was when the same command is given again."""


def add_parser(commands: Any) -> None:
    """The parser of `data prepare`."""
    prepare = commands.add_parser(
        "prepare",
        help="turn text into token files",
        description=_PREPARE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    prepare.add_argument("inputs", nargs="+", metavar="INPUT", help="file, folder, or the word python")
    prepare.add_argument("--out", required=True, metavar="PREFIX", help="path of the files without their ending")
    prepare.add_argument(
        "--tokenizer",
        default="byte",
        metavar="NAME",
        help="byte (default), bpe:SIZE (trained on the input), a tokenizer.json, a folder with one, or a hub name",
    )
    prepare.add_argument(
        "--eod", metavar="TOKEN", help="token that ends a document, or none (default: the tokenizer's own)"
    )
    prepare.add_argument("--key", default="text", help="key or column that holds the text (default: text)")
    prepare.add_argument(
        "--workers", type=positive, default=_cores(), help="worker processes (default: one per core, at most 16)"
    )
    prepare.add_argument(
        "--skip-bad", type=count, default=0, metavar="N", help="leave out up to N bad lines (default: 0)"
    )
    prepare.add_argument(
        "--allow-lossy-tokenizer",
        action="store_true",
        help="go on where characters of a sample don't come back from the tokenizer",
    )
    prepare.add_argument("--restart", action="store_true", help="don't use the parts of a job that was stopped")
    prepare.add_argument("--overwrite", action="store_true", help="replace files that another job made")


def run(args: argparse.Namespace) -> int:
    """Prepare, and print what was made. Raises DataError and WriteError."""
    from megaspec.data.prepare import prepare
    from megaspec.data.progress import prepare_progress, print_prepared
    from megaspec.data.tokenizer import parse_tokenizer

    append_eod = args.eod != "none"
    tokenizer = parse_tokenizer(args.tokenizer, eod=args.eod if append_eod else None)
    with prepare_progress() as show:
        prepared = prepare(
            args.inputs,
            args.out,
            tokenizer,
            key=args.key,
            workers=args.workers,
            skip_bad=args.skip_bad,
            allow_lossy=args.allow_lossy_tokenizer,
            append_eod=append_eod,
            resume=not args.restart,
            overwrite=args.overwrite,
            progress=show,
        )
    print_prepared(prepared)
    return 0


def _cores() -> int:
    """Cores that this process may use, at most 16."""
    if hasattr(os, "sched_getaffinity"):  # Linux; elsewhere nothing says less than all of them
        return min(16, len(os.sched_getaffinity(0)))
    return min(16, os.cpu_count() or 1)
