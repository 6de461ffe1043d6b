"""Trackio. Imported only where a recipe asks for it: trackio is an optional package.

The token for a Space is the package's own affair: `hf auth login` or HF_TOKEN.
"""

import os
import secrets
from importlib import import_module
from pathlib import Path

from megaspec.core.regular_files import make_folder_inside
from megaspec.log.events import Event, RunEnded, Sampled
from megaspec.log.remote import logged_run, note_remote_run, remote_run, status_of
from megaspec.log.scalars import scalars
from megaspec.log.spec import TrackioSpec

FOLDER = "trackio"
# Where the package keeps its databases: it reads this once, when it is imported.
FOLDER_VARIABLE = "TRACKIO_DIR"


class TrackioSink:
    """A run of a project. A step that is taken again after a kill stands there twice."""

    def __init__(self, spec: TrackioSpec, run_dir: Path, step: int):
        run = logged_run(run_dir)
        folder = spec.folder
        if folder is None:
            make_folder_inside(run_dir, FOLDER)
            folder = str(run_dir / FOLDER)
        os.environ[FOLDER_VARIABLE] = str(Path(folder).resolve())
        self._trackio = import_module("trackio")
        place = f"trackio:{spec.space or spec.folder or 'run folder'}:{spec.project}"
        known = remote_run(run_dir, place)
        # it knows runs of a project by their names, and another run may have the same
        run_id = known.id or f"{run.name}-{secrets.token_hex(4)}"
        if known.id is None:
            note_remote_run(run_dir, place, run_id)
        self._status = "failed"
        self._last_step = step
        self._run = self._trackio.init(
            spec.project,
            name=run_id,
            group=known.parent or run_id,
            space_id=spec.space,
            config=run.spec | {"parent_run": known.parent},
            resume="allow",
            embed=False,
            auto_log_cpu=False,
        )

    def __call__(self, event: Event) -> None:
        self._last_step = event.step
        numbers = scalars(event)
        if numbers:
            self._run.log(numbers, step=event.step)
        match event:
            case Sampled():
                self._run.log({"sample": self._trackio.Markdown(event.prompt + event.text)}, step=event.step)
            case RunEnded():
                self._status = status_of(event)

    def close(self) -> None:
        """Waits until everything is written."""
        self._run.log({"status": self._status}, step=self._last_step)
        self._run.finish()
