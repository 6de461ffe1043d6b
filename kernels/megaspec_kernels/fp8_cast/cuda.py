"""The cast to fp8 in CUDA C++ for Hopper: cuda.cu, compiled at its first use (megaspec_kernels/nvcc.py).

It is called where Triton's is, inside of operations that torch.compile leaves whole (megaspec/nn/fp8.py), so it is a
plain function and no operation of its own: that would cost the host more than starting the kernel does.
"""

# M rows, K columns of a matrix; m, k blocks along them

import ctypes
from ctypes import c_int, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from megaspec_kernels.fp8_cast.formats import Block
from megaspec_kernels.fp8_cast.tiles import CUDA_BEST, CudaTile
from megaspec_kernels.nvcc import Source, built

KEY = "kernels.fp8_cast=cuda"
WAY_OUT = "set kernels.fp8_cast=triton"

# What cuda.cu calls them.
_FORMATS = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1}
_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_OF_TILES = 0
_OF_ROWS = 1
_OF_COLUMNS = 2
_OF_ANYTHING = 3
# What the sides of a matrix are multiples of where it is cast in tiles: 16 bytes of fp8.
UNIT = 16
# Rows and columns of a block whose scale a tile shares.
LINE = 128
# Offsets within a tile are counted in 32 bits, and a grid has 65,535 tiles across.
LARGEST_SIDE = 1 << 21


class _Cast(ctypes.Structure):
    """The arguments of a call, as cuda.cu has them."""

    _fields_ = (
        ("x", c_void_p),
        ("scale", c_void_p),
        ("rows", c_void_p),
        ("columns", c_void_p),
        ("seen", c_void_p),
        ("saturated", c_void_p),
        ("scale_copy", c_void_p),
        ("M", c_int),
        ("K", c_int),
        ("scale_columns", c_int),
        ("block_rows", c_int),
        ("block_columns", c_int),
    )


def source(tile: CudaTile = CUDA_BEST) -> Source:
    """What is compiled for a tile."""
    defines = tuple((f"TILE_{name.upper()}", value) for name, value in tile._asdict().items())
    return Source(Path(__file__).parent / "cuda.cu", defines)


@cache
def library(tile: CudaTile = CUDA_BEST) -> ctypes.CDLL:
    """The library of a tile. RecipeError: there is no nvcc to compile it."""
    return opened(built(source(tile), key=KEY, way_out=WAY_OUT))


def opened(path: Path) -> ctypes.CDLL:
    """With the types of its functions."""
    found = ctypes.CDLL(str(path))
    # the arguments, element, format, scales, device, stream
    found.megaspec_fp8_cast.argtypes = [ctypes.POINTER(_Cast), c_int, c_int, c_int, c_int, c_void_p]
    found.megaspec_fp8_cast.restype = c_int
    found.megaspec_cuda_error.argtypes = [c_int]
    found.megaspec_cuda_error.restype = ctypes.c_char_p
    return found


def queue_of(x: Tensor) -> tuple[int, int]:
    """The device and the stream on which a kernel is started."""
    current = torch.cuda.current_device()
    assert x.device == torch.device("cuda", current), f"a matrix on {x.device}, the current device is cuda:{current}"
    return current, torch.cuda.current_stream().cuda_stream


def cast(
    x_MK: Tensor,
    scale_mk: Tensor,
    *,
    block: Block,
    dtype: torch.dtype,
    rows: bool = True,
    columns: bool = False,
    seen: Tensor | None = None,
    saturated: Tensor | None = None,
    scale_copy: Tensor | None = None,
    tile: CudaTile = CUDA_BEST,
) -> tuple[Tensor | None, Tensor | None]:
    """See reference.py."""
    assert x_MK.dtype in _ELEMENTS, f"the kernel computes in fp32, the matrix is in {x_MK.dtype}"
    assert scale_mk.dtype == torch.float32, f"scales in {scale_mk.dtype}"
    M, K = x_MK.shape
    by_rows = x_MK.new_empty(M, K, dtype=dtype) if rows else None
    by_columns = x_MK.new_empty(K, M, dtype=dtype) if columns else None
    if x_MK.numel() == 0 or x_MK.is_meta or not (rows or columns):
        return by_rows, by_columns
    x_MK = x_MK.contiguous()
    scale_mk = scale_mk.contiguous()
    records = seen is not None or saturated is not None
    arguments = _Cast(
        x_MK.data_ptr(),
        scale_mk.data_ptr(),
        _address(by_rows),
        _address(by_columns),
        _address(seen),
        _address(saturated),
        _address(scale_copy),
        M,
        K,
        scale_mk.shape[1],
        block[0] or 0,
        block[1] or 0,
    )
    found = library(tile)
    device, stream = queue_of(x_MK)
    error = found.megaspec_fp8_cast(
        ctypes.byref(arguments),
        _ELEMENTS[x_MK.dtype],
        _FORMATS[dtype],
        _scales(x_MK, block, records=records),
        device,
        stream,
    )
    if error:
        why = found.megaspec_cuda_error(error).decode()
        raise RuntimeError(f"{KEY} could not start for [{M}, {K}] in {x_MK.dtype}: {why}; {WAY_OUT}")
    return by_rows, by_columns


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _scales(x_MK: Tensor, block: Block, *, records: bool) -> int:
    """Which kernel casts: in tiles, by whose scales, or any element by itself."""
    M, K = x_MK.shape
    is_whole = x_MK.dtype == torch.bfloat16 and M % UNIT == 0 and K % UNIT == 0 and x_MK.data_ptr() % 16 == 0
    if not is_whole or max(M, K) > LARGEST_SIDE:
        return _OF_ANYTHING
    rows, columns = block
    if rows in (None, LINE) and columns in (None, LINE):
        return _OF_TILES
    # with scales of lines nothing is recorded
    if rows == 1 and columns in (None, LINE) and not records:
        return _OF_ROWS
    if columns == 1 and rows in (None, LINE) and not records:
        return _OF_COLUMNS
    return _OF_ANYTHING
