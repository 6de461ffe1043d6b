"""report.html of a run that trains, kept up to date by rank 0. It runs in a thread of its own (log/background.py)."""

import time
from pathlib import Path

from megaspec.data.files import write_atomically
from megaspec.log.events import Event, RolledBack, RunEnded, RunStarted
from megaspec.log.spec import ReportSpec
from megaspec.report.folder import REPORT, RunFolder
from megaspec.report.run_page import run_page


class ReportSink:
    """Writes the page when the run starts, then every so many seconds, and when it has ended.

    What it shows is read from metrics.jsonl, each line once, where the event that it is called with stands already.
    DataError, WriteError: as `RunFolder.read` and `write_atomically`.
    """

    def __init__(self, spec: ReportSpec, run_dir: Path, step: int):
        self._seconds = spec.every_seconds
        self._run = RunFolder(run_dir)
        self._next = 0.0
        self._has_ended = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, RolledBack):
            # metrics.jsonl was cut, and may have grown past the place that was read to
            self._run.history.restart()
        if isinstance(event, RunEnded):
            self._has_ended = True
        if isinstance(event, RunStarted | RunEnded) or time.monotonic() >= self._next:
            self._write()

    def close(self) -> None:
        """An attempt that ends without a last event has its last steps on the page, too."""
        if not self._has_ended:
            self._write()

    def _write(self) -> None:
        started = time.monotonic()
        self._run.read()
        # the file asks to be loaded again while there will be a newer one
        again = 0 if self._has_ended else max(5, round(self._seconds))
        page = run_page(self._run, seconds_until_reload=again)
        write_atomically(self._run.path / REPORT, [page.encode()])
        # a page that takes long takes at most a hundredth of the time
        self._next = started + max(self._seconds, 100 * (time.monotonic() - started))
