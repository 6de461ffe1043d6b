"""Which checkpoint a folder holds: that of one iteration, or the last one of a training. Torch-free."""

import re
from pathlib import Path

from megaspec.core.errors import CheckpointError
from megaspec.core.problems import show
from megaspec.core.regular_files import read_inside
from megaspec.megatron.dist_checkpoint import METADATA, open_dist
from megaspec.megatron.legacy_checkpoint import open_legacy
from megaspec.megatron.opened import OpenedCheckpoint
from megaspec.megatron.rank_files import RankFiles

LATEST = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d{7,12})")
_RELEASE = "release"
_MOST_BYTES = 64


def checkpoint_folder(path: Path) -> tuple[Path, int | None]:
    """The folder of one checkpoint, and its iteration where the name says it.

    `path`: it, or the folder that a training saves to (--save). CheckpointError: latest_checkpointed_iteration.txt
    names what is not there, or nothing.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder; name what --save names, or one of its iter_ folders")
    if not (path / LATEST).exists():
        match = _ITERATION.fullmatch(path.resolve().name)
        return path, int(match[1]) if match else None
    try:
        text = read_inside(path, LATEST, limit=_MOST_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise CheckpointError(f"{path / LATEST}: {error.strerror}") from None
    if text == _RELEASE:
        name = _RELEASE
        iteration = None
    elif re.fullmatch(r"\d{1,12}", text):
        iteration = int(text)
        name = f"iter_{iteration:07d}"
    else:
        raise CheckpointError(f"{path / LATEST} says {show(text)!r}, expected the number of an iteration, or release")
    folder = path / name
    if folder.is_symlink():
        raise CheckpointError(f"{folder} is a link, and links are not followed here; name the folder itself")
    if not folder.is_dir():
        there = sorted(one.name for one in path.iterdir() if _ITERATION.fullmatch(one.name))
        way_out = f"name one of them, {', '.join(there[-3:])}" if there else "there is no other"
        raise CheckpointError(f"{path / LATEST} says {show(text)}, and {name} is missing; {way_out}")
    return folder, iteration


def open_checkpoint(files: RankFiles, iteration: int | None) -> OpenedCheckpoint:
    """Of either format. CheckpointError: all that is wrong with it."""
    if (files.path / METADATA).is_symlink() or (files.path / METADATA).exists():
        return open_dist(files, iteration)
    return open_legacy(files, iteration)
