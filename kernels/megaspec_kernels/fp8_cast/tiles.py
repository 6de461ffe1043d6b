"""Tiles of kernels that write fp8, and those of the casts in triton.py, from which a benchmark chooses."""

from typing import Literal, NamedTuple

from megaspec.core.divisors import ceil_div


class Tile(NamedTuple):
    """What a program writes in both layouts. Powers of two up to 128."""

    rows: int
    columns: int
    warps: int
    registers: int
    """Of a thread at most: left alone the compiler may take more, and fewer programs fit beside each other."""
    below: int
    """See grid_of_tiles."""
    policy: Literal["", "evict_first"] = ""
    """What caches are told about what is read. evict_first: it is read once, and what is written is kept instead."""


# Along the second and the third axis of a grid (CUDA programming guide, "Compute Capabilities"): in tiles of 64x64,
# eight below each other, 4 million columns and 33 million rows.
MOST_PROGRAMS = 65535


def grid_of_tiles(down: int, across: int, below: int) -> tuple[int, int, int]:
    """Programs for so many tiles down a matrix and across it.

    Those next to each other take `below` tiles below each other, then the ones beside those: what they write in rows
    and what they write in columns is near in memory. Where `below` does not divide the tiles down, the last programs
    have none. The grid has three axes, so that a program knows its tile without a division: the first read of memory
    would wait for it.
    """
    grid = (below, across, ceil_div(down, below))
    assert max(grid[1:]) <= MOST_PROGRAMS, f"a grid of {grid}: CUDA's y and z axes end at {MOST_PROGRAMS}"
    return grid


# None of these spills in a cast (Triton 3.6, sm90).
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


def best_of_gathered(P: int) -> Tile:
    """Of a cast that gathers its rows, P with padding: it goes down all of them before it goes across, so that caches
    hold a strip of the tokens, which are read once for each expert that takes them. 75 us in place of 94 (one H200, 8
    k tokens of 2,880 features, four experts to a token)."""
    tile = TILES["128x64"]
    return tile._replace(below=ceil_div(P, tile.rows))


# Of the kernel that finds the largest elements of whole lines.
TILES_OF_LARGEST = {
    "128x64": Tile(128, 64, 4, 48, 8),
    "64x128": Tile(64, 128, 4, 80, 8),
    "128x128": Tile(128, 128, 4, 48, 8),
    "128x128, 8 warps": Tile(128, 128, 8, 48, 8),
}


def best_of_largest(K: int) -> Tile:
    """Of rows of so many elements. Where they are few, caches hold a part of the matrix (H200)."""
    if K <= 8192:
        return TILES_OF_LARGEST["128x64"]
    return TILES_OF_LARGEST["64x128"]


# Of the kernel that casts by scales of whole lines.
TILES_OF_LINES = {
    "64x128": Tile(64, 128, 4, 96, 8),
    "64x128, 8 warps": Tile(64, 128, 8, 48, 8),
    "64x64": Tile(64, 64, 4, 64, 8),
    "128x128": Tile(128, 128, 8, 80, 8),
}
BEST_OF_LINES = TILES_OF_LINES["64x128"]

# Of the one that finds scales of short lines in both directions too. None of these spills (Triton 3.6, sm90).
TILES_OF_SHORT_LINES = {
    "8 warps": Tile(128, 128, 8, 80, 8),
    "4 warps": Tile(128, 128, 4, 168, 8),
}
BEST_OF_SHORT_LINES = TILES_OF_SHORT_LINES["8 warps"]

# Of the one that finds the largest elements of each group's columns.
TILES_OF_GROUP_COLUMNS = {
    "64x128": Tile(64, 128, 4, 64, 8),
    "128x64": Tile(128, 64, 4, 64, 8),
    "128x128": Tile(128, 128, 8, 64, 8),
    "128x128, 4 warps": Tile(128, 128, 4, 112, 8),
}
BEST_OF_GROUP_COLUMNS = TILES_OF_GROUP_COLUMNS["128x64"]
