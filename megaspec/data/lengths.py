"""`<prefix>.lengths.json`: how long the documents of token files are, which `megaspec data inspect` counts for `plan`
and `tune`. It names the index that it was counted from, so that one of other files is not taken for theirs.

A document is what attention stays inside of: a sequence of the index, one per document unless the files were made
elsewhere.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, ValidationError

from megaspec.core.document_lengths import LengthBin, Lengths
from megaspec.core.errors import DataError
from megaspec.core.frozen import Frozen, NonNegativeFloat, NonNegativeInt, PositiveInt
from megaspec.data.files import write_atomically
from megaspec.data.manifest import DataManifest, Sha256, sha256_of_files

if TYPE_CHECKING:
    import numpy as np

# Lengths are at most 2^31 - 1.
_BINS = 32
# Lengths that are counted at a time; with their sums below 2^53, which float64 holds whole.
_CHUNK = 2**20
LENGTHS_LIMIT = 2**20


class CountedBin(Frozen):
    """Documents from `shortest` to below twice as many tokens; of no token in a bin of their own."""

    shortest: NonNegativeInt
    documents: PositiveInt
    tokens: NonNegativeInt
    """Of all of them."""
    squares: NonNegativeFloat
    """The sum of their squared lengths."""

    @property
    def longest(self) -> int:
        """Tokens of the longest document that may be in it."""
        return max(0, 2 * self.shortest - 1)


class LengthsRecord(Frozen):
    """The lengths of the documents of one data set."""

    version: Literal[1] = 1
    """Version of this file's format."""
    idx_sha256: Sha256
    """Hash of the .idx that they were counted from."""
    documents: NonNegativeInt
    tokens: NonNegativeInt
    bins: tuple[CountedBin, ...] = Field(max_length=_BINS + 1)

    @property
    def lengths(self) -> Lengths:
        """As a plan takes them; documents of no token are none."""
        found = []
        for one in self.bins:
            if one.tokens:
                found.append(LengthBin(documents=one.documents, tokens=one.tokens, squares=one.squares))
        return tuple(found)


def lengths_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.lengths.json")


def count_bins(lengths: "np.ndarray") -> tuple[CountedBin, ...]:
    """The histogram of int32 lengths, in bins that double: 0, 1, 2-3, 4-7, ... Read a piece at a time."""
    import numpy as np  # only where there are token files

    documents = [0] * _BINS
    tokens = [0] * _BINS
    squares = [0.0] * _BINS
    for begin in range(0, len(lengths), _CHUNK):
        chunk = lengths[begin : begin + _CHUNK].astype(np.float64)
        # the exponent e of length = m · 2^e, 0.5 <= m < 1: bin e holds 2^(e-1) to 2^e - 1, bin 0 the length 0
        _, exponents = np.frexp(chunk)
        of_documents = np.bincount(exponents, minlength=_BINS)
        of_tokens = np.bincount(exponents, weights=chunk, minlength=_BINS)
        of_squares = np.bincount(exponents, weights=chunk * chunk, minlength=_BINS)
        for number in range(_BINS):
            documents[number] += int(of_documents[number])
            tokens[number] += int(of_tokens[number])
            squares[number] += float(of_squares[number])
    bins = []
    for number in range(_BINS):
        if documents[number]:
            shortest = (1 << number) >> 1
            one = CountedBin(
                shortest=shortest, documents=documents[number], tokens=tokens[number], squares=squares[number]
            )
            bins.append(one)
    return tuple(bins)


def record_of(bins: tuple[CountedBin, ...], *, idx_sha256: str) -> LengthsRecord:
    """What is kept of a histogram. `idx_sha256`: of the index that it was counted from."""
    return LengthsRecord(
        idx_sha256=idx_sha256,
        documents=sum(one.documents for one in bins),
        tokens=sum(one.tokens for one in bins),
        bins=bins,
    )


def write_lengths(prefix: str | Path, record: LengthsRecord) -> None:
    """Put the histogram beside the files. Raises WriteError."""
    text = json.dumps(record.model_dump(mode="json"), indent=1)
    write_atomically(lengths_path(prefix), [text.encode() + b"\n"])


def load_lengths(prefix: str | Path, manifest: DataManifest | None) -> LengthsRecord | None:
    """The histogram beside the files, None when there is none. `manifest`: theirs, which has the hash of the index;
    without one the index is read for it.

    Raises DataError when it can't be used: it is damaged, or was counted from another index.
    """
    path = lengths_path(prefix)
    try:
        with open(path, "rb") as file:
            raw = file.read(LENGTHS_LIMIT + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} is not used: it can't be read: {error.strerror}") from error
    if len(raw) > LENGTHS_LIMIT:
        raise DataError(f"{path} is not used: larger than {LENGTHS_LIMIT} bytes, so no histogram of lengths")
    found = manifest.idx_sha256 if manifest is not None else sha256_of_files([Path(f"{prefix}.idx")])
    return parse_lengths(raw, where=str(path), idx_sha256=found)


def parse_lengths(raw: bytes, *, where: str, idx_sha256: str) -> LengthsRecord:
    """The histogram in the bytes of its file; `where` names it. `idx_sha256`: of the index that is in use.

    Raises DataError when it can't be used: it is damaged, or was counted from another index.
    """
    try:
        record = LengthsRecord.model_validate_json(raw)
        # a bin that no lengths can have
        record.lengths  # noqa: B018
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "content"
        # without the way out for who writes lengths into a recipe
        wrong = first.get("ctx", {}).get("rule", first["msg"])
        raise DataError(f"{where} is not used: damaged: {field}: {wrong}") from error
    documents = sum(one.documents for one in record.bins)
    tokens = sum(one.tokens for one in record.bins)
    if (documents, tokens) != (record.documents, record.tokens):
        raise DataError(
            f"{where} is not used: damaged: bins hold {documents:,} documents with {tokens:,} tokens, not "
            f"{record.documents:,} with {record.tokens:,}"
        )
    if record.idx_sha256 != idx_sha256:
        raise DataError(
            f"{where} is not used: it has the lengths of other files: idx_sha256={record.idx_sha256[:8]}..., "
            f"the .idx in use has {idx_sha256[:8]}..."
        )
    return record
