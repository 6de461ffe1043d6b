"""What token files hold and whether they are whole: `megaspec data inspect`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from megaspec.core.errors import DataError
from megaspec.core.terminal import escape
from megaspec.data.indexed import IndexedFile
from megaspec.data.manifest import Manifest, SourceRecord, manifest_path, sha256_of_files
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
    manifest: Manifest | None
    dtype: str
    sequences: int
    documents: int
    tokens: int
    smallest_id: int | None
    """None when there are no tokens."""
    largest_id: int | None
    histogram: tuple[tuple[int, int, int], ...]
    """(shortest, longest, how many) sequences by length in tokens; bins double."""
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
    if manifest is not None:
        problems += _check_hashes(file, manifest)
        tokenizer = tokenizer or tokenizer_of(prefix)
    if vocab_size is None and (known := tokenizer or (manifest and manifest.tokenizer)):
        vocab_size = known.vocab_size
    smallest, largest = _read_all(file, vocab_size, problems, progress)
    if problems:
        raise DataError(problems)
    return Report(
        prefix=str(prefix),
        manifest=manifest,
        dtype=file.index.dtype.name,
        sequences=len(file),
        documents=len(file.index.documents) - 1,
        tokens=file.tokens,
        smallest_id=smallest,
        largest_id=largest,
        histogram=histogram(file.index.lengths),
        samples=_samples(file, tokenizer, samples),
        sources=tuple((source, source_state(source)) for source in manifest.sources) if manifest is not None else (),
        unseen=() if manifest is not None else UNSEEN_WITHOUT_MANIFEST,
    )


def histogram(lengths: np.ndarray) -> tuple[tuple[int, int, int], ...]:
    """(shortest, longest, how many) of bins that double: 0, 1, 2-3, 4-7, ..."""
    if not len(lengths):
        return ()
    bins = np.frexp(lengths.astype(np.float64))[1]
    counts = np.bincount(bins)
    return tuple(((1 << b) >> 1, max(0, (1 << b) - 1), int(n)) for b, n in enumerate(counts) if n)


def print_report(report: Report, console: Console) -> None:
    """The report as text."""
    facts = Table.grid(padding=(0, 2))
    rows = [
        ("files", f"{report.prefix}.bin, .idx"),
        ("tokens", f"{report.tokens:,}"),
        ("documents", f"{report.documents:,}"),
        ("sequences", f"{report.sequences:,}"),
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
    console.print(facts)
    lengths = Table("tokens", "sequences", "", box=None)
    most = max((n for _, _, n in report.histogram), default=1)
    for shortest, longest, n in report.histogram:
        span = str(shortest) if shortest == longest else f"{shortest}-{longest}"
        lengths.add_row(span, f"{n:,}", "█" * max(1, round(40 * n / most)))
    console.print(lengths)
    for sample in report.samples:
        console.print(f"[bold]document {sample.number} ({sample.tokens} tokens):[/] {escape(sample.text)}")
    checked = "every field, every token id"
    console.print(f"whole: {checked}, every checksum" if report.manifest is not None else f"whole: {checked}")
    if report.unseen:
        name = Path(f"{report.prefix}.manifest.json").name
        console.print(f"without {escape(name)} these can't be seen:")
        for kind in report.unseen:
            console.print(f"  {kind}")


def _check_hashes(file: IndexedFile, manifest: Manifest) -> list[str]:
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
    smallest = largest = None
    damaged = bool(problems)
    for start in range(0, file.tokens, _CHUNK):
        if damaged:
            break
        tokens = file.read_flat(start, min(start + _CHUNK, file.tokens))
        low, high = int(tokens.min()), int(tokens.max())
        outside = low < 0 or (vocab_size is not None and high >= vocab_size)
        if outside and not problems:
            wrong = tokens < 0 if vocab_size is None else (tokens < 0) | (tokens >= vocab_size)
            at = start + int(np.argmax(wrong))
            sequence = int(np.searchsorted(file.index.offsets, at * file.index.dtype.itemsize, side="right")) - 1
            limit = "" if vocab_size is None else f" and below the vocabulary size={vocab_size}"
            problems.append(
                f"{file.bin_path}: token id={int(tokens[at - start])} at token {at} (sequence {sequence}), ids are at "
                f"least 0{limit}: the wrong tokenizer, number format or a damaged file"
            )
        smallest = low if smallest is None else min(smallest, low)
        largest = high if largest is None else max(largest, high)
        progress(start + len(tokens), file.tokens)
    return smallest, largest


def _samples(file: IndexedFile, tokenizer: Tokenizer | None, count: int) -> tuple[DocumentSample, ...]:
    documents = file.index.documents
    chosen = np.unique(np.linspace(0, max(0, len(documents) - 2), min(count, len(documents) - 1)).astype(np.int64))
    shown = []
    for number in chosen.tolist():
        sequences = range(int(documents[number]), int(documents[number + 1]))
        tokens = int(file.index.lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
        first = file.read(sequences.start)[:_SHOWN_CHARACTERS] if sequences else np.zeros(0, dtype=np.int64)
        ids = [int(i) for i in first]
        text = " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)
        shown.append(DocumentSample(number, tokens, _one_line(text)))
    return tuple(shown)


def _one_line(text: str) -> str:
    """Text from a corpus that a terminal can't be steered with."""
    clean = "".join(c if c.isprintable() else " " for c in text)
    return clean[:_SHOWN_CHARACTERS]
