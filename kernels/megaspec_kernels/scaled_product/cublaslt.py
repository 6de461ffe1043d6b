"""A product of two fp8 matrices through cuBLASLt itself, which adds it to what is there: torch's scaled_mm can't.

Note "Sums". The weight gradients of a step's micro batches are summed in fp32. cuBLASLt computes D = a b + beta C with
C and D the same memory, so a sum costs no memory of its own and no passes over it: 8 bytes a number and micro batch,
against 16 with a product in fp32 that is added afterwards. torch's products in fp32 take no scales of rows: multiplied
by those afterwards, and then added, they move 32.

Note "Orders". cuBLASLt counts matrices by columns. What is [M, N] by rows in memory is [N, M] by columns there, so its
first factor is our second one. It takes fp8 along the numbers that are summed over in both factors alone (its "TN"), as
they lie here.

Note "Scales". A factor has one scale; or, on Hopper alone and from version 12.9 on, one for each row, for each 128
numbers of a row, or for each square of 128 on a side. Scales of whole factors and of rows multiply the finished sum.
Those of 128 numbers multiply the part of the sum that these make, so that K is padded to a multiple of 128. Rows go
with rows, and one factor at most has squares. Where scales lie in memory: see scales.py.

Note "Fast sums". Of products with fast sums cuBLASLt puts large tiles first. In steps of a large model the GPU stands
at its limit of power, and there one of two smaller tiles takes 2 to 11 % less time in each of six shapes of models of
1B to 70B whose tiles fill the GPU sixteen times or more ("Tiles of fp8 products with fast sums" in
tests/benchmarks/README.md, H200). It is taken there, on Hopper, with scales of whole factors. Below the limit of power
both take about as long. All algorithms add in the same order: their results have the same bits, so that the choice
changes no run. Products without fast sums keep cuBLASLt's first.

Note "Library". It is the one that torch has loaded, found by its name: no other can be in the process. Numbers of its
enumerations and the layout of its struct are those of cublasLt.h, which keeps them from version to version. Whatever it
refuses is an error, with what it was asked.
"""

# M rows, N columns of the result, K numbers that each is a sum over

import ctypes
from ctypes import POINTER, byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from threading import Lock
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megaspec.core.errors import RecipeError
from megaspec_kernels.catalog import CATALOG, CUDA_WITH_LINES
from megaspec_kernels.fp8_cast.formats import ROW, SHORT_LINE, SHORT_ROW, Block, scale_shape
from megaspec_kernels.scaled_product.scales import as_read, has_short_lines

# What the sides of a product are multiples of.
UNIT = 16
# The cuBLASLt of that CUDA, as it encodes its version.
_FIRST_WITH_LINES = 10_000 * CUDA_WITH_LINES[0] + 100 * CUDA_WITH_LINES[1]
# What NVIDIA asks for on Hopper.
WORKSPACE_BYTES = 32 << 20
# Algorithms that cuBLASLt is asked for, best first by its own estimate. The first one is taken; see note "Fast sums".
ALGORITHMS = 8
# Of note "Fast sums", as cuBLASLt numbers tiles and variants of its kernels (13.0).
SMALL_TILES = (201, 197)
SMALL_TILES_OPTION = 2
# Such tiles over those that the GPU computes at once.
FEWEST_WAVES = 16.0

# cudaDataType_t
_DTYPES = {
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
_FP32 = _DTYPES[torch.float32]
# cublasComputeType_t
_COMPUTE_32F = 68
# cublasOperation_t
_TRANSPOSED = 1
_AS_IT_IS = 0
# cublasLtMatmulDescAttributes_t
_TRANSA = 3
_TRANSB = 4
_A_SCALE_POINTER = 17
_B_SCALE_POINTER = 18
_FAST_ACCUM = 25
_A_SCALE_MODE = 31
_B_SCALE_MODE = 32
_WHOLE: Block = (None, None)
# cublasLtMatmulMatrixScale_t
_SCALE_MODES: dict[Block, int] = {
    _WHOLE: 0,
    ROW: 3,
    SHORT_ROW: 4,
    (SHORT_LINE, SHORT_LINE): 5,
}
# cublasLtMatmulPreferenceAttributes_t
_MAX_WORKSPACE_BYTES = 1
_MIN_ALIGNMENTS = (5, 6, 7, 8)
"""Of A, B, C and D."""
# cublasLtMatmulAlgoConfigAttributes_t
_TILE = 1
_CUSTOM_OPTION = 5


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t"""

    _fields_ = (("data", c_uint64 * 8),)


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


_SIGNATURES = {
    "cublasLtCreate": [POINTER(c_void_p)],
    "cublasLtMatmulDescCreate": [POINTER(c_void_p), c_int, c_int],
    "cublasLtMatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatrixLayoutCreate": [POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatmulPreferenceCreate": [POINTER(c_void_p)],
    "cublasLtMatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatmulPreferenceDestroy": [c_void_p],
    "cublasLtMatmulAlgoGetHeuristic": [c_void_p] * 7 + [c_int, POINTER(_Found), POINTER(c_int)],
    "cublasLtMatmulAlgoConfigGetAttribute": [c_void_p, c_int, c_void_p, c_size_t, POINTER(c_size_t)],
    # handle, desc, alpha, A, its layout, B, its layout, beta, C, its layout, D, its layout, algorithm, workspace, its
    # size, stream
    "cublasLtMatmul": [c_void_p] * 14 + [c_size_t, c_void_p],
}


def must_have(recipe: str) -> None:
    """RecipeError: there is no cuBLASLt, or none that takes the scales of precision.recipe."""
    implementations = CATALOG["scaled_product"].implementations
    version = library().cublasLtGetVersion()
    if recipe not in implementations["cublaslt"].hopper_recipes or version >= _FIRST_WITH_LINES:
        return
    way = "set kernels.scaled_product=torch"
    if recipe in implementations["torch"].hopper_recipes:
        # that is a product of the same library
        way = "install a torch for CUDA 12.9 or newer, or set precision.recipe=tensorwise"
    raise RecipeError(
        f"kernels.scaled_product=cublaslt needs cuBLASLt {_dotted(_FIRST_WITH_LINES)} for precision.recipe={recipe},"
        f" torch {torch.__version__} has {_dotted(version)}; {way}"
    )


def _dotted(version: int) -> str:
    """120901 -> 12.9.1"""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


@cache
def library() -> ctypes.CDLL:
    """cuBLASLt as torch has loaded it. RecipeError: there is none."""
    name = f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}"
    try:
        found = ctypes.CDLL(name)
    except OSError as error:
        raise RecipeError(
            f"kernels.scaled_product=cublaslt needs {name}, which torch {torch.__version__} should have brought:"
            f" {error}; set kernels.scaled_product=torch"
        ) from None
    for function, arguments in _SIGNATURES.items():
        getattr(found, function).argtypes = arguments
        getattr(found, function).restype = c_int
    found.cublasLtGetVersion.argtypes = []
    found.cublasLtGetVersion.restype = c_size_t
    found.cublasLtGetStatusString.argtypes = [c_int]
    found.cublasLtGetStatusString.restype = ctypes.c_char_p
    return found


class Shape(NamedTuple):
    """What a product is planned for."""

    device: int
    M: int
    N: int
    K: int
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    out_dtype: torch.dtype
    a_block: Block
    b_block: Block
    fast: bool
    alignments: tuple[int, int, int]
    """Bytes, of the memory of b, a and the result."""


class Plan(NamedTuple):
    """Descriptors of a product, and how it is computed. They live as long as the process."""

    description: c_void_p
    b_layout: c_void_p
    a_layout: c_void_p
    out_layout: c_void_p
    found: list[_Found]


def scaled_product(
    a_MK: Tensor,
    b_NK: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    *,
    a_block: Block,
    b_block: Block,
    dtype: torch.dtype,
    fast: bool = False,
    into: Tensor | None = None,
    overwrite: bool = False,
    algorithm: int = 0,
) -> Tensor:
    """See reference.py. N is a multiple of 16, and M where it is added to something. Blocks: see note "Scales".

    `algorithm`: of those that cuBLASLt found, in the order in which they are taken; for benchmarks.
    """
    M, K = a_MK.shape
    is_blocked = has_short_lines(a_block) or has_short_lines(b_block)
    unit = SHORT_LINE if is_blocked else UNIT
    # tokens of a text that is being written, of any number, as rows or as what is summed over: zeros make whole units
    if K % unit and not a_MK.is_meta:
        a_MK = in_units(a_MK, dim=1, unit=unit)
        b_NK = in_units(b_NK, dim=1, unit=unit)
    if into is None and M % UNIT and not a_MK.is_meta:
        a_MK = in_units(a_MK, dim=0)
        if a_block[0] == 1:
            # a row of zeros has any scale
            a_scale = F.pad(a_scale, (0, 0, 0, a_MK.shape[0] - M), value=1.0)
        padded_MN = scaled_product(
            a_MK, b_NK, a_scale, b_scale, a_block=a_block, b_block=b_block, dtype=dtype, fast=fast
        )
        return padded_MN[:M]
    out = into
    if out is None:
        out = a_MK.new_empty(M, b_NK.shape[0], dtype=dtype)
    if a_MK.is_meta or out.numel() == 0:
        return out
    _check(a_MK, b_NK, a_scale, b_scale, out, a_block=a_block, b_block=b_block)
    # there are no fast sums with scales of blocks
    fast = fast and not is_blocked
    shape = _shape(a_MK, b_NK, out, a_block=a_block, b_block=b_block, fast=fast)
    plan = _plan(shape)
    a_scale = as_read(a_scale, a_block)
    b_scale = as_read(b_scale, b_block)
    stream = torch.cuda.current_stream().cuda_stream
    adds = into is not None and not overwrite
    found = plan.found[algorithm]
    lt = library()
    address = out.data_ptr()
    with _lock:
        # the scales' addresses are part of the description: nobody may change them before the product has read them
        _set(plan.description, _A_SCALE_POINTER, c_void_p(b_scale.data_ptr()))
        _set(plan.description, _B_SCALE_POINTER, c_void_p(a_scale.data_ptr()))
        status = lt.cublasLtMatmul(
            _handle(shape.device),
            plan.description,
            byref(_ONE),
            b_NK.data_ptr(),
            plan.b_layout,
            a_MK.data_ptr(),
            plan.a_layout,
            byref(_ONE if adds else _ZERO),
            address,
            plan.out_layout,
            address,
            plan.out_layout,
            byref(found.algorithm),
            _workspace(shape.device, stream).data_ptr(),
            WORKSPACE_BYTES,
            stream,
        )
    _must(status, f"product {shape}, algorithm {algorithm}")
    return out


def algorithms(
    a_MK: Tensor, b_NK: Tensor, out_MN: Tensor, *, a_block: Block, b_block: Block, fast: bool = False
) -> int:
    """How many there are for a product, for benchmarks."""
    return len(_plan(_shape(a_MK, b_NK, out_MN, a_block=a_block, b_block=b_block, fast=fast)).found)


def _shape(a_MK: Tensor, b_NK: Tensor, out_MN: Tensor, *, a_block: Block, b_block: Block, fast: bool) -> Shape:
    M, K = a_MK.shape
    return Shape(
        a_MK.get_device(),
        M,
        b_NK.shape[0],
        K,
        a_MK.dtype,
        b_NK.dtype,
        out_MN.dtype,
        a_block,
        b_block,
        fast,
        (_alignment(b_NK), _alignment(a_MK), _alignment(out_MN)),
    )


def in_units(matrix: Tensor, *, dim: int, unit: int = UNIT) -> Tensor:
    """In fp8, with as many zeros behind as whole units need."""
    shape = list(matrix.shape)
    shape[dim] = -(-shape[dim] // unit) * unit
    # as bytes, of which 0 is the number 0 in both formats
    whole = torch.zeros(shape, dtype=torch.uint8, device=matrix.device)
    whole.narrow(dim, 0, matrix.shape[dim]).copy_(matrix.view(torch.uint8))
    return whole.view(matrix.dtype)


# alpha and beta; they are read when a product is started
_ONE = c_float(1.0)
_ZERO = c_float(0.0)
# backward passes run in a thread of their own
_lock = Lock()


def _check(
    a_MK: Tensor,
    b_NK: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    out_MN: Tensor,
    *,
    a_block: Block,
    b_block: Block,
) -> None:
    M, K = a_MK.shape
    N = b_NK.shape[0]
    assert b_NK.shape[1] == K, f"{tuple(a_MK.shape)} and {tuple(b_NK.shape)}"
    assert out_MN.shape == (M, N), f"{tuple(out_MN.shape)} for {(M, N)}"
    assert M % UNIT == N % UNIT == K % UNIT == 0, f"{(M, N, K)} for units of {UNIT}"
    for factor, scale, block in ((a_MK, a_scale, a_block), (b_NK, b_scale, b_block)):
        needs = scale_shape(block, factor.shape)
        assert tuple(scale.shape) == needs, f"scales {tuple(scale.shape)} of {tuple(factor.shape)} by {block}"
    assert (a_block == ROW) == (b_block == ROW), f"scales of {a_block} with scales of {b_block}"
    assert a_scale.dtype == b_scale.dtype == torch.float32, f"scales in {a_scale.dtype} and {b_scale.dtype}"
    for tensor in (a_MK, b_NK, out_MN):
        assert tensor.is_contiguous(), f"{tuple(tensor.shape)} with strides {tensor.stride()}"
    # the current device is the one whose stream and library state are used
    assert a_MK.get_device() == torch.cuda.current_device(), f"{a_MK.device}, current is {torch.cuda.current_device()}"


def _alignment(tensor: Tensor) -> int:
    """The largest power of two up to 256 that divides an address."""
    address = tensor.data_ptr() | 256
    return address & -address


@cache
def _handle(device: int) -> c_void_p:
    handle = c_void_p()
    _must(library().cublasLtCreate(byref(handle)), f"a handle for device {device}")
    return handle


_workspaces: dict[tuple[int, int], Tensor] = {}


def _workspace(device: int, stream: int) -> Tensor:
    """Of each stream its own: products on one run one after the other."""
    held = _workspaces.get((device, stream))
    if held is None:
        held = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=f"cuda:{device}")
        _workspaces[device, stream] = held
    return held


@cache
def _plan(shape: Shape) -> Plan:
    description, layouts, preference = describe(shape)
    # algorithms are chosen for products that have scales; which ones, each product says
    anywhere = c_void_p(_workspace(shape.device, torch.cuda.current_stream().cuda_stream).data_ptr())
    _set(description, _A_SCALE_POINTER, anywhere)
    _set(description, _B_SCALE_POINTER, anywhere)
    found = (_Found * ALGORITHMS)()
    count = c_int()
    product = f"product {shape}"
    status = library().cublasLtMatmulAlgoGetHeuristic(
        _handle(shape.device), description, *layouts, layouts[-1], preference, ALGORITHMS, found, byref(count)
    )
    _must(status, f"an algorithm for {product}")
    runs = []
    for one in found[: count.value]:
        if one.status == 0:
            runs.append(one)
    if not runs:
        raise RuntimeError(f"cuBLASLt has no algorithm for {product}; set kernels.scaled_product=torch")
    library().cublasLtMatmulPreferenceDestroy(preference)
    if has_small_tiles(shape, torch.cuda.get_device_capability(shape.device)):
        runs = small_tiles_first(runs)
    return Plan(description, *layouts, runs)


def has_small_tiles(shape: Shape, capability: tuple[int, int]) -> bool:
    """Whether note "Fast sums" is about a product on such a GPU."""
    return shape.fast and shape.a_block == shape.b_block == _WHOLE and capability == (9, 0)


def small_tiles_first(found: list[_Found]) -> list[_Found]:
    """With the first of cuBLASLt's that note "Fast sums" would take in front, where there is one."""
    for one in found:
        if one.waves < FEWEST_WAVES or _configured(one, _CUSTOM_OPTION) != SMALL_TILES_OPTION:
            continue
        if _configured(one, _TILE) in SMALL_TILES:
            return [one, *(other for other in found if other is not one)]
    return found


def _configured(found: _Found, attribute: int) -> int:
    """An attribute of an algorithm."""
    value = c_uint32()
    written = c_size_t()
    status = library().cublasLtMatmulAlgoConfigGetAttribute(
        byref(found.algorithm), attribute, byref(value), ctypes.sizeof(value), byref(written)
    )
    _must(status, f"the question for attribute {attribute} of an algorithm")
    return value.value


def describe(shape: Shape) -> tuple[c_void_p, tuple[c_void_p, c_void_p, c_void_p], c_void_p]:
    """-> the product's description, the layouts of b, a and the result, and what an algorithm may use."""
    lt = library()
    description = c_void_p()
    _must(lt.cublasLtMatmulDescCreate(byref(description), _COMPUTE_32F, _FP32), "a description")
    _set(description, _TRANSA, c_int32(_TRANSPOSED))
    _set(description, _TRANSB, c_int32(_AS_IT_IS))
    _set(description, _FAST_ACCUM, c_int8(shape.fast))
    for attribute, block in ((_A_SCALE_MODE, shape.b_block), (_B_SCALE_MODE, shape.a_block)):
        # a whole factor's is the default; versions before 12.8 don't know the attribute
        if block != _WHOLE:
            _set(description, attribute, c_int32(_SCALE_MODES[block]))
    layouts = (
        _layout(shape.b_dtype, shape.K, shape.N),
        _layout(shape.a_dtype, shape.K, shape.M),
        _layout(shape.out_dtype, shape.N, shape.M),
    )
    preference = c_void_p()
    _must(lt.cublasLtMatmulPreferenceCreate(byref(preference)), "preferences")
    _prefer(preference, _MAX_WORKSPACE_BYTES, c_uint64(WORKSPACE_BYTES))
    b_bytes, a_bytes, out_bytes = shape.alignments
    for attribute, size in zip(_MIN_ALIGNMENTS, (b_bytes, a_bytes, out_bytes, out_bytes), strict=True):
        _prefer(preference, attribute, c_uint32(size))
    return description, layouts, preference


def _layout(dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
    """Of a matrix that lies by columns, one behind the other."""
    layout = c_void_p()
    status = library().cublasLtMatrixLayoutCreate(byref(layout), _DTYPES[dtype], rows, columns, rows)
    _must(status, f"a layout of {rows} x {columns} in {dtype}")
    return layout


def _set(description: c_void_p, attribute: int, value: ctypes._SimpleCData) -> None:
    status = library().cublasLtMatmulDescSetAttribute(description, attribute, byref(value), ctypes.sizeof(value))
    _must(status, f"attribute {attribute} of a description")


def _prefer(preference: c_void_p, attribute: int, value: ctypes._SimpleCData) -> None:
    status = library().cublasLtMatmulPreferenceSetAttribute(preference, attribute, byref(value), ctypes.sizeof(value))
    _must(status, f"attribute {attribute} of preferences")


def _must(status: int, what: str) -> None:
    if status == 0:
        return
    text = library().cublasLtGetStatusString(status).decode()
    raise RuntimeError(f"cuBLASLt refuses {what}: {text} ({status}); set kernels.scaled_product=torch")
