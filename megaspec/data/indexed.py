"""Megatron's token files. `<prefix>.bin`: the tokens of all sequences back to back. `<prefix>.idx`: where each lies.

.idx, little endian, without padding (S sequences, D - 1 documents):
    9 bytes  "MMIDIDX", two zeros      u64 S       i32[S] tokens of each sequence
    u64      version = 1               u64 D       i64[S] byte at which each begins in .bin
    u8       number format of .bin                 i64[D] first sequence of each document, then S
"""

import mmap
import os
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from megaspec.core.errors import DataError
from megaspec.data.files import publish, write_atomically, write_error
from megaspec.data.manifest import DataManifest, crc32_of_blocks, load_manifest, manifest_path

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
INT32_MAX = np.iinfo(np.int32).max
_CHUNK = 2**22


def token_dtype(vocab_size: int) -> np.dtype:
    """Megatron's rule: uint16 for a vocabulary below 65,500, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


@dataclass(frozen=True)
class Index:
    """A checked .idx file. Arrays are read-only views of the file."""

    dtype: np.dtype
    """Number format of .bin."""
    lengths: np.ndarray
    """int32 [S]: tokens of each sequence."""
    offsets: np.ndarray
    """int64 [S]: byte at which each sequence begins in .bin."""
    documents: np.ndarray
    """int64 [D]: first sequence of each document, then S."""
    tokens: int
    """Sum of the lengths."""


def map_file(path: Path) -> Any:
    """The bytes of a file as a read-only buffer. Raises DataError when it can't be opened."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}") from error


def read_index(prefix: str | Path) -> Index:
    """Open `<prefix>.idx` and hold every field of it against the rules and against the size of `<prefix>.bin`.

    Raises DataError that names the file and the field.
    """
    path = Path(f"{prefix}.idx")
    return parse_index(map_file(path), path=path, bin_path=Path(f"{prefix}.bin"))


def read_lengths(prefix: str | Path) -> np.ndarray:
    """int32 [S]: tokens of each sequence, with the header of the .idx checked and nothing else. Raises DataError."""
    path = Path(f"{prefix}.idx")
    buffer = map_file(path)
    return lengths_in(buffer, size=len(buffer), path=path)


def lengths_in(buffer: Any, *, size: int, path: str | Path) -> np.ndarray:
    """As `read_lengths`, of the beginning of an .idx file, which has `size` bytes and is named `path`; the lengths are
    in its first HEADER.size + 4 · S bytes."""
    _, n_sequences, _ = _parse_header(buffer, path, size=size)
    if len(buffer) < HEADER.size + 4 * n_sequences:
        raise DataError(f"{path}: sequence count={n_sequences}, its manifest says less")
    lengths = np.frombuffer(buffer, "<i4", n_sequences, HEADER.size)
    if len(lengths) and lengths.min() < 0:
        raise DataError(f"{path}: length of sequence {int(np.argmin(lengths))}={lengths.min()}, it is at least 0")
    return lengths


def _checksums(text: str) -> np.ndarray:
    """uint32 [blocks] of a field of checksums of a manifest."""
    return np.frombuffer(bytes.fromhex(text), dtype=">u4").astype(np.uint32)


def parse_index(buffer: Any, *, path: Path, bin_path: Path) -> Index:
    """The checked index in a buffer; see `read_index`."""
    dtype, n_sequences, n_bounds = _parse_header(buffer, path, size=len(buffer))
    lengths = np.frombuffer(buffer, "<i4", n_sequences, HEADER.size)
    offsets = np.frombuffer(buffer, "<i8", n_sequences, HEADER.size + 4 * n_sequences)
    documents = np.frombuffer(buffer, "<i8", n_bounds, HEADER.size + 12 * n_sequences)
    tokens = _check_lengths(lengths, offsets, dtype.itemsize, path)
    _check_documents(documents, n_sequences, path)
    try:
        bin_size = bin_path.stat().st_size
    except OSError as error:
        raise DataError(f"{bin_path}: can't be read: {error.strerror}") from error
    if bin_size != tokens * dtype.itemsize:
        raise DataError(
            f"{bin_path}: size={bin_size}, the lengths in {path.name} ask for {tokens} tokens of {dtype.name} = "
            f"{tokens * dtype.itemsize} bytes: truncated, or not the file of this index"
        )
    return Index(dtype, lengths, offsets, documents, tokens)


def _parse_header(buffer: Any, path: str | Path, *, size: int) -> tuple[np.dtype, int, int]:
    """Number format of .bin, S and D. `size`: bytes of the file."""
    if size < HEADER.size:
        raise DataError(f"{path}: size={size}, the header alone has {HEADER.size} bytes: truncated")
    magic, version, code, n_sequences, n_bounds = HEADER.unpack_from(buffer)
    if magic != MAGIC:
        raise DataError(f"{path}: magic={magic!r}, an index begins with {MAGIC!r}")
    if version != 1:
        raise DataError(f"{path}: version={version}, only version 1 is known")
    if code not in DTYPES:
        raise DataError(f"{path}: dtype code={code}, known are {', '.join(map(str, DTYPES))}")
    dtype = DTYPES[code]
    if dtype.kind == "f":
        raise DataError(f"{path}: dtype code={code} means {dtype.name}, tokens are whole numbers")
    # a length and an offset for each sequence, 4 and 8 bytes, and a bound for each document and the end
    expected = HEADER.size + 12 * n_sequences + 8 * n_bounds
    if size != expected:
        text = f"{path}: size={size}, sequence count={n_sequences} and document count={n_bounds} need {expected}"
        # Megatron's multimodal data sets have one byte more for each sequence
        if size == expected + n_sequences:
            text += "; it may hold modes of multimodal data"
        raise DataError(text)
    return dtype, n_sequences, n_bounds


def _check_lengths(lengths: np.ndarray, offsets: np.ndarray, itemsize: int, path: Path) -> int:
    """Each sequence begins where those before it end. -> tokens of all. Raises DataError."""
    tokens = 0
    # in chunks, so that the 64-bit arrays between stay small
    for begin in range(0, len(lengths), _CHUNK):
        chunk = lengths[begin : begin + _CHUNK].astype(np.int64)
        if chunk.min() < 0:
            i = begin + int(np.argmax(chunk < 0))
            raise DataError(f"{path}: length of sequence {i}={lengths[i]}, a length is at least 0")
        # in tokens, of the chunk alone; what stands before it is added
        ends = np.cumsum(chunk)
        expected = (ends - chunk + tokens) * itemsize
        wrong = offsets[begin : begin + _CHUNK] != expected
        if wrong.any():
            at = int(np.argmax(wrong))
            raise DataError(
                f"{path}: offset of sequence {begin + at}={offsets[begin + at]}, the lengths before it end at byte "
                f"{int(expected[at])}"
            )
        tokens += int(ends[-1])
    return tokens


def _check_documents(documents: np.ndarray, n_sequences: int, path: Path) -> None:
    """The bounds of documents rise from 0 to the number of sequences. Raises DataError."""
    if not len(documents):
        raise DataError(f"{path}: document count=0, there is always the bound 0")
    if documents[0] != 0:
        raise DataError(f"{path}: document bound 0={documents[0]}, the first is 0")
    if documents[-1] != n_sequences:
        raise DataError(f"{path}: last document bound={documents[-1]}, it is the sequence count={n_sequences}")
    for begin in range(0, len(documents) - 1, _CHUNK):
        # one bound of the next chunk along, so that none is compared with nothing
        falls = np.diff(documents[begin : begin + _CHUNK + 1]) < 0
        if falls.any():
            i = begin + int(np.argmax(falls)) + 1
            raise DataError(f"{path}: document bound {i}={documents[i]}, it is below the one before={documents[i - 1]}")


class IndexedFile:
    """The sequences of one pair of files, O(1) each, without reading the rest.

    With a manifest beside the files, .idx is checked as a whole when it is opened and each block of .bin before its
    first use. Raises DataError that names the file and the field.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = str(prefix)
        self.bin_path = Path(f"{prefix}.bin")
        idx_path = Path(f"{prefix}.idx")
        buffer = map_file(idx_path)
        self.manifest: DataManifest | None = load_manifest(prefix)
        if self.manifest is not None:
            self._check_sizes(self.manifest, len(buffer), idx_path)
        self.index = parse_index(buffer, path=idx_path, bin_path=self.bin_path)
        self.idx_buffer = buffer
        self._bytes = map_file(self.bin_path)
        self._tokens = np.frombuffer(self._bytes, self.index.dtype)
        if self.manifest is not None:
            self._check_manifest(self.manifest, buffer, idx_path)
            self._block = self.manifest.block_bytes
            self._crc32 = _checksums(self.manifest.bin_crc32)
            self._unchecked = np.ones(len(self._crc32), dtype=bool)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.index.lengths)

    @property
    def tokens(self) -> int:
        """Tokens in .bin."""
        return self.index.tokens

    def read(self, sequence: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens [start, stop) of a sequence in the file's dtype, as a read-only view."""
        length = int(self.index.lengths[sequence])
        if stop is None:
            stop = length
        assert 0 <= start <= stop <= length, f"[{start}, {stop}) of sequence {sequence} with {length} tokens"
        first = int(self.index.offsets[sequence]) // self.index.dtype.itemsize
        return self.read_flat(first + start, first + stop)

    def read_flat(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of .bin in the file's dtype, as a read-only view."""
        if self.manifest is not None and stop > start:
            itemsize = self.index.dtype.itemsize
            for block in range(start * itemsize // self._block, (stop * itemsize - 1) // self._block + 1):
                if self._unchecked[block]:
                    self.check_block(block)
        return self._tokens[start:stop]

    def check_block(self, block: int) -> None:
        """Hold one block of .bin against the manifest. Raises DataError."""
        begin = block * self._block
        found = int(crc32_of_blocks(memoryview(self._bytes)[begin : begin + self._block], self._block), 16)
        if found != self._crc32[block]:
            raise DataError(
                f"{self.bin_path}: crc32 of block {block} (bytes {begin} to {begin + self._block})={found:08x}, "
                f"{manifest_path(self.prefix).name} says {int(self._crc32[block]):08x}: damaged; "
                "copy or prepare it again"
            )
        self._unchecked[block] = False

    @property
    def n_blocks(self) -> int:
        """Blocks of .bin that `check_block` can check; 0 without a manifest."""
        if self.manifest is None:
            return 0
        return len(self._crc32)

    def _check_sizes(self, manifest: DataManifest, idx_size: int, idx_path: Path) -> None:
        name = manifest_path(self.prefix).name
        if idx_size != manifest.idx_bytes:
            raise DataError(f"{idx_path}: size={idx_size}, {name} says {manifest.idx_bytes}: damaged or not its file")
        try:
            bin_size = self.bin_path.stat().st_size
        except OSError as error:
            raise DataError(f"{self.bin_path}: can't be read: {error.strerror}") from error
        if bin_size != manifest.bin_bytes:
            raise DataError(
                f"{self.bin_path}: size={bin_size}, {name} says {manifest.bin_bytes}: damaged or not its file"
            )

    def _check_manifest(self, manifest: DataManifest, buffer: Any, idx_path: Path) -> None:
        name = manifest_path(self.prefix).name
        for field, found, said in (
            ("dtype", self.index.dtype.name, manifest.dtype),
            ("sequence count", len(self), manifest.sequences),
            ("document count", len(self.index.documents) - 1, manifest.documents),
            ("tokens", self.tokens, manifest.tokens),
        ):
            if found != said:
                raise DataError(f"{idx_path}: {field}={found}, {name} says {said}: damaged or not its file")
        found = _checksums(crc32_of_blocks(buffer, manifest.block_bytes))
        wrong = found != _checksums(manifest.idx_crc32)
        if wrong.any():
            block = int(np.argmax(wrong))
            raise DataError(
                f"{idx_path}: crc32 of block {block} (bytes {block * manifest.block_bytes} to "
                f"{min(len(buffer), (block + 1) * manifest.block_bytes)})={int(found[block]):08x}, {name} says "
                "otherwise: lengths, offsets or document bounds are damaged; copy or prepare the data again"
            )


def index_bytes(dtype: np.dtype, lengths: np.ndarray, documents: np.ndarray | None = None) -> list[bytes]:
    """The bytes of an .idx file in pieces. `documents` (int64 [D]) defaults to one sequence per document."""
    lengths = np.ascontiguousarray(lengths, dtype="<i4")
    if documents is None:
        documents = np.arange(len(lengths) + 1)
    ends = np.cumsum(lengths, dtype=np.int64)
    header = HEADER.pack(MAGIC, 1, CODES[dtype], len(lengths), len(documents))
    offsets = ((ends - lengths) * dtype.itemsize).astype("<i8")
    return [header, lengths.tobytes(), offsets.tobytes(), np.ascontiguousarray(documents, dtype="<i8").tobytes()]


class IndexedWriter:
    """Writes the pair of files as it goes; they appear under their names when `finalize` is called.

    As a context manager it finalizes, or removes what it wrote when an exception leaves the block. Raises WriteError.
    """

    def __init__(self, prefix: str | Path, *, dtype: np.dtype):
        assert dtype in CODES, f"dtype {dtype}"
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._path = Path(f"{prefix}.bin")
        self._temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        try:
            self._file = open(self._temporary, "wb", buffering=2**20)  # noqa: SIM115 closed by finalize or discard
        except OSError as error:
            raise write_error(self._path, error) from error

    def add_document(self, tokens: Any, lengths: list[int] | None = None) -> None:
        """Append a document: whole numbers [n] that fit the dtype; `lengths` splits it into several sequences."""
        tokens = np.asarray(tokens, dtype=self.dtype)
        if lengths is None:
            lengths = [len(tokens)]
        assert sum(lengths) == len(tokens), f"lengths sum to {sum(lengths)}, the document has {len(tokens)} tokens"
        self._write(tokens.tobytes())
        self._lengths.extend(lengths)
        self._documents.append(len(self._lengths))

    def add_index(self, prefix: str | Path) -> None:
        """Append all documents of another pair of files of the same dtype. Raises DataError when they are damaged."""
        other = IndexedFile(prefix)
        if other.index.dtype != self.dtype:
            raise DataError(f"{prefix}.idx: dtype={other.index.dtype.name}, it can't be merged into {self.dtype.name}")
        for start in range(0, other.tokens, _CHUNK):
            self._write(other.read_flat(start, min(start + _CHUNK, other.tokens)))
        before = len(self._lengths)
        self._lengths.frombytes(other.index.lengths.tobytes())
        self._documents.frombytes((other.index.documents[1:] + before).tobytes())

    def finalize(self) -> None:
        """Put both files in place."""
        pieces = index_bytes(self.dtype, np.asarray(self._lengths), np.asarray(self._documents))
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            publish(self._temporary, self._path)
        except OSError as error:
            self.discard()
            raise write_error(self._path, error) from error
        # after .bin: a new index stands beside all of its tokens
        write_atomically(Path(f"{self.prefix}.idx"), pieces, need=sum(map(len, pieces)))

    def discard(self) -> None:
        """Remove what was written so far."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finalize()
        else:
            self.discard()

    def _write(self, data: Any) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise write_error(self._path, error, need=memoryview(data).nbytes) from error
