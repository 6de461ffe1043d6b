"""Rank 0's copies of what is published to checkpoint.copy_to, by a process of its own: neither training nor the next
save waits for a store. Torch-free."""

import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from megaspec.checkpoint.failures import KINDS
from megaspec.checkpoint.remote import FIRST_WAIT_SECONDS
from megaspec.checkpoint.writer_process import WriterProcess
from megaspec.core.errors import CheckpointError, WriteError, printable


class Copier:
    """One copy at a time. Where several wait, the newest is copied and the others are told to be left out.

    A copy that fails is told, and the next checkpoint is copied all the same; `finish` raises what the last one met.
    """

    def __init__(self, url: str, run_dir: Path, *, wait_seconds: float = FIRST_WAIT_SECONDS):
        self._url = url
        self._common = {"url": url, "wait_seconds": wait_seconds}
        self._process = WriterProcess({"run_dir": str(run_dir), "token": 0, "chunk_bytes": 8})
        self._jobs: deque[dict[str, Any]] = deque()
        self._under_way: dict[str, Any] | None = None
        self._failure: WriteError | None = None

    def check(self) -> None:
        """Whether what is copied will arrive. WriteError: it won't, and why; UsageError: a package is missing."""
        self._process.send({"do": "check", **self._common})
        answer = self._process.wait()
        if "value" not in answer:
            raise KINDS[answer["kind"]](answer["lines"])

    def copy(self, path: Path, step: int) -> None:
        """A checkpoint is published."""
        for job in [job for job in self._jobs if job["do"] == "copy"]:
            self._jobs.remove(job)
            self._tell(f"step {job['step']} is not copied to {self._url}: step {step} is, which is newer")
        self._jobs.append({"do": "copy", **self._common, "path": str(path), "step": step})
        self.poll()

    def drop(self, step: int) -> None:
        """A checkpoint was deleted from the run folder: its copy goes as well."""
        self._jobs.append({"do": "drop", **self._common, "step": step})
        self.poll()

    def poll(self) -> None:
        """Takes in what is done, and gives the process more to do."""
        if self._under_way is not None:
            answer = self._process.poll()
            if answer is None:
                return
            self._done(answer)
        if self._jobs:
            self._under_way = self._jobs.popleft()
            self._process.send(self._under_way)

    def finish(self, seconds: float = float("inf")) -> bool:
        """Waits for all copies, for about so many seconds. -> whether they are made. WriteError: the newest could not
        be."""
        until = time.monotonic() + seconds
        while self._under_way is not None or self._jobs:
            left = until - time.monotonic()
            if left <= 0:
                return False
            if self._under_way is not None:
                answer = self._process.wait_some(min(left, 60.0))
                if answer is not None:
                    self._done(answer)
            if self._under_way is None:
                self.poll()
        if self._failure is not None:
            raise self._failure
        return True

    def close(self) -> None:
        """Gives up what is under way; the next start copies the newest."""
        self._process.abandon()
        self._jobs.clear()
        self._under_way = None

    def _done(self, answer: dict[str, Any]) -> None:
        job = self._under_way
        self._under_way = None
        assert job is not None, "no job is under way"
        if "value" in answer:
            if job["do"] == "copy":
                self._failure = None
            return
        if answer.get("died") and not job.get("again"):
            # begun anew: a store that is at fault answers, or does not, in its own words
            self._jobs.appendleft(job | {"again": True})
            return
        error = KINDS[answer["kind"]](answer["lines"])
        verb = "copied" if job["do"] == "copy" else "deleted there"
        self._tell(f"step {job['step']} was not {verb}: {error}")
        # one that was deleted before its turn came is no failure of the store
        if job["do"] == "copy" and not isinstance(error, CheckpointError):
            self._failure = WriteError(error.problems)

    def _tell(self, text: str) -> None:
        print(printable(f"megaspec: {text}", keep="\n"), file=sys.stderr, flush=True)
