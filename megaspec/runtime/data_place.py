"""Where a stream of text stands, in checkpoints: of all ranks the one place from which any layout goes on.

data/place    int64 [lanes, columns] (megaspec/data/stream_lane.py), written by rank 0
"""

import numpy as np
import torch
import torch.distributed as dist

from megaspec.checkpoint.reader import Reader
from megaspec.checkpoint.store import SavedPiece
from megaspec.core import counted
from megaspec.core.errors import CheckpointError

PLACE = "data/place"


def place_of_all(place: np.ndarray, *, device: torch.device) -> torch.Tensor:
    """int64 [lanes, columns] on the CPU: of each lane the place of the rank that has read furthest in it. Collective.

    No rank is beyond the step that they have all ended, so from there every sample that follows is found.
    """
    rows = torch.from_numpy(place).to(device)
    if not dist.is_initialized():
        return rows
    furthest = rows[:, 0].clone()
    counted.all_reduce(furthest, op=dist.ReduceOp.MAX)
    # ranks that have read as far are at the same place; the others give nothing
    rows[rows[:, 0] < furthest] = 0
    counted.all_reduce(rows, op=dist.ReduceOp.MAX)
    return rows.cpu()


def place_piece(place: torch.Tensor) -> SavedPiece:
    """What is written of it."""
    return SavedPiece(PLACE, tuple(place.shape), (0, 0), place)


def read_place(reader: Reader) -> np.ndarray | None:
    """The place of a checkpoint; None where its data was no stream. Raises CheckpointError for what is none."""
    if PLACE not in reader:
        return None
    place = reader.read(PLACE)
    if place.dtype != torch.int64 or place.dim() != 2:
        raise CheckpointError(
            f"{reader.path}: {PLACE} is {place.dtype} {list(place.shape)}, expected int64 of two dims"
        )
    return place.numpy()
