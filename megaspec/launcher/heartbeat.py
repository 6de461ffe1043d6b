"""heartbeat.json in a run folder: that a run is alive, and where it is, for probes of schedulers and for a supervisor.

    {"format": 1, "time": 1764079200.5, "every_seconds": 5.0, "state": "training", "step": 40, "steps": 100,
     "loss": 2.31, "progress_time": 1764079199.9, "attempt": 0, "world_size": 2, "by": "launcher", "host": "node1",
     "pid": 4711, "ranks": [{"rank": 0, "pid": 4713, "state": "running"}, {"rank": 1, "pid": 4714, "state": "frozen"}]}

Who writes it is not one of those who can hang: the launcher, or, where somebody else started the ranks, a thread of
rank 0 beside the training. It is replaced as a whole every `every_seconds`, so a reader never sees half of it. A file
that is older than MISSED times that is of a writer that is dead or frozen; one that is fresh while `progress_time`
stands still is of a run that hangs. On a full disk the last one stays, and is touched: its writer lives. Torch-free.
"""

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megaspec.core.regular_files import open_inside, read_inside

HEARTBEAT = "heartbeat.json"
FORMAT = 1
EVERY_SECONDS = 5.0
MISSED = 6
"""So many heartbeats that did not come say that the writer is dead or frozen: 30 s."""
STATES = ("starting", "training", "evaluating", "saving", "stopping", "hung", "done", "preempted", "failed")
"""`stopping`: asked to save and end. The last three are ends, and the file is not written again."""
ENDS = ("done", "preempted", "failed")
_LIMIT = 1 << 22


@dataclass(frozen=True)
class RankBeat:
    """A rank as who watches it sees it."""

    rank: int
    pid: int
    state: str
    """running; frozen: its side thread has not moved for seconds, or the kernel says that it was stopped; ended."""


@dataclass(frozen=True)
class Heartbeat:
    """What the file holds. Times are seconds since 1970 by the clock of the machine that writes."""

    state: str
    """One of STATES."""
    step: int = 0
    """Optimizer steps that are done."""
    steps: int = 0
    """Of the whole run; 0 until it is known."""
    loss: float | None = None
    """Of the newest step whose numbers were read; None before, or where it is not finite."""
    progress_time: float = 0.0
    """When a rank last got on: in a unit of the model, a step, a save."""
    attempt: int = 0
    world_size: int = 1
    by: str = "launcher"
    """launcher, or `rank 0`."""
    ranks: list[RankBeat] = field(default_factory=list)
    """Those that the writer sees: all of the launcher's machine."""
    format: int = FORMAT
    time: float = field(default_factory=time.time)
    every_seconds: float = EVERY_SECONDS
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)

    def is_missed(self, *, now: float | None = None) -> bool:
        """Whether the next ones should have come long ago: its writer is dead or frozen."""
        if self.state in ENDS:
            return False
        if now is None:
            now = time.time()
        return now - self.time > MISSED * self.every_seconds


def state_in_words(where: str) -> str:
    """What a rank does, from where it says that it is."""
    if where.endswith("saving"):
        return "saving"
    if "evaluation" in where:
        return "evaluating"
    return "training"


def write_heartbeat(run_dir: Path, beat: Heartbeat) -> None:
    """Replaces the file as a whole, or touches it where there is no room. A folder that can't be written costs the
    heartbeat, never the run."""
    name = f".{HEARTBEAT}.{os.getpid()}.tmp"
    try:
        with suppress(FileNotFoundError):
            os.unlink(run_dir / name)
        with open(open_inside(run_dir, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
            file.write(json.dumps(asdict(beat), allow_nan=False) + "\n")
        os.replace(run_dir / name, run_dir / HEARTBEAT)
    except OSError:
        # what is wrong with the disk is said where something is lost by it
        with suppress(OSError):
            os.unlink(run_dir / name)
        # a new time needs no room: nobody takes a run on a full disk for one that is frozen
        with suppress(OSError):
            os.utime(run_dir / HEARTBEAT, (beat.time, beat.time), follow_symlinks=False)


def read_heartbeat(run_dir: Path) -> Heartbeat | None:
    """The newest; None where there is none, or one that is not of this format. Its `time` is that of the file where
    that is later, as it is on a full disk."""
    try:
        touched = os.stat(run_dir / HEARTBEAT, follow_symlinks=False).st_mtime
        raw = json.loads(read_inside(run_dir, HEARTBEAT, limit=_LIMIT))
    except (OSError, ValueError, RecursionError):
        return None
    beat = _heartbeat_of(raw)
    if beat is None:
        return None
    return replace(beat, time=max(beat.time, touched))


_KINDS: dict[str, tuple[type, ...]] = {
    "state": (str,),
    "step": (int,),
    "steps": (int,),
    "loss": (float, int, type(None)),
    "progress_time": (float, int),
    "attempt": (int,),
    "world_size": (int,),
    "by": (str,),
    "ranks": (list,),
    "format": (int,),
    "time": (float, int),
    "every_seconds": (float, int),
    "host": (str,),
    "pid": (int,),
}


def _heartbeat_of(raw: Any) -> Heartbeat | None:
    if type(raw) is not dict or raw.keys() != _KINDS.keys() or raw["format"] != FORMAT:
        return None
    if any(type(raw[name]) not in kinds for name, kinds in _KINDS.items()) or raw["state"] not in STATES:
        return None
    ranks = []
    for one in raw["ranks"]:
        if type(one) is not dict or one.keys() != {"rank", "pid", "state"}:
            return None
        ranks.append(RankBeat(one["rank"], one["pid"], one["state"]))
    return Heartbeat(**{**raw, "ranks": ranks})
