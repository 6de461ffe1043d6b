"""Sizes of grids: ours are Triton's, at less of the host's time."""

import pytest

from megaspec.core.divisors import ceil_div
from megaspec_kernels.fp8_cast.tiles import grid_of_tiles
from megaspec_kernels.grid import next_power_of_2

triton = pytest.importorskip("triton")


def test_they_are_tritons():
    for size in range(1, 1030):
        assert next_power_of_2(size) == triton.next_power_of_2(size)
        for block in (1, 7, 64, 4096):
            assert ceil_div(size, block) == triton.cdiv(size, block)
    assert ceil_div(0, 64) == triton.cdiv(0, 64) == 0


def test_a_matrix_of_more_tiles_than_a_grid_holds_is_refused():
    assert grid_of_tiles(8 * 65535, 65535, 8) == (8, 65535, 65535)
    for down, across in ((1, 65536), (8 * 65535 + 1, 1)):
        with pytest.raises(AssertionError, match="65535"):
            grid_of_tiles(down, across, 8)
