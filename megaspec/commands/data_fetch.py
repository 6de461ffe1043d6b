"""`megaspec data fetch URL --out PREFIX`: a data set from an object store, every byte checked."""

import argparse
from pathlib import Path
from typing import Any

from megaspec.core.errors import UsageError, printable
from megaspec.data.fetch import fetch, refuse_folder


def add_parser(commands: Any) -> None:
    """The parser of `data fetch`."""
    text = "bring a data set from an object store to this machine, every byte checked"
    command = commands.add_parser("fetch", help=text, description=text)
    command.add_argument("url", metavar="URL", help="of its files without their ending: s3://bucket/data/web")
    command.add_argument("--out", metavar="PREFIX", type=Path, required=True, help="here, without ending: data/web")


def run(args: argparse.Namespace) -> int:
    """Download, verify, publish. -> 0. DataError: no such data set, or damaged."""
    scheme, found, place = args.url.partition("://")
    host, _, _ = place.partition("/")
    if not found or not scheme or "/" not in place.strip("/"):
        raise UsageError(f"{args.url.rpartition('@')[2]} must be a URL; try s3://bucket/data/web")
    if "@" in host:
        raise UsageError("a URL holds no user or password here; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    refuse_folder(args.out)
    manifest = fetch(args.url, args.out)
    said = f"{args.out}: {manifest.tokens:,} tokens of {manifest.documents:,} documents, as their manifest says"
    print(printable(f"{said}; train with data.blend=[{{prefix: {args.out}}}]"))
    return 0
