"""Text to token files: cut the input into parts, have workers tokenize them, put the parts together, publish.

Note "Resuming". Each part's files lie in `<prefix>.parts/` under the part's number, and the part counts as done when
its .json is there, names the same stretch of input, and the checksums in it hold. The cut depends on the input alone,
so a job that was killed at any moment goes on with the parts that are missing and ends with the same bytes. The
published files appear by rename, the manifest last: until it is there, or when it is older than the files, reading
them is an error.
"""

import fcntl
import glob
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from megaspec.core.errors import DataError, WriteError
from megaspec.data.bad_lines import bad_lines_path, check_bad_lines, scan_inputs
from megaspec.data.files import write_atomically, write_error
from megaspec.data.indexed import index_bytes, token_dtype
from megaspec.data.inputs import Input, InputPart, changed, cut, find_inputs, read_documents
from megaspec.data.lengths import lengths_path
from megaspec.data.manifest import (
    DataManifest,
    block_bytes_for,
    crc32_of_blocks,
    load_manifest,
    write_manifest,
)
from megaspec.data.parts import Allowed, JobProgress, bad_by_kind, make_parts, read_json, sample_of, sums
from megaspec.data.prepare_worker import PrepareSettings, part_path
from megaspec.data.provenance import record_of
from megaspec.data.source_sums import SUMS, SourceSums, differences
from megaspec.data.text_fields import TextFields
from megaspec.data.tokenizer import COPIES, BpeRequest, FileTokenizer, Tokenizer, tokenizer_path, train_bpe

BPE_TRAINING_BYTES = 64 * 2**20
# CPU time that a tokenizer has for a batch of short texts, in seconds; a batch takes a fifth of one.
TOKENIZER_SECONDS = 60.0
# What is kept of a part; those of another format are made again.
PARTS_FORMAT = "3"
_COPY = 2**22


@dataclass(frozen=True)
class PreparedData:
    """The result of a job."""

    prefix: str
    manifest: DataManifest
    was_there: bool
    """The files were there already, made by the same job."""
    parts_reused: int
    """Parts that an earlier, interrupted job had finished."""
    passed_over: int
    """Files in input folders that are of no known kind."""
    without_checksums: tuple[str, ...] = ()
    """Parquet files of which damaged pages can't be told from whole ones."""


def prepare(
    inputs: list[str],
    out_prefix: str | Path,
    tokenizer: Tokenizer | BpeRequest,
    *,
    key: str | TextFields = "text",
    workers: int = 1,
    skip_bad: int = 0,
    allow_lossy: bool = False,
    append_eod: bool = True,
    resume: bool = True,
    overwrite: bool = False,
    progress: Callable[[JobProgress], None] = lambda progress: None,
) -> PreparedData:
    """Make `<out_prefix>.bin`, `.idx`, `.manifest.json` and, unless it is bytes, a copy of the
    tokenizer, `.tokenizer.json` or `.tokenizer.model`.

    inputs: files, folders, or `python` for the corpus that ships with Python. key: where JSON lines, parquet and Arrow
    hold the text. skip_bad: how many bad lines are left out before the job stops; `<out_prefix>.bad-lines.txt` lists
    them either way, before a tokenizer is trained or a token written. allow_lossy: go on where a sample of the
    documents shows that the tokenizer loses characters. resume: use the finished parts of an interrupted job.
    overwrite: replace files that another job made.
    Raises DataError for bad input and for a tokenizer that loses text or fails on it, WriteError for a disk that is
    full or not writable, WorkerDied.
    """
    prefix = str(out_prefix)
    if append_eod and not isinstance(tokenizer, BpeRequest) and tokenizer.eod is None:
        raise DataError(
            f"--tokenizer {tokenizer.name}: no token is known to end a document; name one with --eod, or say --eod none"
        )
    fields = TextFields.of(key)
    found = _find(inputs, prefix)
    job = _job_hash(found, tokenizer, fields=fields, append_eod=append_eod)
    folder = Path(f"{prefix}.parts")
    passed_over = sum(given.passed_over for given in found)

    allowed = Allowed(skip_bad, allow_lossy)
    finished = _finished(prefix, job, allowed)
    # With --overwrite the files are made again where their sources changed.
    if finished is not None and not _changed_sources(prefix, finished, found, overwrite=overwrite):
        shutil.rmtree(folder, ignore_errors=True)
        return PreparedData(prefix, finished, True, 0, passed_over)
    _refuse_overwriting(prefix, folder, job, found, overwrite=overwrite)
    with _own_folder(folder, job, resume=resume):
        _remove_leftovers(prefix)
        sources = SourceSums(folder, found)
        parts = cut(found)
        total = sum(part.bytes for part in parts)

        def show_lines(n_bytes: int) -> None:
            progress(JobProgress(n_bytes, total, 0, 0, 0, "lines"))

        def show(now: JobProgress) -> None:
            # as soon as the hashes are there: where an input has changed, work on its parts is for nothing
            sources.keep()
            progress(now)

        try:
            show_lines(0)
            scan = scan_inputs(str(folder), parts, fields, workers, show_lines)
            check_bad_lines(scan, prefix, skip_bad)
            if isinstance(tokenizer, BpeRequest):
                progress(JobProgress(0, total, 0, 0, 0, "tokenizer"))
            tokenizer = _tokenizer_in(folder, tokenizer, parts, fields)
            settings = _worker_settings(folder, tokenizer, fields=fields, append_eod=append_eod)
            entries, reused = make_parts(prefix, parts, scan, settings, workers, allowed, show)
        finally:
            # a job that ends by an error may go on later, and has to know then what its parts were made from
            sources.keep()
        described = sources.wait()
        # after the last read of the inputs, before the first byte under the final names
        moved = changed(found)
        if moved is not None:
            raise DataError(f"{moved}: changed while it was read; start the same command again")
        progress(JobProgress(total, total, *sums(entries), "files"))
        description = {
            "tokenizer": record_of(tokenizer),
            "append_eod": append_eod,
            "sample": sample_of(entries),
            "sources": described,
            "job": job,
        }
        manifest = _publish(prefix, folder, parts, entries, tokenizer, description)
    without_checksums: set[str] = set()
    for entry in entries:
        without_checksums.update(entry["without_checksums"])
    return PreparedData(prefix, manifest, False, reused, passed_over, tuple(sorted(without_checksums)))


def _worker_settings(folder: Path, tokenizer: Tokenizer, *, fields: TextFields, append_eod: bool) -> PrepareSettings:
    """What every worker is told; one that reads a tokenizer's file reads the folder's own copy."""
    path = None
    if tokenizer.ending:
        path = str(folder / f"tokenizer{tokenizer.ending}")
    return PrepareSettings(
        folder=str(folder),
        fields=fields,
        eod=tokenizer.eod if append_eod else None,
        dtype=token_dtype(tokenizer.vocab_size).str,
        tokenizer=path,
        tokenizer_where=tokenizer.where,
        cpu_seconds=TOKENIZER_SECONDS,
    )


def _job_hash(inputs: list[Input], tokenizer: Tokenizer | BpeRequest, *, fields: TextFields, append_eod: bool) -> str:
    """Hash of all that the files depend on, but for what the inputs hold: their names, sizes and times stand for it."""
    job = {
        "format": 1,
        "inputs": [[given.name, given.files] for given in inputs],
        "key": fields.keys[0],
        "append_eod": append_eod,
    }
    # files that were made from one key keep their hash
    if len(fields.keys) > 1:
        job |= {"key": fields.keys, "join": fields.join}
    if isinstance(tokenizer, BpeRequest):
        # it is trained on the inputs
        job |= {"tokenizer": f"bpe:{tokenizer.vocab_size}", "eod": None}
    else:
        job |= {"tokenizer": tokenizer.sha256, "eod": tokenizer.eod}
    return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()


def _finished(prefix: str, job: str, allowed: Allowed) -> DataManifest | None:
    """The manifest of files that the same job has made; None where there are none, or it would refuse them now."""
    manifest = _manifest_of(prefix)
    if manifest is None or manifest.job != job or sum(manifest.bad_lines.values()) > allowed.bad_lines:
        return None
    if manifest.sample is not None and manifest.sample.lost_characters and not allowed.losses:
        return None
    for ending, size in ((".bin", manifest.bin_bytes), (".idx", manifest.idx_bytes)):
        path = Path(f"{prefix}{ending}")
        if not path.exists() or path.stat().st_size != size:
            return None
    return manifest


def _find(inputs: list[str], prefix: str) -> list[Input]:
    """The inputs. Raises DataError, which says that files made from a missing one don't need it."""
    try:
        return find_inputs(inputs)
    except DataError as error:
        made = _manifest_of(prefix)
        if made is None or not any(record.name in inputs for record in made.sources):
            raise
        raise DataError(f"{error}; {_as_it_is(prefix)}, or put the input back") from error


def _changed_sources(prefix: str, manifest: DataManifest, found: list[Input], *, overwrite: bool) -> bool:
    """Whether inputs of the same sizes and times hold other bytes than those that the files were made from.

    Raises DataError for one that does, without `overwrite`, or that can't be read.
    """
    try:
        changes = differences(manifest.sources, found)
    except DataError as error:
        raise DataError(f"{error}; make it readable, or {_as_it_is(prefix)}") from error
    if changes and not overwrite:
        raise DataError(
            f"--out {prefix}: {'; '.join(changes)}, though size and time are the same: damaged, or changed behind "
            "their back; restore it, or make the files again with --overwrite"
        )
    return bool(changes)


def _as_it_is(prefix: str) -> str:
    return f"train from {prefix} as it is, which was made already and needs its input no more"


def _manifest_of(prefix: str) -> DataManifest | None:
    """The manifest that is there; None where there is none that can be read."""
    try:
        return load_manifest(prefix)
    except DataError:
        return None


def _made_from_other(prefix: str, found: list[Input]) -> str:
    """In what the job is other than the one that made the files."""
    made = _manifest_of(prefix)
    unknown = "made from other input, options or another tokenizer"
    if made is None or {record.name for record in made.sources} != {given.name for given in found}:
        return unknown
    changes = differences(made.sources, found)
    if changes:
        return f"made before its input changed ({'; '.join(changes)})"
    return "made from input of the same content, with other options or another tokenizer, or before it was written anew"


def _refuse_overwriting(prefix: str, folder: Path, job: str, found: list[Input], *, overwrite: bool) -> None:
    """Raises DataError where files of the final names are there that this job has not begun to publish."""
    if overwrite:
        return
    is_published_by_us = read_json(folder / "job.json") == _resume_key(job) and (folder / "publishing").exists()
    if is_published_by_us:
        return
    for ending in (".bin", ".idx", ".manifest.json"):
        path = f"{prefix}{ending}"
        if Path(path).exists():
            raise DataError(
                f"--out {prefix}: {path} is there, {_made_from_other(prefix, found)}; "
                "choose another name, or replace it with --overwrite"
            )


@contextmanager
def _own_folder(folder: Path, job: str, *, resume: bool) -> Iterator[None]:
    """The folder of the parts, locked; emptied when it belongs to another job, removed when the block succeeds."""
    try:
        lock = _lock(folder)
    except OSError as error:
        raise write_error(error.filename or folder, error) from error
    try:
        # Without the sums of what they were made from, parts can't be used.
        is_same = read_json(folder / "job.json") == _resume_key(job) and (folder / SUMS).exists()
        if not resume or not is_same:
            for path in folder.iterdir():
                path.unlink()
            # after the parts of the other job are gone: what lies beside job.json is that job's
            write_atomically(folder / "job.json", [json.dumps(_resume_key(job)).encode()])
        yield
        shutil.rmtree(folder)
    finally:
        os.close(lock)


def _remove_leftovers(prefix: str) -> None:
    """Remove the temporary files of a job that was killed while it published."""
    for ending in (".bin", ".idx", ".manifest.json", ".tokenizer.json", ".tokenizer.model", ".bad-lines.txt"):
        path = Path(f"{prefix}{ending}")
        for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
            leftover.unlink(missing_ok=True)


def _resume_key(job: str) -> dict[str, str]:
    """Parts are used again for the same job and the same release of the library that tokenized them."""
    return {"job": job, "tokenizers": tokenizers.__version__, "parts": PARTS_FORMAT}


def _lock(folder: Path) -> int:
    """A file descriptor that holds the folder's lock until it is closed, or its process dies."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise WriteError(f"{folder}: another `data prepare` writes here; wait for it or stop it") from error
        # The folder may have been finished and removed before the lock was ours.
        if folder.exists() and os.path.samestat(os.fstat(lock), folder.stat()):
            return lock
        os.close(lock)


def _tokenizer_in(
    folder: Path, tokenizer: Tokenizer | BpeRequest, parts: list[InputPart], fields: TextFields
) -> Tokenizer:
    """The tokenizer with its file in the folder, trained if need be."""
    if isinstance(tokenizer, BpeRequest):
        path = folder / "tokenizer.json"
        name = f"bpe:{tokenizer.vocab_size}"
        if path.exists():
            return FileTokenizer(path.read_bytes(), name=name)
        tokenizer = train_bpe(_training_texts(parts, fields), tokenizer.vocab_size)
    if tokenizer.ending:
        write_atomically(folder / f"tokenizer{tokenizer.ending}", [tokenizer.text])
    return tokenizer


def _training_texts(parts: list[InputPart], fields: TextFields) -> Iterator[str]:
    """Documents from the beginning of every part, so that all of the input has its share."""
    each = BPE_TRAINING_BYTES // max(1, len(parts))
    for part in parts:
        left = each
        for piece in part.slices:
            for _, text in read_documents(piece, fields):
                if isinstance(text, str) and left > 0:
                    yield text[:left]
                    left -= len(text)
            if left <= 0:
                break


def _publish(
    prefix: str,
    folder: Path,
    parts: list[InputPart],
    entries: list[dict[str, Any]],
    tokenizer: Tokenizer,
    description: dict[str, Any],
) -> DataManifest:
    """Put the parts together under the final names, the manifest last. What was counted of an earlier data set goes."""
    dtype = token_dtype(tokenizer.vocab_size)
    # tokens of each document, of all parts one after the other
    lengths = np.zeros(0, dtype=np.int32)
    if parts:
        of_parts = [part_path(folder, part.number, ".len").read_bytes() for part in parts]
        lengths = np.frombuffer(b"".join(of_parts), np.int32)
    if not len(lengths):
        raise DataError(f"--out {prefix}: the input holds no document")
    n_bytes = sum(entry["bytes"] for entry in entries)
    index = b"".join(index_bytes(dtype, lengths))
    # from here on what lies under the final names is ours to replace, see _refuse_overwriting
    write_atomically(folder / "publishing", [b""])
    # of the documents that are replaced
    lengths_path(prefix).unlink(missing_ok=True)
    block = block_bytes_for(n_bytes)
    bin_path = Path(f"{prefix}.bin")
    write_atomically(bin_path, _chunks(folder, parts, entries), need=n_bytes)
    write_atomically(Path(f"{prefix}.idx"), [index], need=len(index))
    if tokenizer.ending:
        copy = tokenizer_path(prefix, tokenizer.ending)
        write_atomically(copy, [tokenizer.text], need=len(tokenizer.text))
    for ending in COPIES:
        # of another tokenizer, whose files are replaced
        if ending != tokenizer.ending:
            tokenizer_path(prefix, ending).unlink(missing_ok=True)
    bad = bad_by_kind(entries)
    manifest = DataManifest(
        tokens=n_bytes // dtype.itemsize,
        documents=len(lengths),
        sequences=len(lengths),
        dtype=dtype.name,
        bad_lines=bad,
        bad_lines_file=bad_lines_path(prefix).name if bad else None,
        bin_bytes=n_bytes,
        idx_bytes=len(index),
        idx_sha256=hashlib.sha256(index).hexdigest(),
        block_bytes=block,
        bin_crc32=crc32_of_blocks(np.memmap(bin_path, dtype=np.uint8, mode="r"), block),
        idx_crc32=crc32_of_blocks(index, block),
        **description,
    )
    # last: files without it, or with an older one, are refused
    write_manifest(prefix, manifest)
    return manifest


def _chunks(folder: Path, parts: list[InputPart], entries: list[dict[str, Any]]) -> Iterator[bytes]:
    """The bytes of all parts' .bin, held against their checksums on the way. Raises DataError."""
    for part, entry in zip(parts, entries, strict=True):
        path = part_path(folder, part.number, ".bin")
        crc = 0
        with open(path, "rb") as file:
            while chunk := file.read(_COPY):
                crc = zlib.crc32(chunk, crc)
                yield chunk
        if crc != entry["crc32"]:
            raise DataError(f"{path}: crc32={crc:08x}, {entry['crc32']:08x} was written: damaged; start again")
