"""The order of a stream: stretches of files, lanes that read them, documents packed into sequences. Torch-free.

Note "The order of a stream". Files are cut into stretches of about `window` bytes, by their sizes alone. Each pass over
a group of files takes its stretches in another random order; pass follows pass, and of that endless row of stretches
lane l takes numbers l, l + lanes, l + 2 · lanes, ... It shuffles the documents of a stretch among themselves, and packs
their tokens, each document followed by the token that ends it, into sequences of seq_len + 1 tokens, of which the last
is the first of the next one. Sample i of the run is the next sequence of lane i modulo lanes. So it depends on files,
Spec and seed alone, and a rank tokenizes no other lanes than those of its samples.

Note "Blends". With weights each group of files has its own stretches in every lane. The groups' row of turns gives turn
i to the group that is furthest behind its share of i + 1 samples, as Megatron blends data sets; lane l takes its sample
n from the group of turn l + n. So the shares hold along a lane and across a batch alike.

Note "A place". What a lane has to know to go on: its next sample, and of each group the samples taken, the stretch, the
document in it, and the token in the document with which the next sample begins. A lane that is put there reads one
stretch of each group and tokenizes one document again.
"""

import os
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from megaspec.core.errors import DataError, printable
from megaspec.data.inputs import BadLine, InputSlice, lines_before, read_documents
from megaspec.data.parquet import row_group_rows
from megaspec.data.spec import StreamSpec
from megaspec.data.stream_files import FileGroup, StreamFile, bad_line, find_groups, in_recipe_words, stream_tokenizer
from megaspec.data.tokenizer import Tokenizer

# A lane has at least so many stretches of a pass, where the files are large enough for stretches of the least size:
# lanes then end a pass at nearly the same time.
_STRETCHES_PER_LANE = 8
_LEAST_STRETCH = 4096
# Documents without a token that a lane passes over in a row: as many are no accident.
_MOST_WITHOUT_TOKENS = 10_000
# What draws are for, in the key of the random bits.
_STRETCHES = 1
_DOCUMENTS = 2
# Numbers of a lane's place before those of its groups, and of each group.
_OF_LANE = 1
_OF_GROUP = 4


@dataclass(frozen=True)
class Stretch:
    """Part `part` of `parts` of a file: the documents that begin in it."""

    file: StreamFile
    part: int
    parts: int
    taken_before: int
    """Stretches of the group's endless row that lie before it: what its documents are shuffled by."""


@dataclass(frozen=True)
class Document:
    """One text and where it stands."""

    piece: InputSlice
    """What its line counts in."""
    line: int
    text: str


@dataclass(frozen=True)
class Packed:
    """One sequence of a lane."""

    tokens: np.ndarray
    """int32 [T + 1]"""
    documents: np.ndarray
    """int32 [T + 1]: number of the document that each token belongs to, from 0."""


def permutation(n: int, *, seed: int, purpose: int, numbers: tuple[int, int]) -> np.ndarray:
    """int64 [n]: a random order that depends on nothing but the arguments, the same with every numpy."""
    key = np.array([seed % 2**64, purpose], dtype=np.uint64)
    # the lowest number of the counter counts the draws
    counter = np.array([0, 0, *numbers], dtype=np.uint64)
    bits = np.random.Philox(key=key, counter=counter).random_raw(n)
    return np.argsort(bits, kind="stable")


def initial_turns(n_turns: int, shares: Sequence[float]) -> list[int]:
    """Samples of each group in the first turns. See the note "Blends"."""
    taken = [0] * len(shares)
    for _ in range(n_turns):
        taken[next_turn(taken, shares)] += 1
    return taken


def next_turn(taken: Sequence[int], shares: Sequence[float]) -> int:
    """The group whose turn is next: the one furthest behind its share, of equal ones the first."""
    n_with_it = sum(taken) + 1
    behind = [share * n_with_it - count for share, count in zip(shares, taken, strict=True)]
    return behind.index(max(behind))


class StretchOrder:
    """The endless row of stretches of one group."""

    def __init__(self, group: FileGroup, *, number: int, stretch_bytes: int, seed: int, shuffled: bool):
        self._files = group.files
        self._number = number
        self._seed = seed
        self._shuffled = shuffled
        self._parts = [_parts_of(file, stretch_bytes) for file in group.files]
        self._ends = list(accumulate(self._parts))
        self.n_stretches = self._ends[-1]
        """Of one pass."""
        self._passes: dict[int, np.ndarray] = {}

    def stretch(self, number: int) -> Stretch:
        """A stretch by its place in the row."""
        passes, index = divmod(number, self.n_stretches)
        if self._shuffled:
            index = int(self._pass(passes)[index])
        file = bisect_right(self._ends, index)
        part = index - (self._ends[file] - self._parts[file])
        return Stretch(self._files[file], part, self._parts[file], number)

    def documents_order(self, stretch: Stretch, n_documents: int) -> np.ndarray:
        """int64 [n_documents]: which document of a stretch comes first, second, ..."""
        if not self._shuffled:
            return np.arange(n_documents)
        numbers = (self._number, stretch.taken_before)
        return permutation(n_documents, seed=self._seed, purpose=_DOCUMENTS, numbers=numbers)

    def _pass(self, number: int) -> np.ndarray:
        if number not in self._passes:
            # lanes may be in two passes at a time, at the end of one
            while len(self._passes) > 1:
                del self._passes[min(self._passes)]
            numbers = (self._number, number)
            self._passes[number] = permutation(self.n_stretches, seed=self._seed, purpose=_STRETCHES, numbers=numbers)
        return self._passes[number]


def _parts_of(file: StreamFile, stretch_bytes: int) -> int:
    """Stretches of a file. A text file is one document."""
    if file.kind == "text":
        return 1
    return max(1, -(-file.bytes // stretch_bytes))


class StreamOrder:
    """What the lanes of a stream share. n_lanes: of a stream that is not shuffled one, which reads file after file.

    Raises DataError for files or a tokenizer that are not there.
    """

    def __init__(self, spec: StreamSpec, *, seed: int, shuffled: bool):
        self.spec = spec
        self.n_lanes = spec.lanes if shuffled else 1
        self.tokenizer: Tokenizer = stream_tokenizer(spec)
        groups = find_groups(spec)
        self.shares = [group.share for group in groups]
        self.groups = []
        for number, group in enumerate(groups):
            n_bytes = sum(file.bytes for file in group.files)
            fine = n_bytes // (self.n_lanes * _STRETCHES_PER_LANE)
            stretch_bytes = max(_LEAST_STRETCH, min(int(spec.window * group.share), fine))
            order = StretchOrder(group, number=number, stretch_bytes=stretch_bytes, seed=seed, shuffled=shuffled)
            self.groups.append(order)
        self._refuses_bad_lines = spec.bad_lines == "refuse"
        self._n_left_out = 0

    @property
    def n_columns(self) -> int:
        """Numbers of a lane's place."""
        return _OF_LANE + _OF_GROUP * len(self.groups)

    def beginning(self, lane: int) -> np.ndarray:
        """int64 [columns]: the place at which a lane begins."""
        place = np.zeros(self.n_columns, dtype=np.int64)
        # the samples taken are the first of each group's numbers
        place[_OF_LANE::_OF_GROUP] = initial_turns(lane, self.shares)
        return place

    def read(self, stretch: Stretch) -> list[Document]:
        """The documents of a stretch as they stand in the file. DataError for lines that are none, unless skipped."""
        file = stretch.file
        self._check_unchanged(file)
        found = []
        try:
            for piece, line, text in _lines_of(stretch, self.spec.key):
                if isinstance(text, BadLine):
                    self._refuse_or_count(piece, line, text)
                else:
                    found.append(Document(piece, line, text))
        except DataError as error:
            raise DataError(in_recipe_words(error)) from None
        return found

    def tokens_of(self, document: Document, file: StreamFile) -> np.ndarray:
        """int32: the tokens of a document, and the one that ends it where the tokenizer has one. A document without a
        token is a bad line, and has none where these are skipped."""
        try:
            (ids,) = self.tokenizer.encode_batch([document.text])
        except DataError as error:
            line = lines_before(document.piece) + document.line
            raise DataError(f"{error} (the text is in {file.path}:{line})") from error
        tokens = np.asarray(ids, dtype=np.int32)
        if not len(tokens):
            self._refuse_or_count(document.piece, document.line, BadLine("empty document"))
        elif self.tokenizer.eod is not None:
            tokens = np.append(tokens, np.int32(self.tokenizer.eod))
        return tokens

    def _check_unchanged(self, file: StreamFile) -> None:
        """Raises DataError for a file that was written to since it was opened: its stretches would be others."""
        try:
            status = os.stat(file.path)
        except OSError as error:
            raise DataError(f"{file.path}: can't be read: {error.strerror}") from error
        if (status.st_size, status.st_mtime_ns) != (file.bytes, file.written):
            text = f"{file.path}: size or time of change is another than when the run began to read it"
            raise DataError(f"{text}; put the old file back with its time, and resume")

    def _refuse_or_count(self, piece: InputSlice, line: int, bad: BadLine) -> None:
        """Raises DataError for a bad line, or counts it: says so at the first and whenever there are twice as many."""
        if self._refuses_bad_lines:
            raise DataError(bad_line(piece.path, lines_before(piece) + line, bad, self.spec.key))
        self._n_left_out += 1
        n_bad = self._n_left_out
        # 1, 2, 4, 8, ...; to find a line's number, the file is read up to it
        if n_bad & (n_bad - 1) == 0:
            last = f"{piece.path}:{lines_before(piece) + line}: {bad.kind}"
            text = f"megaspec: data.bad_lines=skip: left out {n_bad:,} so far in this process, the last {last}"
            text += " (a line counts whenever it is read, in each pass anew)"
            print(printable(text), file=sys.stderr, flush=True)


_Lines = Iterator[tuple[InputSlice, int, str | BadLine]]


def _lines_of(stretch: Stretch, key: str) -> _Lines:
    """(piece of the file that lines count in, line, text or what is wrong with it) of a stretch."""
    file = stretch.file
    if file.kind == "parquet":
        yield from _rows_of(stretch, key)
        return
    start = stretch.part * file.bytes // stretch.parts
    stop = (stretch.part + 1) * file.bytes // stretch.parts
    piece = InputSlice(file.kind, file.path, start, stop)
    for line, text in read_documents(piece, key):
        yield piece, line, text


def _rows_of(stretch: Stretch, key: str) -> _Lines:
    """Of parquet: the rows that are its part of the file. Row groups are read from their first row on."""
    path = stretch.file.path
    rows = row_group_rows(path)
    ends = list(accumulate(rows))
    n_rows = ends[-1] if ends else 0
    first = stretch.part * n_rows // stretch.parts
    stop = (stretch.part + 1) * n_rows // stretch.parts
    if first == stop:
        return
    # the row groups that hold rows first ... stop - 1
    first_group = bisect_right(ends, first)
    last_group = bisect_right(ends, stop - 1)
    piece = InputSlice("parquet", path, first_group, last_group + 1)
    for row, text in read_documents(piece, key):
        # rows count from 1 at the beginning of the file
        if row > stop:
            return
        if row > first:
            yield piece, row, text


class _Cursor:
    """Where a lane is in one group of files."""

    def __init__(self, order: StreamOrder, group: int, lane: int, *, stretch: int, document: int, token: int):
        self._order = order
        self._stretches = order.groups[group]
        self._lane = lane
        self.stretch = stretch
        """How many stretches of this lane lie behind it."""
        self.document = document
        """Place of the document in the shuffled stretch."""
        self.token = token
        """First token of the next sample, within the document."""
        self._documents: list[Document] | None = None
        self._tokens: np.ndarray | None = None

    def take(self, n_tokens: int) -> Packed:
        """The next sequence of n_tokens + 1 tokens; the cursor then stands on the last of them."""
        pieces = []
        lengths = []
        missing = n_tokens + 1
        n_without = 0
        while True:
            tokens = self._document_tokens()
            n_without = 0 if len(tokens) else n_without + 1
            if n_without > _MOST_WITHOUT_TOKENS:
                raise DataError(
                    f"data.files: {n_without:,} documents in a row without a token; the last is in {self.path}"
                )
            piece = tokens[self.token : self.token + missing]
            if len(piece):
                pieces.append(piece)
                lengths.append(len(piece))
            missing -= len(piece)
            if not missing:
                self.token += len(piece) - 1
                break
            self._next_document()
        documents = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        return Packed(np.concatenate(pieces), documents)

    def _document_tokens(self) -> np.ndarray:
        """Tokens of the document that the cursor stands in. It goes on to the next stretch where this one is at its
        end; a stretch in which no document begins is passed over."""
        if self._tokens is not None:
            return self._tokens
        n_without = 0
        self._load()
        while self.document >= len(self._documents):
            if self.document == 0:
                n_without += 1
            if n_without > 2 * self._stretches.n_stretches + 64:
                raise DataError(f"data.files: no document in {n_without:,} stretches of files, the last of {self.path}")
            self.stretch += 1
            self.document = 0
            self._documents = None
            self._load()
        self._tokens = self._order.tokens_of(self._documents[self.document], self._where().file)
        return self._tokens

    @property
    def path(self) -> str:
        """The file that it stands in."""
        return self._where().file.path

    def _next_document(self) -> None:
        self.document += 1
        self.token = 0
        self._tokens = None

    def _load(self) -> None:
        if self._documents is not None:
            return
        stretch = self._where()
        documents = self._order.read(stretch)
        order = self._stretches.documents_order(stretch, len(documents))
        self._documents = [documents[index] for index in order]

    def _where(self) -> Stretch:
        return self._stretches.stretch(self._lane + self.stretch * self._order.n_lanes)


class Lane:
    """One lane of a stream, from a place on."""

    def __init__(self, order: StreamOrder, number: int, place: np.ndarray):
        self._order = order
        self.sample = int(place[0])
        """Number of its next sample."""
        self._taken = []
        self._cursors = []
        for group in range(len(order.groups)):
            begin = _OF_LANE + _OF_GROUP * group
            taken, stretch, document, token = place[begin : begin + _OF_GROUP].tolist()
            self._taken.append(taken)
            cursor = _Cursor(order, group, number, stretch=stretch, document=document, token=token)
            self._cursors.append(cursor)

    def take(self) -> Packed:
        """The next sample. Raises DataError for a text that can't be read or tokenized."""
        group = next_turn(self._taken, self._order.shares)
        packed = self._cursors[group].take(self._order.spec.seq_len)
        self._taken[group] += 1
        self.sample += 1
        return packed

    def place(self) -> np.ndarray:
        """int64 [columns]: see the note "A place"."""
        numbers = [self.sample]
        for taken, cursor in zip(self._taken, self._cursors, strict=True):
            numbers += [taken, cursor.stretch, cursor.document, cursor.token]
        return np.array(numbers, dtype=np.int64)
