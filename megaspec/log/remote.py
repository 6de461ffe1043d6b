"""What a sink that reports to a service has to know of its run, and the run's ids there. Torch-free.

`remote_runs.json` in the run folder keeps the id that a service knows the run by, so that a run that goes on is the
same run there, and a fork is another one that knows its parent.
"""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaspec.core.bounded_json import MAX_BYTES, parse_json
from megaspec.core.regular_files import read_inside, write_beside
from megaspec.log.events import RunEnded

REMOTE_RUNS = "remote_runs.json"
SERVICE_FOLDERS = ("wandb", "mlflow", "trackio")
"""In the run folder: what services keep of it on this machine."""
_LIMIT = 1 << 20
# Sinks write the file from threads of their own.
_WRITING = threading.Lock()


@dataclass(frozen=True)
class LoggedRun:
    """A run as its folder tells."""

    name: str
    spec: dict[str, Any]
    """The whole Spec, plain data."""


def logged_run(run_dir: Path) -> LoggedRun:
    """Reads spec.json. OSError, ValueError: it can't be read."""
    spec = parse_json(read_inside(run_dir, "spec.json", limit=MAX_BYTES))
    return LoggedRun(name=spec["name"], spec=spec)


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted path -> value. A list is one value."""
    found: dict[str, Any] = {}
    for name, value in section.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


@dataclass(frozen=True)
class RemoteRun:
    """A run's ids at one place of a service."""

    id: str | None
    """None: it was never there."""
    parent: str | None
    """Of the run that this one was forked from, where that was at the same place."""


def remote_run(run_dir: Path, place: str) -> RemoteRun:
    """`place`: the service and where in it, such as `wandb:entity/project`. OSError, ValueError: damaged."""
    ids = _read(run_dir)
    return RemoteRun(ids["runs"].get(place), ids["parents"].get(place))


def note_remote_run(run_dir: Path, place: str, run_id: str) -> None:
    """Keeps the id of a run. OSError: it can't be written."""
    with _WRITING:
        ids = _read(run_dir)
        ids["runs"][place] = run_id
        _write(run_dir, ids)


def hand_down(source: Path, fork: Path) -> None:
    """Writes into a fork's folder by which ids services know the run that it is from, where there are any."""
    parents = _read(source)["runs"]
    if parents:
        _write(fork, {"runs": {}, "parents": parents})


def status_of(event: RunEnded) -> str:
    """finished, preempted (saved, and goes on when it is resumed) or failed."""
    return {"done": "finished", "Preempted": "preempted"}.get(event.how, "failed")


def _read(run_dir: Path) -> dict[str, dict[str, str]]:
    try:
        found = parse_json(read_inside(run_dir, REMOTE_RUNS, limit=_LIMIT))
    except FileNotFoundError:
        return {"runs": {}, "parents": {}}
    except ValueError as error:
        raise ValueError(f"{run_dir / REMOTE_RUNS} is damaged: {error}; delete it and services get new runs") from None
    ids: dict[str, dict[str, str]] = {}
    for kind in ("runs", "parents"):
        entries = found.get(kind) if isinstance(found, dict) else None
        if not isinstance(entries, dict) or not all(isinstance(value, str) for value in entries.values()):
            raise ValueError(f"{run_dir / REMOTE_RUNS} is damaged; delete it and services get new runs")
        ids[kind] = entries
    return ids


def _write(run_dir: Path, ids: dict[str, dict[str, str]]) -> None:
    path = run_dir / REMOTE_RUNS
    write_beside(path, [(json.dumps(ids, indent=1) + "\n").encode()]).replace(path)
