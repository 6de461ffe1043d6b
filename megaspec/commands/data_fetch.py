"""`megaspec data fetch URL`: a data set from an object store, every byte checked."""

import argparse
from pathlib import Path
from typing import Any

from megaspec.core.errors import UsageError, printable
from megaspec.data.fetch import TokensThere, fetch, refuse_folder
from megaspec.data.spec import DOWNLOADS
from megaspec.data.urls import UrlPlace, prefix_here


def add_parser(commands: Any) -> None:
    """The parser of `data fetch`."""
    text = "bring a data set from an object store to this machine, every byte checked"
    command = commands.add_parser("fetch", help=text, description=text)
    command.add_argument("url", metavar="URL", help="of its files without their ending: s3://bucket/data/web")
    where = "here, without ending: data/web (default: where runs look for what their recipes name by this URL)"
    command.add_argument("--out", metavar="PREFIX", type=Path, help=where)
    add_download_dir(command)


def add_download_dir(command: argparse.ArgumentParser) -> None:
    """The option that says where runs look."""
    text = f"data.download_dir of those runs (default: {DOWNLOADS})"
    command.add_argument("--download-dir", metavar="DIR", help=text)


def run(args: argparse.Namespace) -> int:
    """Download, verify, publish. -> 0. DataError: no such data set, or damaged."""
    refuse_wrong_url(args.url)
    if args.out is not None and args.download_dir is not None:
        raise UsageError(f"--out {args.out} says where the files go, and so does --download-dir; drop one of them")
    prefix = args.out
    in_a_recipe = prefix
    if prefix is None:
        prefix = prefix_here(TokensThere(args.url).record, args.download_dir or DOWNLOADS)
        in_a_recipe = args.url
    refuse_folder(prefix)
    manifest = fetch(args.url, prefix)
    said = f"{prefix}: {manifest.tokens:,} tokens of {manifest.documents:,} documents, as their manifest says"
    print(printable(f"{said}; train with data.blend=[{{prefix: {in_a_recipe}}}]"))
    return 0


def refuse_wrong_url(url: str) -> None:
    """UsageError: no URL of token files, or one that holds what may be a secret."""
    wrong = UrlPlace("", url, False, DOWNLOADS).wrong
    if wrong:
        raise UsageError(wrong)
