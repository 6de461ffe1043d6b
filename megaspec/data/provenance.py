"""What a data set was made from: its sources and its tokenizer, written into the manifest and found again."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from megaspec.core.errors import DataError
from megaspec.data import python_corpus
from megaspec.data.fetch import TokensThere, changed_there, is_here
from megaspec.data.inputs import PYTHON_CORPUS, Input
from megaspec.data.manifest import SourceFileRecord, SourceRecord, TokenizerRecord, load_manifest, sha256_of_files
from megaspec.data.spec import IndexedSpec
from megaspec.data.tokenizer import (
    TOKENIZER_LIMIT,
    ByteTokenizer,
    Tokenizer,
    open_copy,
    read_limited,
    tokenizer_path,
)
from megaspec.data.urls import RemoteData, UrlPlace, noted_of, prefix_here


def describe(given: Input) -> SourceRecord:
    """Name, size and hash of an input; a folder's hash is that of its files' hashes and names."""
    size = sum(n_bytes for _, _, n_bytes, _ in given.files)
    if given.name == PYTHON_CORPUS:
        return SourceRecord(name=given.name, bytes=size, sha256=python_corpus.content_sha256())
    paths = [Path(path) for _, path, _, _ in given.files]
    if paths == [Path(given.name)]:
        return SourceRecord(name=_written(given.name), bytes=size, sha256=sha256_of_files(paths))
    root = Path(given.name)
    files: list[SourceFileRecord] = []
    for _, path, n_bytes, _ in given.files:
        name = _written(Path(path).relative_to(root).as_posix())
        files.append(SourceFileRecord(name=name, bytes=n_bytes, sha256=sha256_of_files([Path(path)])))
    listed = "".join(f"{file.sha256}  {file.name}\n" for file in files)
    sha256 = hashlib.sha256(listed.encode()).hexdigest()
    return SourceRecord(name=_written(given.name), bytes=size, sha256=sha256, files=tuple(files))


def _written(name: str) -> str:
    """A path as a manifest holds it: bytes that are no UTF-8 as \\xff, since JSON has no others."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def record_of(tokenizer: Tokenizer) -> TokenizerRecord:
    """What the manifest says about a tokenizer."""
    return TokenizerRecord(
        name=tokenizer.name,
        sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        eod_token=tokenizer.eod_token,
        ending=tokenizer.ending,
    )


def tokenizer_of(prefix: str | Path) -> Tokenizer:
    """The tokenizer that made a data set, from its manifest and the copy of its file beside it.

    Raises DataError when either is missing or they don't belong together.
    """
    manifest = load_manifest(prefix)
    if manifest is None:
        raise DataError(f"{prefix}.manifest.json: missing, so its tokenizer isn't known; prepare the data again")
    record = manifest.tokenizer
    if record.name == ByteTokenizer.name:
        return ByteTokenizer()
    path = tokenizer_path(prefix, record.ending)
    return tokenizer_in(read_limited(path, TOKENIZER_LIMIT), record, where=str(path))


def tokenizer_of_data(data: IndexedSpec, remote: Sequence[RemoteData]) -> Tokenizer:
    """The tokenizer of a blend's first data set, which all have. Of a URL that is not here it is read from the store.
    `remote`: of the Spec. Raises as `tokenizer_of`; DataError: the store does not answer, or has another data set."""
    prefix = data.blend[0].prefix
    record = noted_of(prefix, remote)
    if record is None:
        return tokenizer_of(prefix)
    place = UrlPlace("data.blend.0.prefix", prefix, False, data.download_dir)
    if is_here(place, record):
        return tokenizer_of(prefix_here(record, data.download_dir))
    there = TokensThere(prefix, name=f"{place.key}=")
    made_by = there.manifest.tokenizer
    if there.manifest.digest != record.digest:
        raise DataError(changed_there(f"{place.key}={prefix}", record.digest, there.manifest.digest))
    text = there.tokenizer_file()
    if text is None:
        return ByteTokenizer()
    return tokenizer_in(text, made_by, where=f"{prefix}.tokenizer{made_by.ending}")


def tokenizer_in(text: bytes, record: TokenizerRecord, *, where: str) -> Tokenizer:
    """The tokenizer in the bytes of a data set's copy of its file; `where` names it. Raises DataError where it is not
    the one that the record names."""
    tokenizer = open_copy(text, record.ending, name=record.name, where=where)
    if tokenizer.sha256 != record.sha256:
        raise DataError(f"{where}: sha256={tokenizer.sha256}, the manifest says {record.sha256}: not its tokenizer")
    tokenizer.eod = record.eod
    return tokenizer
