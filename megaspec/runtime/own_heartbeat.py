"""heartbeat.json of a run whose ranks somebody else started: a thread of rank 0 writes it, beside the training."""

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megaspec.core.errors import Preempted
from megaspec.launcher.heartbeat import EVERY_SECONDS, Heartbeat, state_in_words, write_heartbeat
from megaspec.launcher.stop import stop_requested
from megaspec.runtime.position import Position


class OwnHeartbeat:
    """While entered the file is kept up to date. `is_ours`: whether the run's folder is still this job's."""

    def __init__(
        self, run_dir: Path, position: Position, *, attempt: int, world_size: int, is_ours: Callable[[], bool]
    ):
        self._run_dir = run_dir
        self._position = position
        self._attempt = attempt
        self._world_size = world_size
        self._is_ours = is_ours
        self._progress_time = time.time()
        self._count = -1
        self._done = threading.Event()
        # a daemon: a folder on a network that hangs must not keep the process
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> "OwnHeartbeat":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._done.set()
        self._thread.join(timeout=EVERY_SECONDS)
        state = "done"
        if kind is not None:
            state = "preempted" if issubclass(kind, Preempted) else "failed"
        self._write(state)

    def _run(self) -> None:
        while True:
            where, count = self._position.reached()
            if count != self._count:
                self._count = count
                self._progress_time = time.time()
            state = state_in_words(where)
            if stop_requested():
                state = "stopping"
            elif not self._position.step:
                state = "starting"
            self._write(state)
            if self._done.wait(EVERY_SECONDS):
                return

    def _write(self, state: str) -> None:
        if not self._is_ours():
            return
        newest = self._position.newest
        loss = newest.loss if math.isfinite(newest.loss) else None
        beat = Heartbeat(
            state=state,
            step=newest.step,
            steps=newest.steps,
            loss=loss,
            progress_time=self._progress_time,
            attempt=self._attempt,
            world_size=self._world_size,
            by="rank 0",
        )
        write_heartbeat(self._run_dir, beat)
