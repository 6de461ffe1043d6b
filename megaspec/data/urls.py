"""Data that is typed as a URL: what a Spec knows of it, and where its files lie on this machine. Torch-free.

    DOWNLOAD_DIR/web-0123456789abcdef/web.bin, .idx, ...       token files of s3://bucket/data/web
    DOWNLOAD_DIR/jsonl-0123456789abcdef/files.json, a/b.jsonl  text files of s3://bucket/text/**/*.jsonl

The folder is named by the content: what a store has under a name today stands beside what it had there yesterday, and
runs that read either go on.
"""

import glob
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from megaspec.core.errors import DataError
from megaspec.core.frozen import Frozen, NonNegativeInt
from megaspec.core.remote_files import is_url, last_name, wrong_in_url
from megaspec.data.spec import DataSpec, IndexedSpec, StreamSpec

TEXT_EXAMPLE = "s3://bucket/text/*.jsonl"
TOKENS_EXAMPLE = "s3://bucket/data/web"


class StoreAway(DataError):
    """A store that did not answer, however often it was asked."""


class RemoteData(Frozen):
    """What lay at a URL when a run was resolved."""

    url: str
    """As the recipe says it."""
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Of token files: hash of their checksums and of their tokenizer (DataManifest.digest). Of text files: of their
    names, sizes and versions."""
    bytes: NonNegativeInt
    """Of the files that are fetched."""


@dataclass(frozen=True)
class UrlPlace:
    """A URL in a data spec."""

    key: str
    """`data.blend.0.prefix`."""
    url: str
    is_text: bool
    """Text files of a stream; otherwise token files."""
    download_dir: str

    @property
    def section(self) -> str:
        """The data spec that it stands in: `data`, `data.valid.web`."""
        return re.sub(r"\.(blend|files)\.\d+\.\w+$", "", self.key)

    @property
    def wrong(self) -> str:
        """Why it is not asked for, without a secret that it may hold; "" where it may be."""
        example = TOKENS_EXAMPLE
        if self.is_text:
            example = TEXT_EXAMPLE
        wrong = wrong_in_url(self.url, example=example)
        _, _, place = self.url.partition("://")
        if not wrong and not self.is_text and "/" not in place.strip("/"):
            wrong = f"{self.url} must name files in a bucket or folder, without their ending; try {example}"
        if wrong and self.key:
            return f"{self.key}={wrong}"
        return wrong


def url_places(data: DataSpec, *, key: str = "data") -> Iterator[UrlPlace]:
    """The URLs of training data, or of one evaluation set; `key`: where it stands."""
    if isinstance(data, IndexedSpec):
        for number, part in enumerate(data.blend):
            if is_url(part.prefix):
                yield UrlPlace(f"{key}.blend.{number}.prefix", part.prefix, False, data.download_dir)
    if isinstance(data, StreamSpec):
        for number, entry in enumerate(data.files):
            if is_url(entry.path):
                yield UrlPlace(f"{key}.files.{number}.path", entry.path, True, data.download_dir)


def all_url_places(data: DataSpec, *, with_training: bool = True) -> list[UrlPlace]:
    """The URLs of the training data, which an evaluation on sets of their own does without, and of evaluation sets."""
    found = []
    if with_training or not data.valid:
        found += url_places(data)
    for name, one in data.valid.items():
        found += url_places(one, key=f"data.valid.{name}")
    return found


def noted_of(url: str, remote: Sequence[RemoteData]) -> RemoteData | None:
    """What is known of a URL; None: nothing."""
    for record in remote:
        if record.url == url:
            return record
    return None


def store_of(url: str) -> str:
    """A URL's scheme and its bucket or host; of a path its beginning, which no store is known by."""
    scheme, found, place = url.partition("://")
    return f"{scheme}{found}{place.partition('/')[0]}"


def name_of(url: str) -> str:
    """What files of a URL are called here: the last part of it, of plain characters."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "", last_name(url))[:64].strip(".-")
    return plain or "data"


def folder_here(record: RemoteData, download_dir: str) -> Path:
    """Where the files lie on this machine, or will."""
    return Path(download_dir, f"{name_of(record.url)}-{record.digest[:16]}")


def prefix_here(record: RemoteData, download_dir: str) -> Path:
    """Of token files: the path without an ending."""
    return folder_here(record, download_dir) / name_of(record.url)


def text_here(record: RemoteData, download_dir: str) -> Path:
    """Of text files: the folder, file or pattern that names here what the URL names there."""
    folder = folder_here(record, download_dir)
    _, pattern = split_pattern(record.url)
    if pattern:
        # what stands before it is a name of ours, which must not read as one
        return Path(glob.escape(str(folder)), pattern)
    file = folder / last_name(record.url)
    if file.is_file():
        return file
    return folder


def split_pattern(url: str) -> tuple[str, str]:
    """A URL's folder without signs of a pattern, and the pattern below it; ("s3://b/web", "") for a plain one."""
    scheme, found, place = url.partition("://")
    parts = place.rstrip("/").split("/")
    for number, part in enumerate(parts):
        if glob.has_magic(part):
            return f"{scheme}{found}{'/'.join(parts[:number])}", "/".join(parts[number:])
    return url, ""


def data_here(data: DataSpec, remote: Sequence[RemoteData]) -> DataSpec:
    """A data spec whose URLs are paths of this machine; evaluation sets stay as they are. `remote`: of the Spec."""
    places = {place.url: place for place in url_places(data)}
    if not places:
        return data

    def here(text: str) -> str:
        place = places.get(text)
        if place is None:
            return text
        record = noted_of(text, remote)
        assert record is not None, f"{text} is not among what the run was resolved with"
        if place.is_text:
            return str(text_here(record, place.download_dir))
        return str(prefix_here(record, place.download_dir))

    if isinstance(data, IndexedSpec):
        blend = tuple(part.model_copy(update={"prefix": here(part.prefix)}) for part in data.blend)
        return data.model_copy(update={"blend": blend})
    assert isinstance(data, StreamSpec), f"{data.kind} has no URLs"
    files = tuple(entry.model_copy(update={"path": here(entry.path)}) for entry in data.files)
    return data.model_copy(update={"files": files})
