"""`megaspec data inspect PREFIX`. What it needs is imported when it runs."""

import argparse
import json
from typing import Any

from megaspec.commands.numbers import count, positive
from megaspec.commands.paragraphs import Paragraphs

_INSPECT = """Show counts, lengths and decoded samples of PREFIX.bin and PREFIX.idx, and check every byte of them.

How long documents are is kept in PREFIX.lengths.json, where plan and tune take it from for runs with
data.document_mask=true."""


def add_parser(commands: Any) -> None:
    """The parser of `data inspect`."""
    inspect = commands.add_parser("inspect", help="check token files", description=_INSPECT, formatter_class=Paragraphs)
    inspect.add_argument("prefix", metavar="PREFIX", help="path of the files without their ending")
    inspect.add_argument("--tokenizer", metavar="NAME", help="decode samples with it (default: the one beside them)")
    inspect.add_argument("--vocab-size", type=positive, metavar="N", help="token ids must be below N")
    inspect.add_argument("--samples", type=count, default=3, metavar="N", help="documents to show (default: 3)")
    inspect.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    """Check the files, keep their lengths, and print a report. Raises DataError and WriteError."""
    from megaspec.core.errors import DataError, printable
    from megaspec.core.terminal import terminal
    from megaspec.data.inspect import as_json, inspect, print_report
    from megaspec.data.lengths import lengths_path, write_lengths
    from megaspec.data.tokenizer import BpeRequest, parse_tokenizer

    tokenizer = None if args.tokenizer is None else parse_tokenizer(args.tokenizer)
    if isinstance(tokenizer, BpeRequest):
        raise DataError(f"--tokenizer {args.tokenizer}: nothing is trained here; give byte or a tokenizer.json")
    report = inspect(args.prefix, vocab_size=args.vocab_size, tokenizer=tokenizer, samples=args.samples)
    if args.json:
        print(json.dumps(as_json(report)))
    else:
        print_report(report, terminal())
    # behind the report, which a folder that nothing can be written to doesn't keep back
    write_lengths(args.prefix, report.lengths)
    if not args.json:
        print(printable(f"lengths: {lengths_path(args.prefix)}, for plan and tune"))
    return 0
