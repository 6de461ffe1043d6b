"""Which text files a URL names in an object store, for a stream that reads them once they are here. Torch-free.

Text carries no checksums of ours: a file is known by its name, size and version, which is what the store says of its
content (an ETag, a hash) or else of its time.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from megaspec.core.errors import DataError
from megaspec.core.remote_files import FIRST_WAIT_SECONDS, RemoteFiles, last_name
from megaspec.data.inputs import kind_of_name
from megaspec.data.stream_files import STREAMED
from megaspec.data.urls import RemoteData, StoreAway, split_pattern

FILES = "files.json"
"""What has been fetched into a folder, written last."""
# Names under which clients of stores say which content a file has; the first that is there counts.
_VERSIONS = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "checksum",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "modified",
    "created",
)


@dataclass(frozen=True)
class TextFile:
    """One file of a store."""

    path: str
    """As the store's client takes it."""
    name: str
    """Below the folder, file or pattern that the URL names."""
    bytes: int
    version: str
    """Another one when the content is another; "" where the store says nothing."""


@dataclass(frozen=True)
class TextListing:
    """The text files of a URL, in the order of their names."""

    remote: RemoteFiles
    record: RemoteData
    files: tuple[TextFile, ...]


def list_text(url: str, *, name: str = "", wait_seconds: float = FIRST_WAIT_SECONDS) -> TextListing:
    """What a URL names now: a file, all that can be streamed below a folder, or what a pattern matches.

    `name`: in texts before the URL. DataError: nothing can be streamed there, or the store does not answer. UsageError:
    a package is missing.
    """
    root_url, pattern = split_pattern(url)
    remote = RemoteFiles(root_url, name=name, error=DataError, away=StoreAway, wait_seconds=wait_seconds, shown=url)
    if pattern:
        found = remote.tried(lambda: _matching(remote, pattern), url)
    else:
        found = remote.tried(lambda: _below(remote), url)
    files = []
    for path, info in sorted(found.items()):
        below = _name_below(remote, path)
        # of a folder whatever is no text is passed over, as on a disk
        if pattern or below == last_name(remote.root) or kind_of_name(below) is not None:
            _refuse_name(f"{name}{url}", below)
            files.append(TextFile(path, below, int(info.get("size") or 0), _version(info)))
    if not files:
        raise DataError(f"{name}{url}: no text file has such a name there; see with the store's own client what it has")
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"\n{file.bytes} {file.version} {file.name}".encode("utf-8", "surrogateescape"))
    total = sum(file.bytes for file in files)
    return TextListing(remote, RemoteData(url=url, digest=digest.hexdigest(), bytes=total), tuple(files))


def text_urls_of(url: str, names: Sequence[str]) -> list[str]:
    """The URL of each file that a URL names."""
    root, pattern = split_pattern(url)
    if not pattern and list(names) == [last_name(root)]:
        return [root]
    return [f"{root.rstrip('/')}/{name}" for name in names]


def _matching(remote: RemoteFiles, pattern: str) -> dict[str, Mapping[str, Any]]:
    """Files that a pattern matches; hidden ones not, as on a disk."""
    found = remote.fs.glob(f"{remote.root}/{pattern}", detail=True)
    files = {}
    for path, info in found.items():
        hidden = any(part.startswith(".") for part in PurePosixPath(_name_below(remote, path)).parts)
        if info["type"] == "file" and not hidden:
            files[path] = info
    return files


def _below(remote: RemoteFiles) -> dict[str, Mapping[str, Any]]:
    """The file of that name, or all below the folder of that name. FileNotFoundError: there is neither."""
    info = remote.fs.info(remote.root)
    if info["type"] == "file":
        return {remote.root: info}
    return {path: one for path, one in remote.fs.find(remote.root, detail=True).items() if one["type"] == "file"}


def _name_below(remote: RemoteFiles, path: str) -> str:
    """A file's name below the folder that the URL names, or the file's own."""
    if path == remote.root:
        return last_name(path)
    return path.removeprefix(f"{remote.root}/")


def _refuse_name(what: str, name: str) -> None:
    """DataError: a file can't be fetched under its name, or can't be read from its middle on as a stream does."""
    # not split by PurePosixPath, which passes over what a store counts as a name of its own
    if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
        raise DataError(f"{what}: a file is called {name!r}, which is no path here; rename it")
    kind = kind_of_name(name)
    if kind is None:
        raise DataError(f"{what}: {name} is no .jsonl, .ndjson, .txt, .md or .parquet file; name those that are")
    if kind not in STREAMED:
        text = f"{what}: {name} can't be read from its middle on, as a stream does; unpack it to .jsonl"
        raise DataError(f"{text}, or make token files of it with `megaspec data prepare`")


def _version(info: Mapping[str, Any]) -> str:
    for key in _VERSIONS:
        if info.get(key) is not None:
            return f"{key} {info[key]}"
    return ""
