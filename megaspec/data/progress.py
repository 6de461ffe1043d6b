"""How `data prepare` shows where it is."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megaspec.core.terminal import Terminal, escape
from megaspec.core.units import counted, plural
from megaspec.data.manifest import DataManifest
from megaspec.data.parts import JobProgress, losses
from megaspec.data.prepare import PreparedData

_STAGES = {
    "lines": "looking for bad lines",
    "tokenizer": "training the tokenizer",
    "tokens": "tokenizing",
    "files": "writing the files",
}


@contextmanager
def prepare_progress() -> Iterator[Callable[[JobProgress], None]]:
    """A bar on standard error while the block runs; on a file or pipe one line per stage."""
    console = Terminal(stderr=True)
    if not sys.stderr.isatty():
        yield _stage_lines(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[counts]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None, counts="")

        def show(now: JobProgress) -> None:
            counts = f"{counted(now.documents, 'document')}, {counted(now.tokens, 'token')}"
            if now.bad:
                counts += f", {now.bad} bad"
            bar.update(
                task,
                description=_STAGES[now.stage],
                completed=now.bytes_done,
                total=now.bytes_total,
                counts=counts,
            )

        yield show


def print_prepared(prepared: PreparedData) -> None:
    """One line that says what is there now, and one for everything that was left out."""
    console = Terminal(soft_wrap=True)
    manifest = prepared.manifest
    how = "was already prepared" if prepared.was_there else "prepared"
    counts = f"{counted(manifest.documents, 'document')}, {counted(manifest.tokens, 'token')}"
    text = (
        f"{prepared.prefix}: {how}: {counts} of {manifest.dtype}, "
        f"tokenizer {manifest.tokenizer.name} ({manifest.tokenizer.vocab_size} ids), {_end_of_document(manifest)}"
    )
    console.print(escape(text))
    if prepared.parts_reused:
        console.print(f"  {prepared.parts_reused} parts were there from a job that was stopped", markup=False)
    for kind, count in sorted(manifest.bad_lines.items()):
        console.print(escape(f"  left out: {count:,} {plural('line', count)}, {kind}"))
    if manifest.bad_lines_file is not None:
        console.print(
            escape(f"  listed with their reasons: {Path(prepared.prefix).with_name(manifest.bad_lines_file)}")
        )
    sample = manifest.sample
    if sample is not None and sample.lost_characters:
        console.print(escape(f"  lost by the tokenizer: {losses(sample)}"))
    for path in prepared.without_checksums:
        text = f"  {path}: carries no checksums, damage in it can't be told from text"
        console.print(escape(text))
    if prepared.passed_over:
        console.print(f"  passed over: {prepared.passed_over} files of other kinds", markup=False)


def _end_of_document(manifest: DataManifest) -> str:
    """Which token ends a document, by its number and as it is written."""
    record = manifest.tokenizer
    if not manifest.append_eod or record.eod is None:
        return "no token ends a document"
    text = f"each document ends with {record.eod}"
    if record.eod_token is not None:
        text += f", {record.eod_token}"
    return text


def _stage_lines(console: Terminal) -> Callable[[JobProgress], None]:
    last = ""

    def show(now: JobProgress) -> None:
        nonlocal last
        if now.stage != last:
            last = now.stage
            console.print(f"data prepare: {_STAGES[now.stage]} ({now.bytes_total:,} bytes of input)", markup=False)

    return show
