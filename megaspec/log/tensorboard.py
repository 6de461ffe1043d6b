"""TensorBoard event files. Imported only where they are asked for: tensorboard is an optional package.

They are written here and not by torch's SummaryWriter: that writes in a thread of its own, which prints a traceback and
writes nothing more when a disk is full or fails for a moment.
"""

import os
import secrets
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event as Record
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar, text

from megaspec.core.regular_files import make_folder_inside, open_inside
from megaspec.log.events import Event, Sampled
from megaspec.log.scalars import scalars

_VERSION = "brain.Event:2"
# Of records that wait for room on the disk; those of a step have some 2,000 bytes.
MOST_WAITING_BYTES = 16 << 20


class TensorboardSink:
    """Scalars and samples in `folder`. `step`: where the run goes on; TensorBoard hides what came after it before.

    OSError when a record can't be written: it waits in memory, and is written before the next one as soon as it can be.
    Behind MOST_WAITING_BYTES of them, new ones are left out.
    """

    def __init__(self, folder: Path, *, step: int):
        make_folder_inside(folder.parent, folder.name)
        # TensorBoard reads the files of a folder in the order of their names; the last part can't be foreseen, so that
        # nobody can have put a link there
        seconds, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
        name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{secrets.token_hex(8)}"
        self._path = folder / name
        self._fd = open_inside(folder, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        self._waiting = _Waiting()
        self._records = RecordWriter(self._waiting)
        self._add(Record(file_version=_VERSION), step=step + 1)
        self._add(Record(session_log=SessionLog(status=SessionLog.START)), step=step + 1)

    def __call__(self, event: Event) -> None:
        for name, value in scalars(event).items():
            self._add(Record(summary=scalar(name, value)), step=event.step)
        if isinstance(event, Sampled):
            self._add(Record(summary=text("sample", event.prompt + event.text)), step=event.step)
        self._write()

    def close(self) -> None:
        """Writes what is left. OSError: it could not be, and is lost."""
        try:
            self._write()
        finally:
            os.close(self._fd)

    def _add(self, record: Record, *, step: int) -> None:
        if len(self._waiting.data) > MOST_WAITING_BYTES:
            return
        record.wall_time = time.time()
        record.step = step
        self._records.write(record.SerializeToString())

    def _write(self) -> None:
        data = self._waiting.data
        try:
            while data:
                # a part that was written stays, and the rest follows it whenever it can
                del data[: os.write(self._fd, data)]
        except OSError as error:
            why = f"{error.strerror}: TensorBoard's file {self._path} can't be written; metrics.jsonl has its curves"
            raise OSError(error.errno, why) from None


class _Waiting:
    """A file for RecordWriter that keeps what it is given in `data`."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> None:
        self.data += data
