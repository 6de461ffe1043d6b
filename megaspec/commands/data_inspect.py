"""`megaspec data inspect PREFIX`. What it needs is imported when it runs."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaspec.commands.data_fetch import add_download_dir, refuse_wrong_url
from megaspec.commands.numbers import count, positive
from megaspec.commands.paragraphs import Paragraphs

if TYPE_CHECKING:
    from megaspec.data.lengths import LengthsRecord

_INSPECT = """Show counts, lengths and decoded samples of PREFIX.bin and PREFIX.idx, and check every byte of them.

How long documents are is kept in PREFIX.lengths.json, where plan and tune take it from for runs with
data.document_mask=true. Where that can't be written, as in a folder that is read-only, the report says so: the files
are checked all the same, and the exit code is 0.

Files of a URL (s3://bucket/data/web) are fetched first, to where runs look for them; plan and tune then take the
lengths from there. For other machines, upload PREFIX.lengths.json beside the files."""


def add_parser(commands: Any) -> None:
    """The parser of `data inspect`."""
    inspect = commands.add_parser("inspect", help="check token files", description=_INSPECT, formatter_class=Paragraphs)
    inspect.add_argument("prefix", metavar="PREFIX", help="path or URL of the files without their ending")
    add_download_dir(inspect)
    inspect.add_argument("--tokenizer", metavar="NAME", help="decode samples with it (default: the one beside them)")
    inspect.add_argument("--vocab-size", type=positive, metavar="N", help="token ids must be below N")
    inspect.add_argument("--samples", type=count, default=3, metavar="N", help="documents to show (default: 3)")
    inspect.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    """Check the files, keep their lengths, and print a report. Raises DataError."""
    from megaspec.core.errors import DataError, UsageError, printable
    from megaspec.core.remote_files import is_url
    from megaspec.core.terminal import terminal
    from megaspec.data.fetch import TokensThere, fetch
    from megaspec.data.inspect import as_json, inspect, print_report
    from megaspec.data.lengths import lengths_path
    from megaspec.data.spec import DOWNLOADS
    from megaspec.data.tokenizer import BpeRequest, parse_tokenizer
    from megaspec.data.urls import prefix_here

    tokenizer = None if args.tokenizer is None else parse_tokenizer(args.tokenizer)
    if isinstance(tokenizer, BpeRequest):
        raise DataError(f"--tokenizer {args.tokenizer}: nothing is trained here; give byte or a tokenizer.json")
    prefix = args.prefix
    if args.download_dir is not None and not is_url(prefix):
        raise UsageError(f"--download-dir {args.download_dir} is for a URL, and {prefix} is a path; drop it")
    if is_url(prefix):
        refuse_wrong_url(prefix)
        prefix = str(prefix_here(TokensThere(args.prefix).record, args.download_dir or DOWNLOADS))
        # what is damaged here is fetched anew
        fetch(args.prefix, Path(prefix))
    report = inspect(prefix, vocab_size=args.vocab_size, tokenizer=tokenizer, samples=args.samples)
    not_kept = _keep_lengths(prefix, report.lengths)
    kept = None
    if not not_kept:
        kept = str(lengths_path(prefix))
    if args.json:
        print(json.dumps({**as_json(report), "lengths_file": kept, "lengths_not_kept": not_kept}))
    else:
        print_report(report, terminal())
    if not_kept:
        print(printable(f"megaspec: lengths are not kept: {not_kept}"), file=sys.stderr)
    elif not args.json:
        print(printable(f"lengths: {kept}, for plan and tune"))
    return 0


def _keep_lengths(prefix: str, lengths: "LengthsRecord") -> str | None:
    """Put the histogram beside the files. -> why that can't be; None: it is there."""
    from megaspec.core.errors import WriteError
    from megaspec.data.lengths import write_lengths

    try:
        write_lengths(prefix, lengths)
    except WriteError as error:
        return f"{error}, or set data.document_lengths to what --json prints under that name"
    return None
