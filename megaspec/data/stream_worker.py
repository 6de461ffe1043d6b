"""One worker of a stream: takes samples of lanes. Started as `python -m megaspec.data.stream_worker`.

Standard input: one JSON line {"spec": StreamSpec, "seed": n, "shuffled": b}, then one line per sample that is wanted:
{"lane": l, "sample": n}, with "place": [...], one at or before it, for a lane that is not on its way there. It answers
in that order, in the form of `SampleFrame`, and ends with its standard input.
"""

import json
import signal
import struct
import sys
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from megaspec.core.errors import DataError
from megaspec.data.lifeline import end_with_parent
from megaspec.data.spec import StreamSpec
from megaspec.data.stream_lane import Lane, Packed, StreamOrder

# lane, sample; before an error -1 and the bytes of its text
_HEAD = struct.Struct("<qq")


@dataclass(frozen=True)
class SampleFrame:
    """A sample on its way: its lane and number, the lane's place after it (int64), tokens, documents (int32)."""

    lane: int
    sample: int
    packed: Packed
    place: np.ndarray

    def write(self, out: BinaryIO) -> None:
        """Sends it."""
        out.write(_HEAD.pack(self.lane, self.sample))
        out.write(self.place.tobytes())
        out.write(self.packed.tokens.astype("<i4").tobytes())
        out.write(self.packed.documents.astype("<i4").tobytes())
        out.flush()


def read_frame(file: BinaryIO, *, n_columns: int, n_tokens: int) -> SampleFrame | None:
    """The next sample, None at the end of a file that a worker has left. Raises DataError that the worker met."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    lane, sample = _HEAD.unpack(head)
    if lane < 0:
        raise DataError(file.read(sample).decode("utf-8", errors="replace"))
    body = file.read(8 * n_columns + 4 * n_tokens + 4 * n_tokens)
    if len(body) < 8 * (n_columns + n_tokens):
        return None
    place = np.frombuffer(body, dtype="<i8", count=n_columns)
    tokens = np.frombuffer(body, dtype="<i4", count=n_tokens, offset=8 * n_columns)
    documents = np.frombuffer(body, dtype="<i4", count=n_tokens, offset=8 * n_columns + 4 * n_tokens)
    return SampleFrame(lane, sample, Packed(tokens, documents), place)


class Lanes:
    """Lanes that samples are taken of, each opened when it is first wanted."""

    def __init__(self, order: StreamOrder):
        self._order = order
        self._lanes: dict[int, Lane] = {}

    def sample(self, lane: int, sample: int, begin: np.ndarray | None) -> SampleFrame:
        """A sample of a lane. begin: a place at or before it, for a lane that is not opened or is behind it.

        Raises DataError.
        """
        found = self._lanes.get(lane)
        if found is None or found.sample > sample:
            assert begin is not None, f"sample {sample} of lane {lane} without a place to begin at"
            found = Lane(self._order, lane, begin)
            self._lanes[lane] = found
        # those before it are other ranks', or were read before
        while found.sample < sample:
            found.take()
        return SampleFrame(lane, sample, found.take(), found.place())


def main() -> int:
    """Serve samples until standard input ends."""
    end_with_parent(sys.argv)
    # Both reach the whole group. The rank decides what happens, and goes on reading until it has saved.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    out = sys.stdout.buffer
    try:
        settings = json.loads(sys.stdin.readline())
        spec = StreamSpec.model_validate_json(json.dumps(settings["spec"]))
        lanes = Lanes(StreamOrder(spec, seed=settings["seed"], shuffled=settings["shuffled"]))
        for line in sys.stdin:
            wanted = json.loads(line)
            place = None
            if "place" in wanted:
                place = np.array(wanted["place"], dtype=np.int64)
            lanes.sample(wanted["lane"], wanted["sample"], place).write(out)
    except DataError as error:
        text = str(error).encode("utf-8", errors="replace")
        out.write(_HEAD.pack(-1, len(text)) + text)
        out.flush()
        return error.exit_code
    except BrokenPipeError:
        return 0  # the rank has ended
    return 0


if __name__ == "__main__":
    sys.exit(main())
