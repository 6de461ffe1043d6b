"""`megaspec report RUN [RUN ...]`: the page of a run, or of several beside each other."""

import argparse
from pathlib import Path
from typing import Any

from megaspec.core.errors import DataError, printable
from megaspec.data.files import write_text
from megaspec.report.comparison_page import comparison_page
from megaspec.report.folder import REPORT, RunFolder
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
    """Write the page. -> 0. RecipeError: no run. DataError: a file of it can't be read. WriteError."""
    folders = []
    for folder in args.runs:
        refuse_no_run(folder)
        folders.append(RunFolder(folder))
    for folder in folders:
        folder.read()
        if folder.history.trouble and not folder.history.is_there:
            raise DataError(f"{folder.history.trouble}; nothing was written")
    if len(folders) == 1:
        out = args.out or folders[0].path / REPORT
        page = run_page(folders[0])
    else:
        out = args.out or Path(COMPARISON)
        page = comparison_page(folders)
    write_text(out, page)
    print(printable(str(out)))
    for folder in folders:
        for trouble in folder.troubles:
            print(printable(f"{folder.path}: {trouble}"))
    return 0
