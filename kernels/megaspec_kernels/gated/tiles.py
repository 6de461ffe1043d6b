"""Tiles of the kernels in triton_weighted.py that write fp8, from which a benchmark chooses."""

from typing import NamedTuple


class Tile(NamedTuple):
    """Of a kernel that writes fp8: of each column it writes as many bytes as rows."""

    rows: int
    features: int
    warps: int


# From which a benchmark chooses. Of a plain gate none of these spills (Triton 3.7, sm90).
TILES = {
    "128x64": Tile(rows=128, features=64, warps=8),
    "128x64, 4 warps": Tile(rows=128, features=64, warps=4),
    "64x128": Tile(rows=64, features=128, warps=8),
    "64x64": Tile(rows=64, features=64, warps=8),
}
# Both take 64 registers, so that four programs fit on a multiprocessor; the larger tiles' gradients take up to 206.
FORWARD_TILE = TILES["128x64"]
BACKWARD_TILE = TILES["64x64"]
