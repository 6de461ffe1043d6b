"""Files of a Hugging Face folder: regular ones, and the links of the hub's cache. Torch-free.

The cache keeps each file once, under its hash, and a snapshot of a model is a folder of links to them:

    models--ORG--NAME/blobs/HASH
    models--ORG--NAME/snapshots/COMMIT/config.json -> ../../blobs/HASH

Such a link is followed, to a regular file in `blobs` of the same model. Any other one is refused: a folder that
somebody else has filled would have us read what lies elsewhere.
"""

import errno
import os
import re
from pathlib import Path

from megaspec.checkpoint.files import open_regular, read_failure, read_limited_fd, safe_join
from megaspec.core.errors import CheckpointError

_SNAPSHOTS = "snapshots"
_BLOBS = "../../blobs"
_LINK = re.compile(re.escape(_BLOBS) + r"/([A-Za-z0-9_-][A-Za-z0-9._-]{0,254})")


def open_file(path: Path, folder_fd: int, name: str) -> int:
    """A descriptor of the file `name` in a folder that is opened; `path`: the folder's own, without links.

    CheckpointError: it is missing, another kind, or a link that is none of the hub's cache.
    """
    target = _target(path, folder_fd, name)
    if target is None:
        return open_regular(path, folder_fd, name)
    blob = _LINK.fullmatch(target)
    if blob is None or path.parent.name != _SNAPSHOTS:
        expected = f"{_SNAPSHOTS}/COMMIT/{name} -> {_BLOBS}/HASH"
        text = f"{path / name} is a link to {target!r}; only links of the hub's cache are followed, {expected}"
        raise CheckpointError(f"{text}; copy the folder with cp -rL")
    # from the opened folder on, whatever its path names by now
    blobs = path.parent.parent / "blobs"
    try:
        blobs_fd = os.open(_BLOBS, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
    except OSError as error:
        raise read_failure(blobs, error) from None
    try:
        return open_regular(blobs, blobs_fd, blob[1])
    finally:
        os.close(blobs_fd)


def read_file(path: Path, folder_fd: int, name: str, *, limit: int) -> bytes:
    """A whole small file. CheckpointError: as open_file; more than `limit` bytes."""
    return read_limited_fd(open_file(path, folder_fd, name), path / name, limit=limit)


def _target(path: Path, folder_fd: int, name: str) -> str | None:
    """Where a link leads, in its own words; None: it is none."""
    safe_join(path, name)
    try:
        return os.readlink(name, dir_fd=folder_fd)
    except OSError as error:
        # what is wrong otherwise is told when it is opened
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise read_failure(path / name, error) from None
