"""What token files hold and whether they are whole: `megaspec data inspect`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from megaspec.core.document_lengths import mean_length
from megaspec.core.errors import DataError
from megaspec.core.terminal import escape
from megaspec.data.indexed import IndexedFile
from megaspec.data.lengths import LengthsRecord, count_bins, record_of
from megaspec.data.manifest import DataManifest, SourceRecord, manifest_path, sha256_of_files
from megaspec.data.order import identity
from megaspec.data.parts import losses
from megaspec.data.provenance import tokenizer_of
from megaspec.data.source_sums import source_state
from megaspec.data.tokenizer import Tokenizer

UNSEEN_WITHOUT_MANIFEST = (
    "document bounds that were moved, or lengths and offsets that were moved together",
    "a number format of the same width, as uint16 read as int16 (ids below 32,768 are the same in both)",
    "token ids that were changed into others of the vocabulary",
)
_CHUNK = 2**22
_SHOWN_CHARACTERS = 200
_BAR_WIDTH = 40


@dataclass(frozen=True)
class DocumentSample:
    """The beginning of a document."""

    number: int
    tokens: int
    text: str


@dataclass(frozen=True)
class Report:
    """What `inspect` found."""

    prefix: str
    manifest: DataManifest | None
    dtype: str
    sequences: int
    documents: int
    tokens: int
    smallest_id: int | None
    """None when there are no tokens."""
    largest_id: int | None
    lengths: LengthsRecord
    """How long sequences are: what attention stays inside of with a document mask."""
    samples: tuple[DocumentSample, ...]
    sources: tuple[tuple[SourceRecord, str], ...]
    """What the data was made from, and what became of it."""
    unseen: tuple[str, ...]
    """Kinds of damage that can't be seen in these files."""


def inspect(
    prefix: str | Path,
    *,
    vocab_size: int | None = None,
    tokenizer: Tokenizer | None = None,
    samples: int = 3,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Read the files whole: every field of .idx, every token and, with a manifest, every checksum.

    vocab_size: token ids must be below it; None takes it from the tokenizer or the manifest. tokenizer: decodes the
    samples; None takes the one beside the files. progress: called with tokens read and tokens in all.
    Raises DataError that tells everything that is wrong.
    """
    file = IndexedFile(prefix)
    manifest = file.manifest
    problems: list[str] = []
    sources: list[tuple[SourceRecord, str]] = []
    unseen = UNSEEN_WITHOUT_MANIFEST
    if manifest is not None:
        problems += _check_hashes(file, manifest)
        tokenizer = tokenizer or tokenizer_of(prefix)
        unseen = ()
    if vocab_size is None:
        vocab_size = _known_vocab_size(tokenizer, manifest)
    smallest = None
    largest = None
    # ids of files that are known to be damaged would tell nothing more
    if not problems:
        smallest, largest = _read_all(file, vocab_size, problems, progress)
    if problems:
        raise DataError(problems)
    if manifest is not None:
        sources = [(source, source_state(source)) for source in manifest.sources]
    return Report(
        prefix=str(prefix),
        manifest=manifest,
        dtype=file.index.dtype.name,
        sequences=len(file),
        documents=len(file.index.documents) - 1,
        tokens=file.tokens,
        smallest_id=smallest,
        largest_id=largest,
        lengths=record_of(count_bins(file.index.lengths), idx_sha256=identity(file)),
        samples=_samples(file, tokenizer, samples),
        sources=tuple(sources),
        unseen=unseen,
    )


def _known_vocab_size(tokenizer: Tokenizer | None, manifest: DataManifest | None) -> int | None:
    """What token ids must be below; None where nothing says so."""
    if tokenizer is not None:
        return tokenizer.vocab_size
    if manifest is not None:
        return manifest.tokenizer.vocab_size
    return None


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain data. `document_lengths` is what data.document_lengths takes."""
    return {
        "prefix": report.prefix,
        "tokens": report.tokens,
        "documents": report.documents,
        "sequences": report.sequences,
        "dtype": report.dtype,
        "smallest_id": report.smallest_id,
        "largest_id": report.largest_id,
        "lengths": report.lengths.model_dump(mode="json"),
        "document_lengths": [one.model_dump(mode="json") for one in report.lengths.lengths],
        "samples": [vars(sample) for sample in report.samples],
        "sources": [{**source.model_dump(mode="json"), "state": state} for source, state in report.sources],
        "unseen": list(report.unseen),
    }


def print_report(report: Report, console: Console) -> None:
    """The report as text."""
    console.print(_facts_table(report))
    console.print(_lengths_table(report))
    for sample in report.samples:
        console.print(f"[bold]document {sample.number} ({sample.tokens} tokens):[/] {escape(sample.text)}")
    checked = "every field, every token id"
    if report.manifest is not None:
        checked += ", every checksum"
    console.print(f"whole: {checked}")
    if report.unseen:
        name = Path(f"{report.prefix}.manifest.json").name
        console.print(f"without {escape(name)} these can't be seen:")
        for kind in report.unseen:
            console.print(f"  {kind}")


def _facts_table(report: Report) -> Table:
    """What the files are and what they were made from, a line each."""
    facts = Table.grid(padding=(0, 2))
    rows = [
        ("files", f"{report.prefix}.bin, .idx"),
        ("tokens", f"{report.tokens:,}"),
        ("documents", f"{report.documents:,}"),
        ("sequences", _sequences(report)),
        ("dtype", report.dtype),
    ]
    if report.smallest_id is not None:
        rows.append(("token ids", f"{report.smallest_id} to {report.largest_id}"))
    if report.manifest is not None:
        made_by = report.manifest.tokenizer
        rows.append(("tokenizer", f"{made_by.name}, {made_by.vocab_size} ids, eod {made_by.eod}"))
        for source, state in report.sources:
            rows.append(("source", f"{source.name}, {source.bytes:,} bytes, {state}"))
        sample = report.manifest.sample
        if sample is not None and sample.lost_characters:
            rows.append(("lost", losses(sample)))
    for name, value in rows:
        facts.add_row(name, escape(value))
    return facts


def _sequences(report: Report) -> str:
    """How many there are, and how long they are on average."""
    text = f"{report.sequences:,}"
    lengths = report.lengths.lengths
    if lengths:
        text += f", of {mean_length(lengths):,.1f} tokens on average"
    return text


def _lengths_table(report: Report) -> Table:
    """The histogram of lengths, the longest bar _BAR_WIDTH signs wide."""
    table = Table("tokens", "sequences", "of all tokens", "", box=None)
    for column in table.columns[1:3]:
        column.justify = "right"
    bins = report.lengths.bins
    most = max((one.documents for one in bins), default=1)
    for one in bins:
        span = str(one.shortest)
        if one.longest > one.shortest:
            span = f"{one.shortest}-{one.longest}"
        share = one.tokens / max(1, report.tokens)
        bar = "█" * max(1, round(_BAR_WIDTH * one.documents / most))
        table.add_row(span, f"{one.documents:,}", f"{share:.1%}", bar)
    return table


def _check_hashes(file: IndexedFile, manifest: DataManifest) -> list[str]:
    problems = []
    found = sha256_of_files([Path(f"{file.prefix}.idx")])
    if found != manifest.idx_sha256:
        problems.append(f"{file.prefix}.idx: sha256={found}, {manifest_path(file.prefix).name} says otherwise: damaged")
    for block in range(file.n_blocks):
        try:
            file.check_block(block)
        except DataError as error:
            problems.append(str(error))
    return problems


def _read_all(
    file: IndexedFile, vocab_size: int | None, problems: list[str], progress: Callable[[int, int], None]
) -> tuple[int | None, int | None]:
    """Smallest and largest token id; ids outside the vocabulary are added to the problems, the first one by place."""
    smallest: int | None = None
    largest: int | None = None
    for start in range(0, file.tokens, _CHUNK):
        tokens = file.read_flat(start, min(start + _CHUNK, file.tokens))
        low = int(tokens.min())
        high = int(tokens.max())
        is_outside = low < 0 or (vocab_size is not None and high >= vocab_size)
        if is_outside and not problems:
            problems.append(_first_outside(file, start, tokens, vocab_size))
        if smallest is None or low < smallest:
            smallest = low
        if largest is None or high > largest:
            largest = high
        progress(start + len(tokens), file.tokens)
    return smallest, largest


def _first_outside(file: IndexedFile, start: int, tokens: np.ndarray, vocab_size: int | None) -> str:
    """Where the first id of some tokens lies that is outside of the vocabulary; `start`: number of the first token."""
    is_outside = tokens < 0
    limit = ""
    if vocab_size is not None:
        is_outside |= tokens >= vocab_size
        limit = f" and below the vocabulary size={vocab_size}"
    index = int(np.argmax(is_outside))
    at = start + index
    # offsets are in bytes; the sequence is the last that begins at or before the token
    sequence = int(np.searchsorted(file.index.offsets, at * file.index.dtype.itemsize, side="right")) - 1
    return (
        f"{file.bin_path}: token id={int(tokens[index])} at token {at} (sequence {sequence}), ids are at "
        f"least 0{limit}: the wrong tokenizer, number format or a damaged file"
    )


def _samples(file: IndexedFile, tokenizer: Tokenizer | None, count: int) -> tuple[DocumentSample, ...]:
    """The beginnings of documents that lie evenly over the file, the first and the last among them."""
    bounds = file.index.documents
    n_documents = len(bounds) - 1
    numbers = np.linspace(0, max(0, n_documents - 1), min(count, n_documents)).astype(np.int64)
    shown = []
    for number in np.unique(numbers).tolist():
        begin = int(bounds[number])
        end = int(bounds[number + 1])
        tokens = int(file.index.lengths[begin:end].sum(dtype=np.int64))
        ids: list[int] = []
        if begin < end:
            ids = [int(token) for token in file.read(begin)[:_SHOWN_CHARACTERS]]
        text = " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)
        shown.append(DocumentSample(number, tokens, _one_line(text)))
    return tuple(shown)


def _one_line(text: str) -> str:
    """Text from a corpus that a terminal can't be steered with."""
    clean = "".join(c if c.isprintable() else " " for c in text)
    return clean[:_SHOWN_CHARACTERS]
