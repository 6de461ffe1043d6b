"""Files in an object store, or wherever else fsspec reaches: tried again with growing waits, read back. Torch-free.

Note "Secrets". Errors are told in words of ours: what a client library says may hold a key, or a signed address.
"""

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from megaspec.core.errors import MegaspecError, UsageError

T = TypeVar("T")

TRIES = 6
FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 30.0
NOT_THERE = "there is no such bucket or file"
PART_BYTES = 64 << 20
"""Of a multipart upload."""


def is_url(text: str) -> bool:
    """Whether a text that may be a path is a URL."""
    return "://" in text


def wrong_in_url(url: str, *, example: str) -> str:
    """What is wrong with a URL, to be said behind `path=`: it names no place, or holds what may be a secret, which is
    left out here; "" where nothing is."""
    scheme, found, place = url.partition("://")
    host, _, _ = place.partition("/")
    if "@" in host or "?" in place:
        text = f"{scheme}://***: a URL holds no user, password or query here; leave them out, and set AWS_ACCESS_KEY_ID"
        return f"{text} and AWS_SECRET_ACCESS_KEY, or what the scheme's package reads"
    if not found or not scheme or not place.strip("/"):
        return f"{url.rpartition('@')[2]} must be a URL, scheme://place; try {example}"
    return ""


def local_path(url: str) -> str | None:
    """The path of a URL that names a place on a file system of this machine, as it is written there; None: it names
    another."""
    scheme, found, place = url.partition("://")
    if not found or scheme not in ("file", "local"):
        return None
    return place


def unknown_scheme(url: str) -> str:
    """What is wrong with the scheme of a URL, to be said behind `path=URL`: fsspec knows none of that name; "" where
    nothing is, or fsspec is not here to ask. Whether the package for it is installed is not looked at."""
    try:
        from fsspec.registry import known_implementations, registry
    except ImportError:
        return ""
    known = {*known_implementations, *registry}
    names, _, _ = url.partition("://")
    # one through another: simplecache::s3
    for scheme in names.split("::"):
        if scheme not in known:
            near = get_close_matches(scheme, known, n=1) or ["s3"]
            return f"{scheme}:// is no scheme that fsspec knows; try {near[0]}://"
    return ""


class RemoteFiles:
    """What lies below a URL. UsageError: the package for its scheme is not installed.

    `name`, in texts before the URL, `shown`, in place of it, and `error`: what is raised when the store does not answer
    as it should, or holds more than it should; `away`, in place of it, when it did not answer at all, however often it
    was asked.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        error: type[MegaspecError],
        away: type[MegaspecError] | None = None,
        wait_seconds: float = FIRST_WAIT_SECONDS,
        shown: str = "",
    ):
        self.url = url.rstrip("/")
        self.name = name
        self.shown = shown or self.url
        self.error = error
        self.away = away or error
        self._wait_seconds = wait_seconds
        try:
            import fsspec
        except ImportError:
            raise UsageError(f"{self.name}{self.shown}: needs the package fsspec; pip install 'megaspec[s3]'") from None
        try:
            # listings change beneath us: other runs, and the copier of this one
            self.fs, self.root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            scheme, _, _ = url.partition("://")
            raise UsageError(
                f"{self.name}{self.shown}: {scheme}:// needs a package that is not installed, or is no scheme that "
                f"fsspec knows ({type(error).__name__}); for s3:// pip install 'megaspec[s3]'"
            ) from None
        self.root = self.root.rstrip("/")

    def put(self, there: str, data: bytes) -> None:
        """Writes a small file until it comes back as it was written."""
        for _ in range(TRIES):
            self.tried(lambda: self._replace(there, lambda path: self.fs.pipe_file(path, data)), there)
            if self.has(there, data):
                return
        raise self.error(f"{self.name}{self.url}: {last_name(there)}: other bytes came back than were written")

    def has(self, path: str, data: bytes) -> bool:
        """Whether a small file with these bytes is there."""

        def look() -> bool:
            try:
                return self.fs.cat_file(path) == data
            except FileNotFoundError:
                return False

        return self.tried(look, path)

    def read(self, path: str, *, limit: int) -> bytes:
        """The whole of a file of at most `limit` bytes."""
        data = self.tried(lambda: self._beginning(path, limit + 1), path)
        return self._refuse_longer(data, path, limit)

    def read_if_there(self, path: str, *, limit: int) -> bytes | None:
        """As `read`; None where there is no such file."""

        def read() -> bytes | None:
            try:
                return self._beginning(path, limit + 1)
            # S3 denies access to what is not there where one may not list
            except (FileNotFoundError, PermissionError):
                return None

        data = self.tried(read, path)
        if data is None:
            return None
        return self._refuse_longer(data, path, limit)

    def _beginning(self, path: str, n_bytes: int) -> bytes:
        with self.fs.open(path, "rb", block_size=PART_BYTES) as file:
            return file.read(n_bytes)

    def _refuse_longer(self, data: bytes, path: str, limit: int) -> bytes:
        if len(data) > limit:
            raise self.error(f"{self.name}{self.shown}: {last_name(path)}: expected at most {limit} bytes, found more")
        return data

    def read_range(self, path: str, begin: int, end: int) -> bytes:
        """The bytes [begin, end) of a file, as many of them as it has."""
        return self.tried(lambda: self.fs.cat_file(path, start=begin, end=end), path)

    def size(self, path: str) -> int | None:
        """Bytes of a file; None where the store does not say."""
        return self.tried(lambda: self.fs.info(path).get("size"), path)

    def forget(self, path: str) -> None:
        """Deletes a file, where it is there. Not tried again."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(path)

    def make_folder(self, path: str) -> None:
        """Makes a folder where there are folders. Not tried again."""
        # a store has no folders; making a bucket is its owner's affair
        if self.is_local():
            self.fs.makedirs(path, exist_ok=True)

    def is_local(self) -> bool:
        """Whether it is no store but a file system of this machine."""
        return "file" in self.fs.protocol or "local" in self.fs.protocol

    def _replace(self, there: str, write: Callable[[str], object]) -> None:
        """Writes a file that whoever reads sees whole, the former or this one, also where the writer is killed: a store
        puts it in place at its end, a file system is told to."""
        if not self.is_local():
            write(there)
            return
        # a later write takes the place of what a kill leaves
        temporary = f"{there}.tmp"
        write(temporary)
        os.replace(temporary, there)

    def write(self, source: Path, there: str) -> None:
        """Uploads a file, in parts where it is large. Not tried again, and not read back."""

        def upload(path: str) -> None:
            with open(source, "rb") as file, self.fs.open(path, "wb", block_size=PART_BYTES) as out:
                while data := file.read(PART_BYTES):
                    out.write(data)

        self._replace(there, upload)

    def fetch(self, source: str, target: Path, *, limit: int) -> None:
        """Downloads a file of at most `limit` bytes."""

        def fetch() -> None:
            taken = 0
            with self.fs.open(source, "rb", block_size=PART_BYTES) as file, open(target, "wb") as out:
                # what an earlier try wrote was cut off by opening
                while data := file.read(PART_BYTES):
                    taken += len(data)
                    if taken > limit:
                        raise self.error(f"{self.name}{source}: expected at most {limit} bytes, found more")
                    out.write(data)
                out.flush()
                os.fsync(out.fileno())

        self.tried(fetch, source)

    def tried(self, action: Callable[[], T], what: str) -> T:
        """What an action returns, tried with growing waits. Raises `error` when it failed for good."""
        for wait in _waits(self._wait_seconds):
            try:
                return action()
            except _errors() as error:
                why = in_words(error)
                text = f"{self.name}{self.shown}: {last_name(what)}: {why}"
                if is_final(error):
                    raise self.error(text) from None
                if wait is None:
                    raise self.away(text) from None
            # apart from others that failed at the same moment
            time.sleep(wait * random.uniform(0.5, 1.5))
        raise AssertionError("the last wait is None")


def _waits(first: float) -> Iterator[float | None]:
    """Seconds between tries, doubled each time; None behind the last."""
    wait = first
    for _ in range(TRIES - 1):
        yield min(wait, LONGEST_WAIT_SECONDS)
        wait *= 2
    yield None


def last_name(what: str) -> str:
    """The last part of a path or URL."""
    return what.rstrip("/").rsplit("/", 1)[-1]


_OF_LIBRARIES = {
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "aiohttp": ("ClientError",),
    "gcsfs.retry": ("HttpError",),
    "google.auth.exceptions": ("GoogleAuthError",),
    "azure.core.exceptions": ("AzureError",),
    "paramiko": ("SSHException",),
}
"""What clients of stores raise beside OSError: module -> classes."""


def _errors() -> tuple[type[BaseException], ...]:
    """What stores raise: of the libraries that are loaded, since one that raised is."""
    found: list[type[BaseException]] = [OSError, TimeoutError]
    for module, names in _OF_LIBRARIES.items():
        if module in sys.modules:
            found += [getattr(sys.modules[module], name) for name in names]
    return tuple(found)


def is_final(error: BaseException) -> bool:
    """Whether another try meets the same: no such bucket, no right to it."""
    is_known = isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError | IsADirectoryError)
    return is_known or _is_denied(error) or type(error).__name__ in _NO_CREDENTIALS


def _is_denied(error: BaseException) -> bool:
    """Whether an HTTP server says so."""
    return getattr(error, "status", None) in (401, 403)


_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound")


def in_words(error: BaseException) -> str:
    """Why it failed, without what a library says: that may hold secrets."""
    name = type(error).__name__
    if name in _NO_CREDENTIALS:
        return "no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
    if isinstance(error, PermissionError) or _is_denied(error):
        return "access is denied: the credentials are wrong, or have no right to what is asked of them there"
    if isinstance(error, FileNotFoundError):
        return NOT_THERE
    if name in ("EndpointConnectionError", "ConnectTimeoutError", "ClientConnectorError"):
        return "can't be reached"
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return f"failed ({name})"
