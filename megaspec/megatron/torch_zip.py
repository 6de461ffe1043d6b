"""The zip file that torch.save writes: its directory, read strictly, and the pickle in it. Torch-free.

Every entry is stored as it is, so that a tensor's bytes lie in the file one behind the other. Compressed or encrypted
entries, entries that overlap, and names that differ between directory and entry are refused: none is torch's.
"""

import struct
import zlib
from dataclasses import dataclass
from typing import Any

from megaspec.core.errors import CheckpointError
from megaspec.core.problems import show
from megaspec.megatron.pickled import MOST_BYTES, read_pickle
from megaspec.megatron.rank_files import RankFiles

_MOST_DIRECTORY_BYTES = 1 << 29
_MOST_NAME_BYTES = 1000
_END = struct.Struct("<4s4H2LH")
_END_64_LOCATOR = struct.Struct("<4sLQL")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_FULL_16 = 0xFFFF
_FULL_32 = 0xFFFFFFFF
_IS_ENCRYPTED = 1
_CHUNK = 64 << 20


@dataclass(frozen=True)
class Member:
    """An entry of a zip file."""

    offset: int
    """Of its first byte in the file."""
    bytes: int
    crc: int


@dataclass(frozen=True)
class TorchFile:
    """What torch.save wrote: a value, and the bytes of storages that the value speaks of."""

    file: str
    """Its name in the folder."""
    value: Any
    storages: dict[str, Member]
    """By their keys."""


def read_torch_file(files: RankFiles, file: str, *, begin: int = 0, length: int | None = None) -> TorchFile:
    """One that lies in a file from byte `begin` on; `length`: its bytes, None: up to the end of the file.

    CheckpointError: it is damaged, or none that torch writes.
    """
    if length is None:
        length = files.size(file) - begin
    members = _Directory(files, file, begin, length).members()
    where = f"{files.path / file}"
    roots = [name.removesuffix("data.pkl") for name in members if name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise CheckpointError(f"{where}: a zip file without a data.pkl is none of torch's")
    root = roots[0]
    order = members.get(f"{root}byteorder")
    if order is not None and (order.bytes > 16 or files.read(file, order.offset, order.bytes) != b"little"):
        raise CheckpointError(f"{where}: its numbers are not little-endian")
    pickle = members[f"{root}data.pkl"]
    if pickle.bytes > MOST_BYTES:
        raise CheckpointError(f"{where}: a pickle of {pickle.bytes:,} bytes, expected at most {MOST_BYTES:,}")
    text = bytes(files.read(file, pickle.offset, pickle.bytes))
    if zlib.crc32(text) != pickle.crc:
        raise CheckpointError(f"{where}: data.pkl has another checksum than the file's directory says: it is damaged")
    value = read_pickle(text, f"{where} (data.pkl)")
    storages = {}
    for name, member in members.items():
        if name.startswith(f"{root}data/"):
            storages[name.removeprefix(f"{root}data/")] = member
    return TorchFile(file, value, storages)


def check_bytes(files: RankFiles, file: str, member: Member) -> None:
    """CheckpointError: the bytes of an entry have another checksum than the directory says."""
    found = 0
    for begin in range(0, member.bytes, _CHUNK):
        count = min(_CHUNK, member.bytes - begin)
        found = zlib.crc32(files.read(file, member.offset + begin, count), found)
    if found != member.crc:
        raise CheckpointError(
            f"{files.path / file}: bytes {member.offset:,} to {member.offset + member.bytes:,} have another checksum "
            f"than the file's directory says: it is damaged"
        )


class _Directory:
    """A zip file's own list of what is in it."""

    def __init__(self, files: RankFiles, file: str, begin: int, length: int):
        self._files = files
        self._file = file
        self._begin = begin
        self._length = length

    def _refuse(self, what: str) -> Any:
        raise CheckpointError(f"{self._files.path / self._file}: no zip file of torch.save's: {what}")

    def _read(self, offset: int, count: int) -> bytearray:
        if offset < 0 or count < 0 or offset + count > self._length:
            self._refuse("it is cut off or damaged")
        return self._files.read(self._file, self._begin + offset, count)

    def members(self) -> dict[str, Member]:
        """By their names. None overlaps another."""
        offset, size, count = self._place()
        if size > _MOST_DIRECTORY_BYTES or count * _ENTRY.size > size:
            self._refuse(f"a directory of {size:,} bytes for {count:,} entries")
        directory = memoryview(self._read(offset, size))
        members: dict[str, Member] = {}
        spans = []
        at = 0
        for _ in range(count):
            if at + _ENTRY.size > size:
                self._refuse("its directory is cut off")
            fields = _ENTRY.unpack_from(directory, at)
            lengths = fields[10:13]
            end = at + _ENTRY.size + sum(lengths)
            if fields[0] != b"PK\x01\x02" or end > size or lengths[0] > _MOST_NAME_BYTES:
                self._refuse("its directory is damaged")
            rest = bytes(directory[at + _ENTRY.size : end])
            name, member, first = self._member(fields, rest)
            if name in members:
                self._refuse(f"two entries are called {show(name)}")
            members[name] = member
            spans.append((first, member.offset - self._begin + member.bytes))
            at = end
        self._check_spans(spans, offset)
        return members

    def _check_spans(self, spans: list[tuple[int, int]], directory: int) -> None:
        """Entries lie one behind the other, in front of the directory: none is read twice under two names."""
        before = 0
        for first, end in sorted(spans):
            if first < before:
                self._refuse("entries that overlap")
            before = end
        if before > directory:
            self._refuse("an entry that reaches into the directory")

    def _place(self) -> tuple[int, int, int]:
        """Of the directory: where it begins, its bytes, its entries."""
        if self._length < 4 or bytes(self._read(0, 4)) != b"PK\x03\x04":
            self._refuse("it begins otherwise; torch before 1.6 wrote another format: save it again with a newer one")
        if self._length < _END.size:
            self._refuse("it is cut off")
        at = self._length - _END.size
        fields = _END.unpack(self._read(at, _END.size))
        if fields[0] != b"PK\x05\x06" or fields[7] != 0:
            self._refuse("its end is missing: it is cut off or damaged")
        count, size, offset = fields[4:7]
        if _FULL_16 not in fields[1:5] and _FULL_32 not in (size, offset):
            return offset, size, count
        locator = _END_64_LOCATOR.unpack(self._read(at - _END_64_LOCATOR.size, _END_64_LOCATOR.size))
        if locator[0] != b"PK\x06\x07":
            self._refuse("its end is damaged")
        end = _END_64.unpack(self._read(locator[2], _END_64.size))
        if end[0] != b"PK\x06\x06":
            self._refuse("its end is damaged")
        return end[9], end[8], end[7]

    def _member(self, fields: tuple[Any, ...], rest: bytes) -> tuple[str, Member, int]:
        """One entry -> its name, what it is, and where its local header begins."""
        flags, method = fields[3:5]
        crc, packed, size = fields[7:10]
        first = fields[16]
        name_length, extra_length = fields[10:12]
        raw = rest[:name_length]
        if not raw.isascii():
            self._refuse("an entry whose name is no ASCII")
        name = raw.decode("ascii")
        wide = _wide_numbers(rest[name_length : name_length + extra_length])
        if _FULL_32 in (packed, size, first):
            numbers = iter(wide)
            try:
                size = next(numbers) if size == _FULL_32 else size
                packed = next(numbers) if packed == _FULL_32 else packed
                first = next(numbers) if first == _FULL_32 else first
            except StopIteration:
                self._refuse(f"{show(name)}: its size is missing")
        if method != 0 or packed != size or flags & _IS_ENCRYPTED:
            self._refuse(f"{show(name)} is compressed or encrypted")
        local = _LOCAL.unpack(self._read(first, _LOCAL.size))
        if local[0] != b"PK\x03\x04" or bytes(self._read(first + _LOCAL.size, local[9])) != raw:
            self._refuse(f"{show(name)}: the directory and the entry differ")
        offset = first + _LOCAL.size + local[9] + local[10]
        if offset + size > self._length:
            self._refuse(f"{show(name)} ends behind the file: it is cut off")
        return name, Member(self._begin + offset, size, crc), first


def _wide_numbers(extra: bytes) -> list[int]:
    """The 64-bit numbers of an entry's extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        content = extra[at + 4 : at + 4 + length]
        if kind == 1:
            return [number for (number,) in struct.iter_unpack("<Q", content[: length // 8 * 8])]
        at += 4 + length
    return []
