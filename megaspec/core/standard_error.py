"""What a process says on stderr costs it nothing: a job's output often lies on the disk that is full. Torch-free."""

import io
import sys

from megaspec.core.regular_files import DISK_ERRORS


class _Lossy(io.FileIO):
    """A file that takes all it is given; what a full or failing disk doesn't take is lost."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """-> bytes that are done with."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            return len(data)


def survive_full_disk() -> None:
    """From here on nothing fails in this process because its stderr lies on a disk that is full or fails: what it says
    there is lost, and its exit code stays that of what it does."""
    if sys.stderr is None:
        # it was closed by who started this process
        return
    sys.stderr.flush()
    buffered = io.BufferedWriter(_Lossy(sys.stderr.fileno(), "w", closefd=False))
    sys.stderr = io.TextIOWrapper(
        buffered, encoding=sys.stderr.encoding, errors="backslashreplace", line_buffering=True
    )
