"""Token files from an object store to this machine: whole and verified by their manifest, or not there. Torch-free.

Ranges of a file could be read from the store in each step; a store that is slow or away would then stop a training that
has run for days, on every rank. A local file fails before it begins.

Note "What an interruption leaves". A file grows under the name .NAME.part, a checked block at a time. Who goes on takes
the blocks of it that are good; a file gets its name when all of it is on the disk, the manifest last. One process at a
time holds the lock (flock, which the kernel drops when its holder dies), others wait and find the files there.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from megaspec.core.bounded_json import parse_json
from megaspec.core.errors import DataError, WriteError, printable
from megaspec.core.remote_files import RemoteFiles, last_name
from megaspec.core.units import bytes_in_words
from megaspec.data.files import publish, write_atomically, write_error
from megaspec.data.lengths import LENGTHS_LIMIT
from megaspec.data.manifest import MANIFEST_LIMIT, Crc32Blocks, DataManifest, load_manifest, parse_manifest
from megaspec.data.remote_text import FILES, TextFile, TextListing, list_text
from megaspec.data.spec import DataSpec, StreamSpec
from megaspec.data.stream_files import described
from megaspec.data.urls import (
    RemoteData,
    StoreAway,
    UrlPlace,
    all_url_places,
    data_here,
    folder_here,
    noted_of,
    prefix_here,
    url_places,
)

_READ_BYTES = 8 << 20
_TOKENIZER_LIMIT = 256 << 20
BLOCKS_AT_ONCE = 4
"""Blocks of a file that are under way at a time: one connection seldom fills a network. At most 64 MiB each."""
DAMAGE_TRIES = 3
"""How often a block is read whose bytes are not what the manifest says: they may have changed on the way."""
_SAID_EVERY = 30.0
"""Seconds between two lines about how far it is."""

Tell = Callable[[str], None]


def tell_on_stderr(text: str) -> None:
    """A line of progress."""
    print(printable(f"megaspec: {text}"), file=sys.stderr, flush=True)


def bring_here(
    data: DataSpec, remote: Sequence[RemoteData], *, with_training: bool = True, tell: Tell = tell_on_stderr
) -> None:
    """Fetches what a run reads from URLs and this machine has not got. `remote`: of its Spec. `with_training`: false
    for an evaluation, which reads only sets of its own where there are any.

    DataError: the store has not got it, or has other data by now; WriteError: no room, or it can't be written.
    """
    places = {}
    for place in all_url_places(data, with_training=with_training):
        record = noted_of(place.url, remote)
        assert record is not None, f"{place.key}={place.url}: not among what the run was resolved with"
        places[place.url, place.download_dir] = (place, record)
    missing = [(place, record) for place, record in places.values() if not is_here(place, record)]
    _refuse_full_disks(missing)
    for place, record in missing:
        name = f"{place.key}="
        if place.is_text:
            fetch_text(place.url, folder_here(record, place.download_dir), expected=record, name=name, tell=tell)
        else:
            prefix = prefix_here(record, place.download_dir)
            fetch(place.url, prefix, expected=record, name=name, reads_all=False, tell=tell)


def is_here(place: UrlPlace, record: RemoteData) -> bool:
    """Whether this machine has the files of a URL. Sizes are looked at: each block is checked before its first use."""
    if place.is_text:
        return listing_here(folder_here(record, place.download_dir), record) is not None
    prefix = prefix_here(record, place.download_dir)
    try:
        manifest = load_manifest(prefix)
    except DataError:
        return False
    return manifest is not None and manifest.digest == record.digest and _has_its_size(prefix, manifest)


def data_in_words(data: DataSpec, remote: Sequence[RemoteData]) -> str:
    """What a run reads, where that says more than its recipe: a stream's files, and what is fetched from URLs; "" for
    other data. `remote`: of its Spec. Raises DataError."""
    said = []
    away = set()
    for place in all_url_places(data):
        record = noted_of(place.url, remote)
        if record is None:
            away.add(place.url)
            continue
        state = "is in"
        if not is_here(place, record):
            away.add(place.url)
            state = "is to be fetched into"
        said.append(f"{place.url}, {bytes_in_words(record.bytes)}, {state} {folder_here(record, place.download_dir)}")
    if isinstance(data, StreamSpec) and not any(place.url in away for place in url_places(data)):
        said.insert(0, described(data_here(data, remote)))
    return "; ".join(said)


def _refuse_full_disks(missing: Sequence[tuple[UrlPlace, RemoteData]]) -> None:
    """WriteError: all that is to be fetched does not fit on its disk; before the first byte of it."""
    needs: dict[str, int] = {}
    keys: dict[str, str] = {}
    for place, record in missing:
        begun = _bytes_below(folder_here(record, place.download_dir))
        needs[place.download_dir] = needs.get(place.download_dir, 0) + max(0, record.bytes - begun)
        keys.setdefault(place.download_dir, f"{place.section}.download_dir=")
    for folder, need in needs.items():
        refuse_full_disk(Path(folder), need, key=keys[folder])


def refuse_full_disk(folder: Path, need: int, *, key: str = "") -> None:
    """WriteError: `need` bytes don't fit on the disk of a folder, which may not be there yet."""
    above = folder.absolute()
    while not above.exists() and above != above.parent:
        above = above.parent
    have = shutil.disk_usage(above).free
    if need > have:
        text = f"{key}{folder}: {need} bytes ({bytes_in_words(need)}) are to be fetched there, free are {have} "
        raise WriteError(f"{text}({bytes_in_words(have)}); make room, or choose a folder on another disk")


def _bytes_below(folder: Path) -> int:
    """What an earlier fetch left in a folder."""
    total = 0
    for at, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(at, name).stat().st_size
    return total


def fetch(
    url: str,
    prefix: Path,
    *,
    wait_seconds: float | None = None,
    expected: RemoteData | None = None,
    name: str = "",
    reads_all: bool = True,
    tell: Tell = tell_on_stderr,
) -> DataManifest:
    """Brings `URL.bin`, `.idx`, the tokenizer, `.lengths.json` where there is one, and last `.manifest.json` to
    `prefix`. What is there already, and is what the manifest there says, is not fetched again; `reads_all`: every byte
    of it is read to know that.

    `expected`: what a run was resolved with. `name`: in texts before the URL. DataError: there is no such data set, it
    is damaged or another one, or the store does not answer; WriteError: it can't be written here, or there is no room.
    UsageError: a package is missing.
    """
    there = TokensThere(url, name=name, wait_seconds=wait_seconds)
    manifest = there.manifest
    if expected is not None and manifest.digest != expected.digest:
        raise DataError(changed_there(f"{name}{url}", expected.digest, manifest.digest))
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with _only_fetcher(prefix, tell):
            if not _is_whole(prefix, manifest, reads_all=reads_all):
                _fetch_files(there, prefix, tell)
    except OSError as error:
        raise write_error(error.filename or prefix, error) from None
    return manifest


def changed_there(what: str, before: str, now: str) -> str:
    """That a store has something else under a name than it had; `what`: path=value."""
    text = f"{what}: holds other data than when the run was resolved: its checksums hash to {now[:16]}, they did to "
    return f"{text}{before[:16]}; put the old files back, or start a run, or a fork (--fork NAME), with the new ones"


class TokensThere:
    """Token files of a store, whose manifest has been read. DataError: there is none, or it is damaged."""

    def __init__(self, url: str, *, name: str = "", wait_seconds: float | None = None):
        options = {} if wait_seconds is None else {"wait_seconds": wait_seconds}
        folder, _, self.base = url.rstrip("/").rpartition("/")
        self.url = url
        self.name = name
        self.files = RemoteFiles(folder, name=name, error=DataError, away=StoreAway, shown=url, **options)
        raw = self.files.read(self.path(".manifest.json"), limit=MANIFEST_LIMIT)
        self.manifest = parse_manifest(raw, where=f"{url}.manifest.json")
        self.raw = raw

    def path(self, ending: str) -> str:
        """Of one of the files, as the store's client takes it."""
        return f"{self.files.root}/{self.base}{ending}"

    @property
    def record(self) -> RemoteData:
        manifest = self.manifest
        return RemoteData(url=self.url, digest=manifest.digest, bytes=manifest.bin_bytes + manifest.idx_bytes)

    def check_sizes(self) -> None:
        """DataError: .bin or .idx is missing, or has another size than the manifest says."""
        for ending, said in ((".bin", self.manifest.bin_bytes), (".idx", self.manifest.idx_bytes)):
            found = self.files.size(self.path(ending))
            if found is not None and found != said:
                raise DataError(f"{self.url}{ending}: size={found}, its manifest says {said}: damaged or not its file")

    def tokenizer_file(self) -> bytes | None:
        """The bytes of the tokenizer beside the files; None for bytes, which have none. DataError: another one."""
        record = self.manifest.tokenizer
        if record.name == "byte" or not record.ending:
            return None
        name = f".tokenizer{record.ending}"
        text = self.files.read(self.path(name), limit=_TOKENIZER_LIMIT)
        if hashlib.sha256(text).hexdigest() != record.sha256:
            raise DamagedThere(
                f"{self.name}{self.url}{name}: not the tokenizer that the manifest names; upload it again"
            )
        return text

    def lengths_file(self) -> bytes | None:
        """The bytes of .lengths.json; None where there is none."""
        return self.files.read_if_there(self.path(".lengths.json"), limit=LENGTHS_LIMIT)

    def beginning_of_index(self, n_bytes: int) -> bytes:
        """The first bytes of .idx, up to the end of a block; every block is held to its checksum."""
        blocks = _blocks_of(self.manifest.idx_bytes, self.manifest.block_bytes, self.manifest.idx_crc32)
        data = bytearray()
        for block in blocks:
            if len(data) < n_bytes:
                data += self.block(".idx", block)
        return bytes(data)

    def block(self, ending: str, block: "_Block") -> bytes:
        """One block of a file, whole and good. DataError: it is damaged there."""
        for _ in range(DAMAGE_TRIES):
            data = self.files.read_range(self.path(ending), block.begin, block.end)
            if block.is_good(data):
                return data
        if len(data) > block.end - block.begin:
            text = (
                f"asked for bytes {block.begin} to {block.end}, {len(data)} came: this server sends whole files alone"
            )
            raise DataError(f"{self.name}{self.url}{ending}: {text}; take one that serves ranges of them")
        raise DamagedThere(
            f"{self.name}{self.url}{ending}: bytes {block.begin} to {block.end} have other checksums than the manifest "
            "says: damaged there, or not its file; upload the data set again"
        )


class DamagedThere(DataError):
    """A file of a store is not what its manifest says: what was fetched of it is of no use."""


class _Block:
    """A stretch of a file and the CRC-32 of its bytes."""

    def __init__(self, begin: int, end: int, crc32: int):
        self.begin = begin
        self.end = end
        self._crc32 = crc32

    def is_good(self, data: bytes) -> bool:
        return len(data) == self.end - self.begin and zlib.crc32(data) == self._crc32


def _blocks_of(n_bytes: int, block_bytes: int, crc32: str) -> list[_Block]:
    blocks = []
    for number, begin in enumerate(range(0, n_bytes, block_bytes)):
        end = min(begin + block_bytes, n_bytes)
        blocks.append(_Block(begin, end, int(crc32[8 * number : 8 * number + 8], 16)))
    return blocks


def _fetch_files(there: TokensThere, prefix: Path, tell: Tell) -> None:
    """Brings all files of a data set beside their names, and then to them."""
    manifest = there.manifest
    of_files = {
        ".idx": _blocks_of(manifest.idx_bytes, manifest.block_bytes, manifest.idx_crc32),
        ".bin": _blocks_of(manifest.bin_bytes, manifest.block_bytes, manifest.bin_crc32),
    }
    need = 0
    for ending, blocks in of_files.items():
        begun = _part(prefix, ending)
        need += blocks[-1].end if blocks else 0
        need -= begun.stat().st_size if begun.exists() else 0
    refuse_full_disk(prefix.parent, need)
    small = {}
    tokenizer = there.tokenizer_file()
    if tokenizer is not None:
        small[f".tokenizer{manifest.tokenizer.ending}"] = tokenizer
    lengths = there.lengths_file()
    if lengths is not None:
        small[".lengths.json"] = lengths
    progress = _Progress(there.url, manifest.idx_bytes + manifest.bin_bytes, tell)
    try:
        for ending, blocks in of_files.items():
            _fetch_blocks(there, ending, blocks, _part(prefix, ending), progress)
    except DamagedThere:
        # another data set by the time that somebody tries again
        for ending in of_files:
            _part(prefix, ending).unlink(missing_ok=True)
        raise
    # a manifest that stands there is of the files that are replaced
    _at(prefix, ".manifest.json").unlink(missing_ok=True)
    for ending in of_files:
        publish(_part(prefix, ending), _at(prefix, ending))
    for ending, content in small.items():
        write_atomically(_at(prefix, ending), [content])
    # last: who sees it sees all
    write_atomically(_at(prefix, ".manifest.json"), [there.raw])
    progress.end()


def _fetch_blocks(there: TokensThere, ending: str, blocks: list[_Block], part: Path, progress: "_Progress") -> None:
    """Fills a part file: behind what is good of it already, several blocks at once, in their order."""
    with open(part, "ab") as file:
        # its end is where it stands; it was made where it was not there
        number = _good_blocks(part, blocks)
        file.truncate(blocks[number - 1].end if number else 0)
        progress.take(blocks[number - 1].end if number else 0)
        left = deque(blocks[number:])
        under_way: deque[Future[bytes]] = deque()
        pool = ThreadPoolExecutor(BLOCKS_AT_ONCE)
        try:
            while left or under_way:
                while left and len(under_way) < BLOCKS_AT_ONCE:
                    under_way.append(pool.submit(there.block, ending, left.popleft()))
                data = under_way.popleft().result()
                file.write(data)
                # what stands in the file counts after a kill
                file.flush()
                progress.take(len(data))
        finally:
            pool.shutdown(cancel_futures=True)
        os.fsync(file.fileno())


def _good_blocks(part: Path, blocks: list[_Block]) -> int:
    """How many blocks of a part file, from its beginning, are what they have to be."""
    with open(part, "rb") as file:
        for number, block in enumerate(blocks):
            if not block.is_good(file.read(block.end - block.begin)):
                return number
    return len(blocks)


class _Progress:
    """Says now and then how much has come."""

    def __init__(self, what: str, total: int, tell: Tell):
        self._what = what
        self._total = total
        self._tell = tell
        self._taken = 0
        self._last = time.monotonic()
        tell(f"fetching {what}, {bytes_in_words(total)}")

    def take(self, n_bytes: int) -> None:
        self._taken += n_bytes
        if time.monotonic() > self._last + _SAID_EVERY:
            self._last = time.monotonic()
            self._tell(f"{self._what}: {bytes_in_words(self._taken)} of {bytes_in_words(self._total)} are here")

    def end(self) -> None:
        self._tell(f"{self._what} is here")


def fetch_text(
    url: str,
    folder: Path,
    *,
    expected: RemoteData,
    name: str = "",
    wait_seconds: float | None = None,
    tell: Tell = tell_on_stderr,
) -> None:
    """Brings the text files of a URL into a folder, and last `files.json`, which lists them. What of them an earlier
    fetch finished is kept. Raises as `fetch`."""
    options = {} if wait_seconds is None else {"wait_seconds": wait_seconds}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_fetcher(folder / FILES, tell):
            if listing_here(folder, expected) is not None:
                return
            _drop_changed(folder)
            listing = list_text(url, name=name, **options)
            _refuse_other_text(f"{name}{url}", expected, listing)
            refuse_full_disk(folder, expected.bytes - _bytes_below(folder))
            progress = _Progress(url, expected.bytes, tell)
            for file in listing.files:
                _fetch_text_file(listing, file, folder)
                progress.take(file.bytes)
            # a file that was replaced meanwhile came in its new form, or half of each
            _refuse_other_text(f"{name}{url}", expected, list_text(url, name=name, **options))
            write_atomically(folder / FILES, [_listing_as_json(listing, folder)])
            progress.end()
    except OSError as error:
        raise write_error(error.filename or folder, error) from None


def _refuse_other_text(what: str, expected: RemoteData, found: TextListing) -> None:
    if found.record.digest != expected.digest:
        raise DataError(changed_there(what, expected.digest, found.record.digest))


def _fetch_text_file(listing: TextListing, file: TextFile, folder: Path) -> None:
    """One file, unless it is there: it gets its name when all of it has come."""
    path = folder / file.name
    if path.is_file() and path.stat().st_size == file.bytes:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    listing.remote.fetch(file.path, part, limit=file.bytes)
    found = part.stat().st_size
    if found != file.bytes:
        part.unlink()
        raise DataError(f"{listing.record.url}: {file.name}: {found} bytes came, the store lists {file.bytes}")
    publish(part, path)


def _drop_changed(folder: Path) -> None:
    """Empties a folder in which a file was written to since all were fetched. Where files.json is missing, they were
    not yet: the folder is named by its content, and a file gets its name when all of it has come."""
    if not (folder / FILES).exists():
        return
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.endswith(".lock"):
            path.unlink()


def _listing_as_json(listing: TextListing, folder: Path) -> bytes:
    files = []
    for file in listing.files:
        written = (folder / file.name).stat().st_mtime_ns
        files.append({"name": file.name, "bytes": file.bytes, "written": written})
    content = {"version": 1, "url": listing.record.url, "digest": listing.record.digest, "files": files}
    return json.dumps(content, indent=1).encode() + b"\n"


def listing_here(folder: Path, record: RemoteData) -> list[str] | None:
    """The names of the text files in a folder where all have been fetched; None where they have not, or where one has
    been written to since."""
    try:
        with open(folder / FILES, "rb") as file:
            content = parse_json(file.read(MANIFEST_LIMIT))
        if content["digest"] != record.digest:
            return None
        names = []
        for one in content["files"]:
            status = (folder / one["name"]).stat()
            if (status.st_size, status.st_mtime_ns) != (one["bytes"], one["written"]):
                return None
            names.append(one["name"])
        return names
    except (OSError, ValueError, KeyError, TypeError):
        return None


def damage(prefix: Path, manifest: DataManifest) -> list[str]:
    """In what files are not what a manifest says, a line each: every byte is read."""
    problems = []
    of_files = ((".idx", manifest.idx_bytes, manifest.idx_crc32), (".bin", manifest.bin_bytes, manifest.bin_crc32))
    for ending, n_bytes, expected in of_files:
        path = _at(prefix, ending)
        found = path.stat().st_size
        if found != n_bytes:
            problems.append(f"{ending}: expected {n_bytes} bytes, found {found}")
            continue
        if _checksums(path, manifest.block_bytes) != expected:
            problems.append(f"{ending}: its bytes have other checksums than its manifest says")
    return problems


def _checksums(path: Path, block_bytes: int) -> str:
    blocks = Crc32Blocks(block_bytes)
    with open(path, "rb") as file:
        while data := file.read(_READ_BYTES):
            blocks.update(data)
    return blocks.hex()


def _is_whole(prefix: Path, manifest: DataManifest, *, reads_all: bool) -> bool:
    """Whether a data set of the same content is there."""
    try:
        if load_manifest(prefix) != manifest or not _has_its_size(prefix, manifest):
            return False
        return not reads_all or not damage(prefix, manifest)
    except (OSError, DataError):
        return False


def _has_its_size(prefix: Path, manifest: DataManifest) -> bool:
    try:
        for ending, said in ((".bin", manifest.bin_bytes), (".idx", manifest.idx_bytes)):
            if _at(prefix, ending).stat().st_size != said:
                return False
    except OSError:
        return False
    tokenizer = manifest.tokenizer
    return tokenizer.name == "byte" or not tokenizer.ending or _at(prefix, f".tokenizer{tokenizer.ending}").exists()


@contextlib.contextmanager
def _only_fetcher(path: Path, tell: Tell) -> Iterator[None]:
    """While entered: no other process fetches the files that `path` begins. Waits for one that does."""
    lock = path.with_name(f".{path.name}.lock")
    file = _locked(lock, tell)
    try:
        yield
    finally:
        # while it is held: who waits for it looks whether it is still the one of this name
        lock.unlink(missing_ok=True)
        file.close()


def _locked(lock: Path, tell: Tell) -> BinaryIO:
    """The lock file, locked and there. WriteError: the file system has no locks."""
    has_told = False
    while True:
        file = open(lock, "ab")  # noqa: SIM115 closed by who holds the lock
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not has_told:
                    tell(f"another process fetches {last_name(str(lock.parent))}; waiting for it")
                    has_told = True
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.path.exists(lock) and os.path.samestat(os.stat(lock), os.fstat(file.fileno())):
                return file
        except OSError as error:
            file.close()
            if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                text = f"{lock}: this file system has no locks, by which one process fetches for all"
                raise WriteError(f"{text}; choose a folder on a disk of this machine") from None
            if not isinstance(error, FileNotFoundError):
                raise
            continue
        # its holder has ended and taken it away: another one, of this name, is the lock by now
        file.close()


def _part(prefix: Path, ending: str) -> Path:
    return prefix.with_name(f".{prefix.name}{ending}.part")


def _at(prefix: Path, ending: str) -> Path:
    return prefix.with_name(prefix.name + ending)


def refuse_folder(prefix: Path) -> None:
    """WriteError: `prefix` is a folder, and the files of a data set are PREFIX.bin, PREFIX.idx, ..."""
    if os.path.isdir(prefix):
        raise WriteError(f"{prefix} is a folder; give the name that the files begin with, as {prefix}/web")
