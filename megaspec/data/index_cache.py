"""Index arrays on disk, named by a hash of everything that they depend on.

An entry is a folder of .npy files and entry.json, which names each with its size and checksum. It is built in a
temporary folder and renamed into place, so a reader sees a whole entry or none. Concurrent builders wait for one of
them at a file lock, which the kernel drops when its holder dies; on a file system without locks each builds its own
copy and the first rename wins, which is right too because all copies are equal.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megaspec.core.errors import WriteError
from megaspec.data.files import write_error

FORMAT = 1
_ENTRY_LIMIT = 2**20
_log = logging.getLogger(__name__)

Arrays = dict[str, np.ndarray]


class IndexCache:
    """A folder of index entries. Raises WriteError when a new entry can't be written."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def get(self, key: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
        """The arrays for a key (JSON values), memory-mapped; built and kept when they are not there yet."""
        text = json.dumps({"format": FORMAT, **key}, sort_keys=True, separators=(",", ":"))
        name = hashlib.sha256(text.encode()).hexdigest()[:40]
        entry = self.folder / name
        arrays = _load(entry, text)
        if arrays is not None:
            return arrays
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _locked(self.folder / f"{name}.lock"):
                # whoever had the lock before may have built it
                arrays = _load(entry, text)
                if arrays is None:
                    self._remove_leftovers(name)
                    self._store(entry, text, build())
                    arrays = _load(entry, text)
        except OSError as error:
            failed = write_error(error.filename or entry, error)
            raise WriteError(f"{failed}; data.cache names the folder for index files") from error
        assert arrays is not None, f"{entry} can't be read right after it was written"
        return arrays

    def _store(self, entry: Path, text: str, arrays: Arrays) -> None:
        """Writes an entry under a name of this thread's own, and gives it its name when all of it is on the disk."""
        temporary = entry.with_name(f"{entry.name}.{socket.gethostname()}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            temporary.mkdir()
            files = {}
            for name, array in arrays.items():
                path = temporary / f"{name}.npy"
                with open(path, "wb") as file:
                    np.save(file, array, allow_pickle=False)
                    file.flush()
                    os.fsync(file.fileno())
                files[name] = {"bytes": path.stat().st_size, "crc32": _crc32(path)}
            # last: it names the arrays with their checksums
            with open(temporary / "entry.json", "w") as file:
                json.dump({"key": text, "files": files}, file)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.rename(temporary, entry)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                # another builder was first, which is as good, or a damaged entry stands there
                if _load(entry, text) is None:
                    shutil.rmtree(entry)
                    os.rename(temporary, entry)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _remove_leftovers(self, name: str) -> None:
        """Removes what builders of this machine left of an entry when they were killed."""
        for path in self.folder.glob(f"{name}.{socket.gethostname()}.*.tmp"):
            pid = path.name.split(".")[-3]
            if pid.isdigit() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(path, ignore_errors=True)


def _load(entry: Path, text: str) -> Arrays | None:
    """The arrays of an entry, None when it is not there or not whole."""
    try:
        with open(entry / "entry.json", "rb") as file:
            body = json.loads(file.read(_ENTRY_LIMIT))
        if body["key"] != text:
            raise ValueError("another key")
        arrays = {}
        for name, wanted in body["files"].items():
            path = entry / f"{name}.npy"
            if path.stat().st_size != wanted["bytes"] or _crc32(path) != wanted["crc32"]:
                raise ValueError(f"{path.name} is damaged")
            arrays[name] = np.load(path, mmap_mode="r", allow_pickle=False)
        return arrays
    except (FileNotFoundError, NotADirectoryError):
        if entry.exists():
            _log.warning("%s: index entry is not whole, making it again", entry)
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("%s: %s, making the index again", entry, error)
        return None


def _crc32(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(2**22):
            crc = zlib.crc32(chunk, crc)
    return crc


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """While entered: this process has the lock file, where the file system knows locks. Waits for it."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
        yield
