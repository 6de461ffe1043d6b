"""Tiles of the gates that write fp8, from which a benchmark chooses."""

from megaspec_kernels.fp8_cast.tiles import Tile

# Of each column that is written as many bytes as rows, of each row as many as columns.
TILES = {
    "64x64": Tile(rows=64, columns=64, warps=8, registers=64, below=8),
    "64x64, 4 warps": Tile(rows=64, columns=64, warps=4, registers=128, below=8),
    "128x64": Tile(rows=128, columns=64, warps=8, registers=64, below=8),
    "128x64, 128 registers": Tile(rows=128, columns=64, warps=8, registers=128, below=8),
    "128x64, 4 warps": Tile(rows=128, columns=64, warps=4, registers=128, below=8),
    "64x128": Tile(rows=64, columns=128, warps=8, registers=64, below=4),
    "32x128": Tile(rows=32, columns=128, warps=4, registers=128, below=8),
}
# How many programs fit beside each other decides (Triton 3.6, sm90): 64x128 without a limit takes 177 registers for the
# gradients and moves 2.5 TB/s, 64x64 moves 3.8. Of silu none of these spills more than 8 bytes.
FORWARD_TILE = TILES["64x64"]
BACKWARD_TILE = TILES["64x64"]
WEIGHTED_FORWARD_TILE = TILES["128x64"]
WEIGHTED_BACKWARD_TILE = TILES["64x64"]
