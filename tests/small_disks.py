"""File systems of a few hundred kB, to be filled to the last byte."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FILLER = "filler"


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs of that size (`400k`) at a new folder; the test is skipped where none may be mounted."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"may not mount a tmpfs here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path, *, but: int = 0) -> None:
    """Takes all the room of a small disk, but so many bytes."""
    empty(disk)
    found = os.statvfs(disk)
    (disk / FILLER).write_bytes(b"\0" * (found.f_bavail * found.f_frsize - but))


def empty(disk: Path) -> None:
    """Gives back what `fill` has taken."""
    (disk / FILLER).unlink(missing_ok=True)
