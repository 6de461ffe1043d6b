"""Small data sets for the tests of data."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megaspec.data.indexed import IndexedWriter, token_dtype
from megaspec.data.manifest import (
    DataManifest,
    SourceRecord,
    TokenizerRecord,
    block_bytes_for,
    crc32_of_blocks,
    write_manifest,
)
from megaspec.data.spec import StreamFiles, StreamSpec

NO_HASH = "0" * 64


def write_dataset(
    prefix: Path, lengths: list[int], *, vocab_size: int = 1000, seed: int = 0, manifest: bool = True
) -> np.ndarray:
    """Documents of random tokens; returns all tokens in a row, int64."""
    tokens = np.random.RandomState(seed).randint(0, vocab_size, sum(lengths))
    with IndexedWriter(prefix, dtype=token_dtype(vocab_size)) as writer:
        start = 0
        for length in lengths:
            writer.add_document(tokens[start : start + length])
            start += length
    if manifest:
        add_manifest(prefix, vocab_size=vocab_size, documents=len(lengths), tokens=len(tokens))
    return tokens


def add_manifest(
    prefix: Path, *, vocab_size: int, documents: int, tokens: int, tokenizer: str = "byte"
) -> DataManifest:
    data, index = Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()
    block = block_bytes_for(len(data))
    manifest = DataManifest(
        tokens=tokens,
        documents=documents,
        sequences=documents,
        dtype=token_dtype(vocab_size).name,
        tokenizer=TokenizerRecord(name=tokenizer, sha256=NO_HASH, vocab_size=vocab_size, eod=0),
        append_eod=True,
        sources=(SourceRecord(name="made", bytes=0, sha256=NO_HASH),),
        job=NO_HASH,
        bin_bytes=len(data),
        idx_bytes=len(index),
        idx_sha256=hashlib.sha256(index).hexdigest(),
        block_bytes=block,
        bin_crc32=crc32_of_blocks(data, block),
        idx_crc32=crc32_of_blocks(index, block),
    )
    write_manifest(prefix, manifest)
    return manifest


def text_of(name: str, number: int) -> str:
    """A document that says which one it is, of uneven length."""
    return f"<{name} {number}>" + "abcdefghij"[number % 10] * (7 * number % 43)


def write_texts(path: Path, n_documents: int, *, line: Callable[[int], str] | None = None) -> Path:
    """JSON lines of `text_of`; `line` writes some of them otherwise."""
    lines = []
    for number in range(n_documents):
        written = None if line is None else line(number)
        lines.append(json.dumps({"text": text_of(path.stem, number)}) if written is None else written)
    path.write_text("".join(f"{one}\n" for one in lines))
    return path


def stream_spec(*paths: Path | str, weights: tuple[float, ...] = (), **fields) -> StreamSpec:
    """A stream of bytes; the lanes and the seed are filled as the resolver would."""
    files = []
    for number, path in enumerate(paths):
        files.append(StreamFiles(path=str(path), weight=weights[number] if weights else None))
    given = {"seq_len": 32, "tokenizer": "byte", "lanes": 4, "workers": 0, "seed": 3, **fields}
    return StreamSpec(kind="stream", files=tuple(files), **given)
