"""Hashes of a job's inputs: made beside its work, kept with its parts, and held against what was there before."""

import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from megaspec.core.errors import DataError
from megaspec.core.units import plural
from megaspec.data.files import write_atomically
from megaspec.data.inputs import PYTHON_CORPUS, Input, find_inputs
from megaspec.data.manifest import SourceRecord, load_manifest, manifest_path
from megaspec.data.provenance import describe

SUMS = "sources.json"
# Of a source, so that looking takes less than a second.
_READ_AT_START = 64 * 2**20
_MOST_TOLD = 3


class SourceSums:
    """The records of a job's inputs.

    Finished parts belong to the bytes that they were made from. A job that goes on has inputs of the same names, sizes
    and times, so only their content can differ; where it does, no part may be used.
    """

    def __init__(self, folder: Path, inputs: list[Input]):
        self._path = folder / SUMS
        self._future = _in_background(lambda: tuple(describe(given) for given in inputs))
        self._is_kept = False

    def keep(self) -> None:
        """Keep the sums, or hold them against those that are kept, once they are made. Raises DataError, WriteError."""
        if self._future.done() and not self._is_kept:
            self.wait()

    def wait(self) -> tuple[SourceRecord, ...]:
        """The records, kept. Raises DataError for an input that changed since parts were made, WriteError."""
        records = self._future.result()
        if not self._is_kept:
            self._compare(records)
            content = [record.model_dump(mode="json") for record in records]
            write_atomically(self._path, [json.dumps(content).encode()])
            self._is_kept = True
        return records

    def _compare(self, records: tuple[SourceRecord, ...]) -> None:
        if not self._path.exists():
            return
        try:
            before = {one["name"]: one["sha256"] for one in json.loads(self._path.read_bytes())}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self._path}: damaged ({error}); start over with --restart") from error
        for record in records:
            if before.get(record.name) != record.sha256:
                raise DataError(
                    f"{record.name}: sha256={record.sha256}, it was {before.get(record.name)} when the finished parts "
                    "were made from it, though size and time are the same: damaged, or changed behind their back; "
                    "restore it and start the same command again, or start over with --restart"
                )


def difference(before: SourceRecord, now: SourceRecord) -> str:
    """What is other in an input than when data was made from it, file by file where it is a folder; "" for nothing."""
    if now.sha256 == before.sha256:
        return ""
    old = {file.name: file.sha256 for file in before.files}
    new = {file.name: file.sha256 for file in now.files}
    # an input that is one file has no list of files
    if not old or not new:
        return f"{before.name} changed: sha256={now.sha256}, it was {before.sha256}"
    changes: list[str] = []
    for name in sorted(old.keys() | new.keys()):
        path = f"{before.name}/{name}"
        if name not in new:
            changes.append(f"{path} is missing")
        elif name not in old:
            changes.append(f"{path} is new")
        elif old[name] != new[name]:
            changes.append(f"{path} changed: sha256={new[name]}, it was {old[name]}")
    shown = changes[:_MOST_TOLD]
    if len(changes) > _MOST_TOLD:
        shown.append(f"{len(changes) - _MOST_TOLD:,} more {plural('file', len(changes) - _MOST_TOLD)}")
    return ", ".join(shown)


def differences(before: Sequence[SourceRecord], found: Sequence[Input]) -> list[str]:
    """What is other in inputs than when data was made from them. Raises DataError for one that can't be read."""
    records = {record.name: record for record in before}
    told: list[str] = []
    for given in found:
        if given.name not in records:
            continue
        change = difference(records[given.name], describe(given))
        if change:
            told.append(change)
    return told


def source_state(record: SourceRecord) -> str:
    """What became of a source since data was made from it, as far as it can be seen from here."""
    if record.name != PYTHON_CORPUS and not os.path.lexists(record.name):
        return "not there to compare"
    try:
        (given,) = find_inputs([record.name])
        told = difference(record, describe(given))
    except DataError as error:
        return f"can't be compared: {error}"
    if not told:
        return "as it was"
    text = "changed since: not what the data was made from"
    if record.files:
        text += f" ({told})"
    return text


def changes_at_start(prefix: str) -> list[str]:
    """Which sources of a data set, of those that are there, are other than what it was made from.

    All that is small is read; of what is large only the sizes and whether it was written to since, so that a training
    starts at once: `megaspec data inspect` reads all of it.
    """
    manifest = load_manifest(prefix)
    if manifest is None:
        return []
    told: list[str] = []
    for record in manifest.sources:
        # The corpus of a Python is no file that a user changes.
        if record.name == PYTHON_CORPUS or not os.path.lexists(record.name):
            continue
        way_out = f"{prefix} holds what was there before; prepare it again with --overwrite for what is there now"
        try:
            (given,) = find_inputs([record.name])
            if record.bytes <= _READ_AT_START:
                change = difference(record, describe(given))
            else:
                change = _seen_change(record, given, manifest_path(prefix))
        except DataError as error:
            change = f"whether {record.name} is what {prefix} was made from can't be seen: {error}"
            way_out = "make it readable, or move it away"
        if change:
            told.append(f"{change}; {way_out}")
    return told


def _seen_change(record: SourceRecord, given: Input, manifest: Path) -> str:
    """What sizes and times say, without reading the files."""
    size = sum(n_bytes for _, _, n_bytes, _ in given.files)
    if size != record.bytes:
        return f"{record.name} changed: bytes={size:,}, it was {record.bytes:,}"
    made = manifest.stat().st_mtime_ns
    for _, path, _, written in given.files:
        if written > made:
            return f"{path} was written to since; `megaspec data inspect` says whether it is other text"
    return ""


def _in_background(work: Callable[[], Any]) -> Future:
    """The future result of a thread that doesn't keep the process alive."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(work())
        # Whatever it is, whoever waits for the result has to get it.
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
