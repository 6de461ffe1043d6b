"""Hashes of a job's inputs: made beside its work, kept with its parts, and held against what was there before."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from megaspec.core.errors import DataError
from megaspec.data.files import write_atomically
from megaspec.data.inputs import Input, find_inputs
from megaspec.data.manifest import SourceRecord
from megaspec.data.provenance import describe

SUMS = "sources.json"


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


def source_state(record: SourceRecord) -> str:
    """What became of a source since data was made from it, as far as it can be seen from here."""
    try:
        (given,) = find_inputs([record.name])
        found = describe(given).sha256
    except DataError:
        return "not there to compare"
    return "as it was" if found == record.sha256 else "changed since: not what the data was made from"


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
