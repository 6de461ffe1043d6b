"""One worker of `prepare`: tokenizes parts into files. Started as `python -m megaspec.data.prepare_worker`.

Standard input: one JSON line of settings, then one line per part. Standard output: one JSON line per event:
{"characters": n, "documents": n, "tokens": n}, {"done": part number}, {"data_error": text}, {"write_error": text}.
"""

import json
import os
import signal
import sys
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megaspec.core.errors import DataError
from megaspec.data.files import write_error
from megaspec.data.inputs import InputPart, InputSlice, carries_checksums, lines_before, read_documents
from megaspec.data.serve_parts import Report, Work, serve_parts
from megaspec.data.text_fields import BadLine, TextFields
from megaspec.data.tokenizer import ByteTokenizer, Tokenizer, open_copy

# Lossy documents of a part that are kept with their place; all are counted.
PLACES_KEPT = 100
# The kind of a document of which the tokenizer leaves nothing.
NO_TOKENS = "no tokens"
# Texts that the tokenizer gets at once: until they have so many characters, or are so many.
_BATCH_CHARACTERS = 2**17
_BATCH_TEXTS = 128
# The sample of a part that goes through the tokenizer and back: its first documents until they have so many characters
# (those of the first part more, so that small inputs are tried whole), every so many-th document after them, and of a
# long document its beginning. It depends on the input alone.
SAMPLE_FIRST_PART = 2**17
SAMPLE_CHARACTERS = 2**13
SAMPLE_EVERY = 128
SAMPLE_LENGTH = 2**15
# Of what is lost, so many different characters are kept with their counts.
LOST_KEPT = 50
# What a tokenizer may take for a text beyond the seconds that it has in any case. Usual ones take a million a second.
_CHARACTERS_PER_SECOND = 10_000


@dataclass(frozen=True)
class PrepareSettings:
    """What all parts share."""

    folder: str
    """Folder of the parts' files."""
    fields: TextFields
    """Which fields of a line are its document."""
    eod: int | None
    """Appended to every document; None appends nothing."""
    dtype: str
    """Number format of the token ids, as numpy writes it: <u2 or <i4."""
    tokenizer: str | None
    """Path of the tokenizer's file; None for bytes."""
    tokenizer_where: str
    """The file that the user named, for errors."""
    cpu_seconds: float
    """CPU time that a text or a batch of short ones may take; more for long ones."""

    @staticmethod
    def from_json(value: dict[str, Any]) -> "PrepareSettings":
        fields = TextFields(tuple(value["fields"]["keys"]), value["fields"]["join"])
        return PrepareSettings(**value | {"fields": fields})


def part_path(folder: str | Path, number: int, ending: str) -> Path:
    return Path(folder) / f"{number:06d}{ending}"


class PartWriter:
    """Tokenizes one part into NUMBER.bin, NUMBER.len (int32 lengths) and, last, NUMBER.json."""

    def __init__(self, settings: PrepareSettings, tokenizer: Tokenizer, report: Report):
        self._settings = settings
        self._tokenizer = tokenizer
        self._report = report
        self._dtype = np.dtype(settings.dtype)
        self._typecode = {"u2": "H", "i4": "i"}[self._dtype.str[1:]]

    def write(self, part: InputPart) -> None:
        """Make the files of a part. Raises DataError for unreadable input, WriteError."""
        self._lengths = array("i")
        self._crc = 0
        self._bytes = 0
        self._bad: dict[str, int] = {}
        self._no_tokens: list[tuple[int, int]] = []
        self._checksums: dict[str, bool] = {}
        self._sample = RoundTripSample(SAMPLE_CHARACTERS if part.number else SAMPLE_FIRST_PART)
        temporary = part_path(self._settings.folder, part.number, f".{os.getpid()}.tmp")
        try:
            with open(temporary, "wb", buffering=2**20) as self._file:
                for number, piece in enumerate(part.slices):
                    self._slice(number, piece)
            # .json last: with it the part counts as done
            os.replace(temporary, part_path(self._settings.folder, part.number, ".bin"))
            lengths = self._lengths.tobytes()
            self._publish(part.number, ".len", lengths)
            entry = {
                "part": part.identity,
                "bytes": self._bytes,
                "crc32": self._crc,
                "documents": len(self._lengths),
                "tokens": self._bytes // self._dtype.itemsize,
                "lengths_crc32": zlib.crc32(lengths),
                "bad": self._bad,
                "no_tokens": self._no_tokens,
                "sample": self._sample.as_json(),
                "without_checksums": [path for path, carried in self._checksums.items() if not carried],
            }
            self._publish(part.number, ".json", json.dumps(entry).encode())
        except OSError as error:
            need = part.bytes * self._dtype.itemsize // 4
            raise write_error(error.filename or temporary, error, need) from error
        finally:
            temporary.unlink(missing_ok=True)

    def _slice(self, number: int, piece: InputSlice) -> None:
        texts: list[str] = []
        lines: list[int] = []
        characters = 0
        for line, text in read_documents(piece, self._settings.fields):
            if isinstance(text, BadLine):
                # listed before anything was tokenized: only counted here
                self._bad[text.kind] = self._bad.get(text.kind, 0) + 1
                continue
            texts.append(text)
            lines.append(line)
            characters += len(text)
            if characters >= _BATCH_CHARACTERS or len(texts) >= _BATCH_TEXTS:
                self._encode(number, piece, texts, lines)
                texts = []
                lines = []
                characters = 0
        if texts:
            self._encode(number, piece, texts, lines)
        if piece.path not in self._checksums:
            self._checksums[piece.path] = carries_checksums(piece, self._settings.fields)

    def _encode(self, number: int, piece: InputSlice, texts: list[str], lines: list[int]) -> None:
        eod = self._settings.eod
        before = len(self._lengths)
        pieces = []
        try:
            with cpu_limit(self._settings.cpu_seconds + sum(map(len, texts)) / _CHARACTERS_PER_SECOND):
                encoded = self._tokenizer.encode_batch(texts)
                for text, line in zip(texts, lines, strict=True):
                    self._sample.offer(text, (number, line), self._tokenizer)
        except DataError as error:
            above = lines_before(piece)
            place = f"{piece.path}:{above + lines[0]} to {above + lines[-1]}"
            raise DataError(f"{error} (the text is in {place})") from error
        for ids, line in zip(encoded, lines, strict=True):
            if not len(ids):
                self._bad[NO_TOKENS] = self._bad.get(NO_TOKENS, 0) + 1
                self._no_tokens.append((number, line))
                continue
            if isinstance(ids, np.ndarray):
                tokens = array(self._typecode, ids.astype(self._dtype).tobytes())
            else:
                tokens = array(self._typecode, ids)
            if eod is not None:
                tokens.append(eod)
            self._lengths.append(len(tokens))
            pieces.append(tokens)
        data = b"".join(pieces)
        self._crc = zlib.crc32(data, self._crc)
        self._bytes += len(data)
        self._file.write(data)
        self._report(
            {
                "characters": sum(map(len, texts)),
                "documents": len(self._lengths) - before,
                "tokens": len(data) // self._dtype.itemsize,
            }
        )

    def _publish(self, number: int, ending: str, data: bytes) -> None:
        temporary = part_path(self._settings.folder, number, f"{ending}.{os.getpid()}.tmp")
        temporary.write_bytes(data)
        os.replace(temporary, part_path(self._settings.folder, number, ending))


class RoundTripSample:
    """Documents of a part that are tokenized and put together again, to see what is lost of them."""

    def __init__(self, n_characters: int):
        self._first = n_characters
        self._offered = self._documents = self._characters = self._lossy = 0
        self._lost: Counter[str] = Counter()
        self._places: list[tuple[int, int]] = []

    def offer(self, text: str, place: tuple[int, int], tokenizer: Tokenizer) -> None:
        """The next document of the part, and its place: number of the slice, line in it. Raises DataError."""
        number = self._offered
        self._offered += 1
        if self._characters >= self._first and number % SAMPLE_EVERY:
            return
        tried = _beginning(text)
        lost = tokenizer.lost(tried)
        self._documents += 1
        self._characters += len(tried)
        if lost:
            self._lossy += 1
            self._lost += lost
            if len(self._places) < PLACES_KEPT:
                self._places.append(place)

    def as_json(self) -> dict[str, Any]:
        commonest = sorted(self._lost.items(), key=lambda one: (-one[1], one[0]))[:LOST_KEPT]
        return {
            "documents": self._documents,
            "characters": self._characters,
            "lossy_documents": self._lossy,
            "lost_characters": self._lost.total(),
            "lost": dict(commonest),
            "places": self._places,
        }


def _beginning(text: str) -> str:
    """At most SAMPLE_LENGTH characters, up to white space where there is some: a part of a word may be unknown."""
    if len(text) <= SAMPLE_LENGTH:
        return text
    cut = text[:SAMPLE_LENGTH]
    return cut.rsplit(None, 1)[0] or cut


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Lets the kernel end this process where the block takes more CPU time: native code can't be stopped otherwise.

    The process then ends by SIGPROF, whose default that is; whoever started it tells why.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def open_tokenizer(settings: PrepareSettings) -> Tokenizer:
    """The tokenizer of a worker."""
    if settings.tokenizer is None:
        return ByteTokenizer()
    path = Path(settings.tokenizer)
    return open_copy(path.read_bytes(), path.suffix, name=settings.tokenizer, where=settings.tokenizer_where)


def begin(settings: dict[str, Any], report: Report) -> Work:
    """What tokenizes the parts. Raises DataError: the tokenizer can't be read."""
    shared = PrepareSettings.from_json(settings)
    return PartWriter(shared, open_tokenizer(shared), report).write


if __name__ == "__main__":
    sys.exit(serve_parts(begin))
