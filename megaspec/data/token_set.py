"""What the resolver asks of one data set of token files: of files here, or of a store that they are fetched from before
a run. Torch-free; numpy only where an index is read."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megaspec.core.errors import DataError
from megaspec.core.remote_files import is_url
from megaspec.data.fetch import TokensThere, changed_there, is_here
from megaspec.data.lengths import LengthsRecord, lengths_path, load_lengths, parse_lengths
from megaspec.data.manifest import DataManifest, load_manifest
from megaspec.data.urls import RemoteData, UrlPlace, noted_of, prefix_here

if TYPE_CHECKING:
    import numpy as np

# Of the beginning of an .idx, see indexed.py: bytes before the lengths, and of each length.
_HEADER_BYTES = 34
_LENGTH_BYTES = 4


class TokenSet(Protocol):
    """One data set. Its methods raise DataError."""

    manifest: DataManifest | None
    """None: there is none beside files here."""
    lengths_file: str
    """Where its histogram of lengths is, or would be."""

    def lengths(self) -> "np.ndarray":
        """int32 [S]: tokens of each sequence."""

    def check_sizes(self) -> None:
        """Raises DataError for files that were cut off, or are not there. They are not read."""

    def histogram(self) -> LengthsRecord | None:
        """What `megaspec data inspect` has counted; None: nothing yet."""


class FilesHere:
    """Files of this machine. Raises DataError for a manifest that is damaged."""

    def __init__(self, prefix: str | Path):
        self._prefix = prefix
        self.manifest = load_manifest(prefix)
        self.lengths_file = str(lengths_path(prefix))

    def lengths(self) -> "np.ndarray":
        index = Path(f"{self._prefix}.idx")
        try:
            index.stat()
        except OSError as error:
            raise DataError(f"{index}: can't be read: {error.strerror}") from error
        from megaspec.data.indexed import read_lengths  # numpy, only where there are token files

        return read_lengths(self._prefix)

    def check_sizes(self) -> None:
        manifest = self.manifest
        if manifest is None:
            return
        for ending, said in ((".bin", manifest.bin_bytes), (".idx", manifest.idx_bytes)):
            path = Path(f"{self._prefix}{ending}")
            try:
                found = path.stat().st_size
            except OSError as error:
                raise DataError(f"{path}: can't be read: {error.strerror}") from error
            if found != said:
                raise DataError(f"{path}: size={found}, its manifest says {said}: damaged or not its file")

    def histogram(self) -> LengthsRecord | None:
        return load_lengths(self._prefix, self.manifest)


class FilesThere:
    """Files of a store: the manifest, the lengths and no token are read."""

    def __init__(self, there: TokensThere):
        self._there = there
        self.manifest = there.manifest
        self.lengths_file = f"{there.url}.lengths.json"

    def lengths(self) -> "np.ndarray":
        from megaspec.data.indexed import lengths_in  # numpy, only where there are token files

        beginning = self._there.beginning_of_index(_HEADER_BYTES + _LENGTH_BYTES * self.manifest.sequences)
        return lengths_in(beginning, size=self.manifest.idx_bytes, path=f"{self._there.url}.idx")

    def check_sizes(self) -> None:
        self._there.check_sizes()

    def histogram(self) -> LengthsRecord | None:
        raw = self._there.lengths_file()
        if raw is None:
            return None
        return parse_lengths(raw, where=self.lengths_file, idx_sha256=self.manifest.idx_sha256)


def open_set(
    prefix: str, *, key: str, download_dir: str, known: Sequence[RemoteData]
) -> tuple[TokenSet, RemoteData | None]:
    """A data set by its prefix, and what a Spec notes of one that is a URL; of others None.

    `key`: where the prefix stands. `known`: what the run was resolved with before, if it was: where this machine has
    it, the store is not asked, so that a run goes on while it is away. DataError: there is no such data set, or by now
    another one. UsageError: a package is missing.
    """
    if not is_url(prefix):
        return FilesHere(prefix), None
    place = UrlPlace(key, prefix, False, download_dir)
    before = noted_of(prefix, known)
    if before is not None and is_here(place, before):
        return FilesHere(prefix_here(before, download_dir)), before
    there = TokensThere(prefix)
    record = there.record
    if before is not None and before.digest != record.digest:
        raise DataError(changed_there(prefix, before.digest, record.digest))
    if is_here(place, record):
        return FilesHere(prefix_here(record, download_dir)), record
    return FilesThere(there), record
