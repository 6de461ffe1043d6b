"""Tiles of the casts in triton.py and in cuda.cu, from which a benchmark chooses."""

from typing import Literal, NamedTuple


class Tile(NamedTuple):
    """What a program of pairs_kernel casts. Powers of two up to 128."""

    rows: int
    columns: int
    warps: int
    registers: int
    """Of a thread at most: left alone the compiler may take more, and fewer programs fit beside each other. None of
    these spills (Triton 3.6, sm90)."""
    group: int
    """Tiles below each other that programs next to each other take: what they write in columns is near in memory."""
    policy: Literal["", "evict_first"] = ""
    """What caches are told about what is read. evict_first: it is read once, and what is written is kept instead."""


TILES = {
    "128x128": Tile(128, 128, 8, 64, 8),
    "128x128, 4 warps": Tile(128, 128, 4, 112, 8),
    "64x128": Tile(64, 128, 4, 64, 8),
    "128x64": Tile(128, 64, 4, 72, 8),
    "64x64": Tile(64, 64, 4, 64, 8),
    "128x128, no groups": Tile(128, 128, 8, 64, 1),
    "128x128, read once": Tile(128, 128, 8, 64, 8, "evict_first"),
    "64x128, 8 warps": Tile(64, 128, 8, 48, 16, "evict_first"),
    "128x64, 8 warps": Tile(128, 64, 8, 48, 16, "evict_first"),
}
BEST = TILES["128x128"]


class CudaTile(NamedTuple):
    """What a block of cuda.cu casts, see its notes. Rows and columns: multiples of 64 up to 128."""

    rows: int
    columns: int
    threads: int
    blocks: int
    """That a multiprocessor shall hold: the fewer, the more registers a thread has, and the earlier all of its loads
    are on their way. None of these spills (CUDA 13.0, sm_90a)."""
    steps: int
    """Tiles below each other that a block takes, each of them loaded while the one before is turned round."""
    group: int
    """Blocks below each other that are started one after the other."""
    across: int = 64
    """Columns that a warp takes beside each other: 64 or 128."""


CUDA_TILES = {
    "128x64": CudaTile(128, 64, 256, 5, 1, 8),
    "64x128": CudaTile(64, 128, 256, 5, 1, 8),
    "64x64": CudaTile(64, 64, 128, 12, 1, 8),
    "128x128": CudaTile(128, 128, 256, 4, 1, 8),
    "128x128, 512 threads": CudaTile(128, 128, 512, 2, 1, 8),
    "128x128, warps across": CudaTile(128, 128, 256, 4, 1, 8, 128),
    "64x128, warps across": CudaTile(64, 128, 256, 5, 1, 8, 128),
    "64x128, warps across, groups of 32": CudaTile(64, 128, 256, 5, 1, 32, 128),
    "128x64, 128 threads": CudaTile(128, 64, 128, 8, 1, 8),
    "128x64, no groups": CudaTile(128, 64, 256, 5, 1, 1),
    "128x64, groups of 16": CudaTile(128, 64, 256, 5, 1, 16),
    "128x64, groups of 64": CudaTile(128, 64, 256, 5, 1, 64),
    "128x64, 4 steps": CudaTile(128, 64, 256, 4, 4, 2),
    "128x128, 2 steps": CudaTile(128, 128, 256, 3, 2, 4),
}
# Whole lines of memory in all that is read and written; to be chosen by what a GPU measures.
CUDA_BEST = CUDA_TILES["128x128, warps across"]
