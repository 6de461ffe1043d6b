"""What a data set was made from: its sources and its tokenizer, written into the manifest and found again."""

import hashlib
from pathlib import Path

from megaspec.core.errors import DataError
from megaspec.data import python_corpus
from megaspec.data.inputs import PYTHON_CORPUS, Input
from megaspec.data.manifest import SourceRecord, TokenizerRecord, load_manifest, sha256_of_files
from megaspec.data.tokenizer import (
    TOKENIZER_LIMIT,
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    read_limited,
    tokenizer_path,
)


def describe(given: Input) -> SourceRecord:
    """Name, size and hash of an input; a folder's hash is that of its files' hashes and names."""
    size = sum(n_bytes for _, _, n_bytes, _ in given.files)
    if given.name == PYTHON_CORPUS:
        return SourceRecord(name=given.name, bytes=size, sha256=python_corpus.content_sha256())
    paths = [Path(path) for _, path, _, _ in given.files]
    if paths == [Path(given.name)]:
        return SourceRecord(name=given.name, bytes=size, sha256=sha256_of_files(paths))
    root = Path(given.name)
    listed = "".join(f"{sha256_of_files([path])}  {path.relative_to(root).as_posix()}\n" for path in paths)
    return SourceRecord(name=given.name, bytes=size, sha256=hashlib.sha256(listed.encode()).hexdigest())


def record_of(tokenizer: Tokenizer) -> TokenizerRecord:
    """What the manifest says about a tokenizer."""
    return TokenizerRecord(
        name=tokenizer.name, sha256=tokenizer.sha256, vocab_size=tokenizer.vocab_size, eod=tokenizer.eod
    )


def tokenizer_of(prefix: str | Path) -> Tokenizer:
    """The tokenizer that made a data set, from its manifest and the copy of tokenizer.json beside it.

    Raises DataError when either is missing or they don't belong together.
    """
    manifest = load_manifest(prefix)
    if manifest is None:
        raise DataError(f"{prefix}.manifest.json: missing, so its tokenizer isn't known; prepare the data again")
    record = manifest.tokenizer
    if record.name == ByteTokenizer.name:
        return ByteTokenizer()
    path = tokenizer_path(prefix)
    tokenizer = FileTokenizer(read_limited(path, TOKENIZER_LIMIT), name=record.name, where=str(path))
    if tokenizer.sha256 != record.sha256:
        raise DataError(f"{path}: sha256={tokenizer.sha256}, the manifest says {record.sha256}: not its tokenizer")
    tokenizer.eod = record.eod
    return tokenizer
