"""`megaspec data prepare` and `megaspec data inspect`. Torch-free; what they need is imported when they run."""

import argparse
import os
from typing import Any

_PREPARE = """Turn text into PREFIX.bin and PREFIX.idx (Megatron's format) with PREFIX.manifest.json beside them.

INPUT is a .jsonl, .ndjson, .txt, .md or .parquet file, a folder of them, or the word python: the manual and the
standard library of this Python. A job that was stopped goes on where it was when the same command is given again."""

_INSPECT = """Show counts, lengths and decoded samples of PREFIX.bin and PREFIX.idx, and check every byte of them."""


def add_parser(subparsers: Any) -> None:
    """Register `data` with its two sub-commands."""
    data = subparsers.add_parser("data", help="prepare and inspect token files")
    commands = data.add_subparsers(dest="data_command", required=True, metavar="prepare | inspect")

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
        "--workers", type=_positive, default=_cores(), help="worker processes (default: one per core, at most 16)"
    )
    prepare.add_argument(
        "--skip-bad", type=_count, default=0, metavar="N", help="leave out up to N bad lines (default: 0)"
    )
    prepare.add_argument(
        "--allow-lossy-tokenizer",
        action="store_true",
        help="go on where characters of a sample don't come back from the tokenizer",
    )
    prepare.add_argument("--restart", action="store_true", help="don't use the parts of a job that was stopped")
    prepare.add_argument("--overwrite", action="store_true", help="replace files that another job made")
    prepare.set_defaults(run=run)

    inspect = commands.add_parser(
        "inspect", help="check token files", description=_INSPECT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    inspect.add_argument("prefix", metavar="PREFIX", help="path of the files without their ending")
    inspect.add_argument("--tokenizer", metavar="NAME", help="decode samples with it (default: the one beside them)")
    inspect.add_argument("--vocab-size", type=_positive, metavar="N", help="token ids must be below N")
    inspect.add_argument("--samples", type=_count, default=3, metavar="N", help="documents to show (default: 3)")
    inspect.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run a parsed `data` command; 0 when it is done. Raises DataError and WriteError."""
    return {"prepare": _run_prepare, "inspect": _run_inspect}[args.data_command](args)


def _run_prepare(args: argparse.Namespace) -> int:
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


def _run_inspect(args: argparse.Namespace) -> int:
    from megaspec.core.errors import DataError
    from megaspec.core.terminal import terminal
    from megaspec.data.inspect import inspect, print_report
    from megaspec.data.tokenizer import BpeRequest, parse_tokenizer

    tokenizer = None if args.tokenizer is None else parse_tokenizer(args.tokenizer)
    if isinstance(tokenizer, BpeRequest):
        raise DataError(f"--tokenizer {args.tokenizer}: nothing is trained here; give byte or a tokenizer.json")
    report = inspect(args.prefix, vocab_size=args.vocab_size, tokenizer=tokenizer, samples=args.samples)
    print_report(report, terminal())
    return 0


def _positive(text: str) -> int:
    return _count(text, least=1)


def _count(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
    return int(text)


def _cores() -> int:
    return min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
