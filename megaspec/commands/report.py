"""`megaspec report RUN [RUN ...]`: the page of a run, or of several beside each other."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaspec.core.errors import DataError, UsageError, printable
from megaspec.data.files import write_text
from megaspec.report.comparison_page import comparison_page
from megaspec.report.folder import REPORT, RunFolder
from megaspec.report.html import is_page
from megaspec.report.run_page import run_page
from megaspec.run_folder import refuse_no_run

COMPARISON = "comparison.html"
_DESCRIPTION = """Write one HTML file that needs no network and no script: losses, throughput and MFU beside the plan,
memory by kind, evaluations, checkpoints, restarts, stragglers, alerts, and how the recipe was decided. A run may be
training meanwhile. Several runs: one page that compares them."""


def add_parser(commands: Any) -> None:
    """The parser of `report`."""
    text = "write the page of a run, or of several beside each other, as one HTML file"
    command = commands.add_parser("report", help=text, description=_DESCRIPTION)
    command.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="folder of a run: runs/<name>")
    text = f"where to write it; else {REPORT} in the run's folder, of several runs {COMPARISON} here"
    command.add_argument("--out", metavar="FILE", type=Path, help=text)


def run(args: argparse.Namespace) -> int:
    """Write the page. -> 0. RecipeError: no run. UsageError: another file is in its place. DataError: a file of the run
    can't be read. WriteError."""
    folders = []
    for folder in args.runs:
        refuse_no_run(folder)
        folders.append(RunFolder(folder))
    out = args.out
    if out is None:
        out = folders[0].path / REPORT if len(folders) == 1 else Path(COMPARISON)
    _refuse_other_files(out, args.runs)
    for folder in folders:
        folder.read()
        if folder.history.trouble and not folder.history.is_there:
            raise DataError(f"{folder.history.trouble}; nothing was written")
    if len(folders) == 1:
        page = run_page(folders[0])
    else:
        page = comparison_page(folders)
    write_text(out, page)
    print(printable(str(out)))
    for folder in folders:
        for trouble in folder.troubles:
            print(printable(f"{folder.path}: {trouble}"))
    return 0


def _refuse_other_files(out: Path, runs: Sequence[Path]) -> None:
    """UsageError where the page would replace a file that is none, or would lie among the files of a run."""
    way_out = f"give --out a new file, or leave it out for {REPORT} in the run's folder"
    place = Path(os.path.abspath(out.parent.resolve() / out.name))
    for run in runs:
        folder = run.resolve()
        if place.is_relative_to(folder) and (place.parent != folder or place.suffix != ".html"):
            raise UsageError(f"--out {out} is among the run's own files, where a page has no place; {way_out}")
    try:
        # a link is replaced, not followed; that a folder can't be replaced is said when it is tried
        is_free = out.is_symlink() or out.is_dir() or not out.exists()
        is_ours = is_free or (out.is_file() and (out.stat().st_size == 0 or is_page(out)))
    except OSError as error:
        raise UsageError(f"--out {out} is there, and can't be looked into: {error.strerror}; {way_out}") from None
    if not is_ours:
        raise UsageError(f"{out} is there, and is no page that `megaspec report` wrote; move it away, or {way_out}")
