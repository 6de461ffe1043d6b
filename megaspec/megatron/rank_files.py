"""Files of a checkpoint's folder, opened when they are read from, a limited number at once. Torch-free."""

import os
from collections import OrderedDict
from pathlib import Path

from megaspec.checkpoint.files import open_folder, open_regular, pread_into, read_failure
from megaspec.core.errors import CheckpointError

_MOST_OPEN = 64


class RankFiles:
    """The regular files of a folder and of the folders in it. Links below the folder are not followed.

    Close it, or use it as a context.
    """

    def __init__(self, path: Path):
        """CheckpointError: `path` is no folder. It may itself be a link, which the user names."""
        if not path.is_dir():
            raise CheckpointError(f"{path} is no folder; name a checkpoint of Megatron-LM's")
        self.path = path.resolve()
        self._open: OrderedDict[str, int] = OrderedDict()

    def __enter__(self) -> "RankFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all files."""
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def size(self, name: str) -> int:
        """In bytes. CheckpointError: it is missing, or no regular file."""
        return os.fstat(self._fd(name)).st_size

    def read(self, name: str, offset: int, count: int) -> bytearray:
        """CheckpointError: there are fewer bytes."""
        content = bytearray(count)
        self.read_into(name, offset, memoryview(content))
        return content

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Fills `view`. CheckpointError: there are fewer bytes."""
        try:
            done = pread_into(self._fd(name), view, offset)
        except OSError as error:
            raise read_failure(self.path / name, error) from None
        if done < len(view):
            end = offset + len(view)
            raise CheckpointError(f"{self.path / name}: it ends at byte {offset + done:,}, expected {end:,}: it is cut")

    def _fd(self, name: str) -> int:
        """Of a file by its name in the folder, `mp_rank_00/model_optim_rng.pt` or plain."""
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        *above, last = name.split("/")
        folder = self.path.joinpath(*above)
        folder_fd = _open_below(self.path, above)
        try:
            fd = open_regular(folder, folder_fd, last)
        finally:
            os.close(folder_fd)
        self._open[name] = fd
        if len(self._open) > _MOST_OPEN:
            _, oldest = self._open.popitem(last=False)
            os.close(oldest)
        return fd


def _open_below(path: Path, above: list[str]) -> int:
    """A descriptor of a folder, reached without following a link."""
    at = open_folder(path)
    for part in above:
        try:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        except OSError as error:
            raise read_failure(path / part, error) from None
        finally:
            os.close(at)
        at = inner
    return at
