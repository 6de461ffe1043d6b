"""`megaspec data prepare INPUT... --out PREFIX`. What it needs is imported when it runs."""

import argparse
import os
from typing import Any

from megaspec.commands.numbers import count, positive
from megaspec.commands.paragraphs import Paragraphs

# What `--skip-bad` allows without a number.
ALL = 2**63

_PREPARE = """Turn text into PREFIX.bin and PREFIX.idx (Megatron's format) with PREFIX.manifest.json beside them.

INPUT is a .jsonl, .ndjson (also .gz and .zst), .txt, .md, .parquet or .arrow file, a folder of them, a folder that
datasets saved, or the word python: the manual and the standard library of this Python. All bad lines are found before
anything is made. A job that was stopped goes on where it was when the same command is given again."""

# What `--join` may say for what a shell makes hard to write.
_ESCAPES = {"\\n": "\n", "\\t": "\t"}


def add_parser(commands: Any) -> None:
    """The parser of `data prepare`."""
    prepare = commands.add_parser(
        "prepare",
        help="turn text into token files",
        description=_PREPARE,
        formatter_class=Paragraphs,
    )
    prepare.add_argument("inputs", nargs="+", metavar="INPUT", help="file, folder, or the word python")
    prepare.add_argument("--out", required=True, metavar="PREFIX", help="path of the files without their ending")
    prepare.add_argument(
        "--tokenizer",
        default="byte",
        metavar="NAME",
        help="byte (default), bpe:SIZE (trained on the input), a tokenizer.json, SentencePiece's .model, GPT-2's "
        "vocab.json, a folder with one of them, or a hub name",
    )
    prepare.add_argument(
        "--eod", metavar="TOKEN", help="token that ends a document, or none (default: the tokenizer's own)"
    )
    prepare.add_argument("--merges", metavar="FILE", help="merges.txt of a vocab.json (default: the one beside it)")
    prepare.add_argument(
        "--key",
        action="append",
        metavar="KEY",
        help="key or column that holds the text, dots go into objects (default: text); several are joined",
    )
    prepare.add_argument("--join", metavar="TEXT", help=r"between the values of several keys (default: \n\n)")
    prepare.add_argument(
        "--per-key",
        action="store_true",
        help="a data set for each key, PREFIX_KEY_document, as Megatron's --json-keys makes them",
    )
    prepare.add_argument(
        "--workers", type=positive, default=_cores(), help="worker processes (default: one per core, at most 16)"
    )
    prepare.add_argument(
        "--skip-bad",
        nargs="?",
        type=_allowed,
        const=ALL,
        default=0,
        metavar="N",
        help="leave out bad lines, at most N of them (default: all of them), and list them in PREFIX.bad-lines.txt",
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
    tokenizer = parse_tokenizer(args.tokenizer, eod=args.eod if append_eod else None, merges=args.merges)
    for prefix, fields in _data_sets(args):
        with prepare_progress() as show:
            prepared = prepare(
                args.inputs,
                prefix,
                tokenizer,
                key=fields,
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


def _data_sets(args: argparse.Namespace) -> list[tuple[str, Any]]:
    """Prefix and fields of every data set to make. Raises DataError for options that don't go together."""
    from megaspec.core.errors import DataError
    from megaspec.data.text_fields import JOIN, TextFields

    keys = tuple(args.key or ["text"])
    if len(set(keys)) < len(keys):
        raise DataError(f"--key {' --key '.join(keys)}: names one key twice")
    if not args.per_key:
        if args.join is not None and len(keys) == 1:
            raise DataError(
                f"--join: joins several keys, --key {keys[0]} is one; leave it out, or name more with --key"
            )
        join = JOIN if args.join is None else args.join
        for written, meant in _ESCAPES.items():
            join = join.replace(written, meant)
        return [(args.out, TextFields(keys, join))]
    if args.join is not None:
        raise DataError("--join with --per-key: either one document of several keys, or a data set for each; drop one")
    if args.tokenizer.startswith("bpe") and len(keys) > 1:
        raise DataError(
            f"--tokenizer {args.tokenizer} with --per-key: each data set would get a tokenizer of its own; train one "
            f"without --per-key, and give its file: --tokenizer {args.out}.tokenizer.json"
        )
    return [(f"{args.out}_{key}_document", TextFields((key,))) for key in keys]


def _allowed(text: str) -> int:
    """How many bad lines may be left out."""
    try:
        return count(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; name INPUT before --skip-bad, or put -- between them") from None


def _cores() -> int:
    """Cores that this process may use, at most 16."""
    if hasattr(os, "sched_getaffinity"):  # Linux; elsewhere nothing says less than all of them
        return min(16, len(os.sched_getaffinity(0)))
    return min(16, os.cpu_count() or 1)
