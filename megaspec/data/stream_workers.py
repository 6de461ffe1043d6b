"""The workers of a stream as a rank sees them: asked ahead, listened to, and never waited for in vain."""

import json
import signal
import threading
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaspec.core.errors import DataError, MegaspecError
from megaspec.data.spec import StreamSpec
from megaspec.data.stream_worker import SampleFrame, read_frame
from megaspec.data.workers import WorkerDied, start_worker

# Samples of each lane that a worker makes before they are asked for: of a batch that takes one of each lane, two steps.
_AHEAD = 2


@dataclass
class _LaneAhead:
    """What was asked of a lane."""

    next: int
    """Number of the sample behind the last that was taken."""
    asked: int
    """Number behind the last that was asked for; those from `next` on have arrived or are on their way."""


class StreamWorker:
    """A process of stream_worker.py, and a thread that takes what it sends."""

    def __init__(self, spec: StreamSpec, *, seed: int, shuffled: bool, n_columns: int):
        self._n_columns = n_columns
        self._n_tokens = spec.seq_len + 1
        self._process = start_worker("megaspec.data.stream_worker")
        self._lanes: dict[int, _LaneAhead] = {}
        self._arrived: dict[int, dict[int, SampleFrame]] = defaultdict(dict)
        self._ended: MegaspecError | None = None
        self._changed = threading.Condition()
        self._send({"spec": spec.model_dump(mode="json"), "seed": seed, "shuffled": shuffled})
        # a thread of its own: a worker that waits for its reader could not read what it is asked
        self._thread = threading.Thread(target=self._listen, name="stream worker", daemon=True)
        self._thread.start()

    def take(self, lane: int, sample: int, begin: np.ndarray) -> SampleFrame:
        """A sample. begin: a place at or before it, for a lane that is not on its way there. DataError, WorkerDied."""
        self._ask(lane, sample, begin)
        arrived = self._arrived[lane]
        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None or sample in arrived)
            if sample not in arrived:
                raise self._ended
            found = arrived[sample]
            # samples that were passed over are another rank's
            for number in [one for one in arrived if one <= sample]:
                del arrived[number]
        return found

    def _ask(self, lane: int, sample: int, begin: np.ndarray) -> None:
        """Asks for a sample, unless it is on its way, and for those behind it."""
        ahead = self._lanes.get(lane)
        if ahead is None or sample < ahead.next:
            self._send({"lane": lane, "sample": sample, "place": begin.tolist()})
            ahead = _LaneAhead(next=sample, asked=sample + 1)
            self._lanes[lane] = ahead
        for number in range(max(ahead.asked, sample), sample + _AHEAD + 1):
            self._send({"lane": lane, "sample": number})
            ahead.asked = number + 1
        ahead.next = sample + 1

    def close(self) -> None:
        """Ends the process, and whoever waits for it."""
        with self._changed:
            self._ended = self._ended or WorkerDied("the stream was closed")
            self._changed.notify_all()
        self._process.kill()
        self._thread.join()
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _send(self, value: dict[str, Any]) -> None:
        # a worker that is gone is noticed where its samples end
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        ended: MegaspecError
        try:
            while True:
                frame = read_frame(self._process.stdout, n_columns=self._n_columns, n_tokens=self._n_tokens)
                if frame is None:
                    break
                with self._changed:
                    self._arrived[frame.lane][frame.sample] = frame
                    self._changed.notify_all()
            ended = self._death()
        except DataError as error:
            ended = error
        with self._changed:
            self._ended = self._ended or ended
            self._changed.notify_all()

    def _death(self) -> WorkerDied:
        code = self._process.wait()
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        hint = ""
        if code == -signal.SIGKILL:
            hint = "; when memory is short, set fewer data.workers, data.lanes or a smaller data.window"
        text = f"data.workers: the worker with pid {self._process.pid} {how}{hint}"
        return WorkerDied(f"{text}; resume the run, it goes on with the same samples")
