"""Products of fp8 matrices against the product of what their factors stand for, in fp64."""

import ctypes
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megaspec.core.errors import RecipeError
from megaspec_kernels.catalog import Use, choose, unmet
from megaspec_kernels.fp8_cast.formats import Block, scale_of, scale_shape, spread
from megaspec_kernels.gate import check
from megaspec_kernels.registry import REGISTRY
from megaspec_kernels.scaled_product import cublaslt
from megaspec_kernels.scaled_product.bench import by_tensor_cores, takes
from megaspec_kernels.scaled_product.scales import as_read
from tests.kernels.fp8 import quantised

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
ALL: Block = (None, None)
LINES: Block = (1, None)
PAIRS = [
    (ALL, ALL, E4M3),
    (ALL, ALL, E5M2),
    (LINES, LINES, E4M3),
    (LINES, LINES, E5M2),
    ((1, 128), (128, 128), E4M3),
    ((1, 128), (1, 128), E4M3),
]


def factors(M: int, N: int, K: int, a_block: Block, b_block: Block, dtype: torch.dtype, device: torch.device) -> tuple:
    """Both in fp64, both in fp8 with their scales in fp32."""
    draw = torch.Generator().manual_seed(M + N + K)
    made = []
    for rows, block, form in ((M, a_block, dtype), (N, b_block, E4M3)):
        x = torch.randn(rows, K, generator=draw) * torch.exp2(torch.randint(-6, 6, (rows, 1), generator=draw).float())
        cast = REGISTRY["fp8_cast"]["reference"]
        scale = scale_of(cast.amax(x, block=block), form)
        values, _ = cast.cast(x, scale, block=block, dtype=form)
        made.append((quantised(x, form, block).to(device), values.to(device), scale.to(device)))
    return tuple(made)


def plain_of(name: str, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """What an implementation is measured against: what fp32 makes of it, or what tensor cores may."""
    if name == "reference":
        return (a.float() @ b.float().t()).to(dtype)
    return by_tensor_cores(a, b, dtype=dtype)


def skip_what_is_hoppers(name: str, a_block: Block) -> None:
    if name != "reference" and not takes(name, a_block, torch.device("cuda")):
        pytest.skip("scales of blocks, and in cuBLASLt of rows, are Hopper's")


@pytest.mark.parametrize("name", list(REGISTRY["scaled_product"]))
@pytest.mark.parametrize(("a_block", "b_block", "dtype"), PAIRS, ids=str)
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("M", "N", "K"), [(16, 16, 128), (80, 256, 384), (128, 144, 256)])
def test_product(name, a_block, b_block, dtype, out, M, N, K, device) -> None:
    if name != "reference" and device.type == "cpu":
        pytest.skip("fp8 products are tested on a GPU")
    skip_what_is_hoppers(name, a_block)
    (a, a8, a_scale), (b, b8, b_scale) = factors(M, N, K, a_block, b_block, dtype, device)
    product = REGISTRY["scaled_product"][name]
    call = partial(product, a8, b8, a_scale, b_scale, a_block=a_block, b_block=b_block, dtype=out)
    truth = a @ b.t()
    plain = plain_of(name, a, b, out)
    check({"out": call()}, {"out": plain}, {"out": truth})
    if name != "reference" and a_block[1] is None:
        # fewer bits in the sums: of fp8's own error not a part, 2^-11 of the terms
        size = (a.abs() @ b.abs().t()).max()
        assert (call(fast=True).double() - truth).abs().max() <= 2**-7 * size


@pytest.mark.parametrize("name", list(REGISTRY["scaled_product"]))
@pytest.mark.parametrize(("a_block", "b_block", "dtype"), PAIRS, ids=str)
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32], ids=str)
def test_products_are_summed(name, a_block, b_block, dtype, out, device) -> None:
    """As weight gradients are: the first replaces what lies there, others are added."""
    if name != "reference" and device.type == "cpu":
        pytest.skip("fp8 products are tested on a GPU")
    skip_what_is_hoppers(name, a_block)
    M, N = 48, 272
    product = REGISTRY["scaled_product"][name]
    into = torch.full((M, N), float("nan"), dtype=out, device=device)
    truth = torch.zeros(M, N, dtype=torch.float64, device=device)
    plain = torch.zeros(M, N, dtype=out, device=device)
    # scales of each are others, of products that are otherwise the same
    for number in range(3):
        (a, a8, a_scale), (b, b8, b_scale) = factors(M, N, 256, a_block, b_block, dtype, device)
        a_scale = a_scale * 4.0**number
        overwrite = number == 0
        found = product(
            a8, b8, a_scale, b_scale, a_block=a_block, b_block=b_block, dtype=out, into=into, overwrite=overwrite
        )
        assert found.data_ptr() == into.data_ptr()
        truth += 4.0**number * a @ b.t()
        plain += plain_of(name, 4.0**number * a, b, out)
        check({"out": into}, {"out": plain}, {"out": truth})


@pytest.mark.parametrize("name", list(REGISTRY["scaled_product"]))
@pytest.mark.parametrize(("a_block", "b_block"), dict.fromkeys(pair[:2] for pair in PAIRS), ids=str)
@pytest.mark.parametrize(
    ("M", "N", "K"), [(16, 16, 128), (48, 272, 640), (272, 400, 384), (1, 400, 896), (48, 272, 208)]
)
def test_each_scale_multiplies_what_it_is_of(name, a_block, b_block, M, N, K, device) -> None:
    """To the bit, of ones by scales that differ from block to block: of random numbers the blocks' largest elements are
    so alike that a scale read from a neighbour's place is hardly seen. Blocks in whole fours, and not."""
    if name != "reference" and device.type == "cpu":
        pytest.skip("fp8 products are tested on a GPU")
    skip_what_is_hoppers(name, a_block)
    if name == "torch" and (M % 16 or (a_block[1] is not None and K % 128)):
        pytest.skip("takes whole units")
    draw = torch.Generator().manual_seed(M + N + K)
    ones = []
    scales = []
    for rows, block in ((M, a_block), (N, b_block)):
        ones.append(torch.ones(rows, K).to(E4M3).to(device))
        # at most 2^6: 896 products of two of them are below 2^22, of which fp32 rounds nothing
        exponents = torch.randint(0, 7, scale_shape(block, (rows, K)), generator=draw)
        scales.append(torch.exp2(exponents.float()).to(device))
    product = REGISTRY["scaled_product"][name]
    found = product(*ones, *scales, a_block=a_block, b_block=b_block, dtype=torch.float32)
    a = spread(scales[0].double(), a_block, (M, K)).expand(M, K)
    b = spread(scales[1].double(), b_block, (N, K)).expand(N, K)
    assert torch.equal(found.double(), a @ b.t())


# Blocks of both factors of a weight gradient, and the format of the first.
SUMMED = [
    (ALL, ALL, E4M3),
    (ALL, ALL, E5M2),
    (LINES, LINES, E4M3),
    (LINES, LINES, E5M2),
    ((1, 128), (1, 128), E4M3),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("a_block", "b_block", "dtype"), SUMMED, ids=str)
@pytest.mark.parametrize(("M", "N", "K"), [(16, 16, 16), (2048, 3072, 4096), (1040, 2064, 1008)])
def test_sums_of_cublaslt_are_those_of_torch(a_block, b_block, dtype, M, N, K) -> None:
    """A weight gradient of each kind of size, against torch's product with a sum behind it."""
    device = torch.device("cuda")
    skip_what_is_hoppers("cublaslt", a_block)
    if a_block[1] is not None:
        # torch takes whole lines
        K = -(-K // 128) * 128
    (a, a8, a_scale), (b, b8, b_scale) = factors(M, N, K, a_block, b_block, dtype, device)
    into = torch.randn(M, N, device=device)
    before = into.clone()
    form = {"a_block": a_block, "b_block": b_block, "dtype": torch.float32}
    REGISTRY["scaled_product"]["cublaslt"](a8, b8, a_scale, b_scale, **form, into=into)
    product = REGISTRY["scaled_product"]["torch"](a8, b8, a_scale, b_scale, **form)
    truth = before.double() + a @ b.t()
    plain = before + by_tensor_cores(a, b, dtype=torch.float32)
    check({"out": into}, {"out": plain}, {"out": truth})
    # and no worse than torch's, which is the same library's
    error = (into.double() - truth).abs().max()
    of_torch = (before.double() + product.double() - truth).abs().max()
    assert error <= 2 * of_torch + 4 * torch.finfo(torch.float32).eps * truth.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 63, 1000])
@pytest.mark.parametrize(("a_block", "b_block", "dtype"), PAIRS, ids=str)
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32], ids=str)
def test_cublaslt_multiplies_any_number_of_tokens(a_block, b_block, dtype, out, tokens) -> None:
    """As rows of a product, where text is written."""
    device = torch.device("cuda")
    skip_what_is_hoppers("cublaslt", a_block)
    (a, a8, a_scale), (b, b8, b_scale) = factors(tokens, 272, 1008, a_block, b_block, dtype, device)
    found = REGISTRY["scaled_product"]["cublaslt"](
        a8, b8, a_scale, b_scale, a_block=a_block, b_block=b_block, dtype=out
    )
    assert found.shape == (tokens, 272)
    check({"out": found}, {"out": by_tensor_cores(a, b, dtype=out)}, {"out": a @ b.t()})


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 63, 1000])
@pytest.mark.parametrize(("a_block", "b_block", "dtype"), SUMMED, ids=str)
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32], ids=str)
def test_cublaslt_sums_over_any_number_of_tokens(a_block, b_block, dtype, out, tokens) -> None:
    """A weight gradient, made anew and added to a main gradient."""
    device = torch.device("cuda")
    skip_what_is_hoppers("cublaslt", a_block)
    product = REGISTRY["scaled_product"]["cublaslt"]
    form = {"a_block": a_block, "b_block": b_block, "dtype": out}
    # [O, tokens] and [I, tokens]
    (a, a8, a_scale), (b, b8, b_scale) = factors(48, 272, tokens, a_block, b_block, dtype, device)
    plain = by_tensor_cores(a, b, dtype=out)
    truth = a @ b.t()
    check({"out": product(a8, b8, a_scale, b_scale, **form)}, {"out": plain}, {"out": truth})
    into = torch.full((48, 272), float("nan"), dtype=out, device=device)
    product(a8, b8, a_scale, b_scale, **form, into=into, overwrite=True)
    check({"out": into}, {"out": plain}, {"out": truth})
    product(a8, b8, a_scale, b_scale, **form, into=into)
    check({"out": into}, {"out": plain + plain}, {"out": 2 * truth})


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("count", [1, 63, 1000, 1008])
def test_zeros_make_whole_units_and_change_no_product(count, dim) -> None:
    (_, whole, _), (b, _, _) = factors(1008, 1008, 1008, ALL, ALL, E5M2, torch.device("cpu"))
    part = whole.view(torch.uint8).narrow(dim, 0, count).contiguous().view(E5M2)
    found = cublaslt.in_units(part, dim=dim)
    size = -(-count // 16) * 16
    assert found.shape[dim] == size
    assert found.is_contiguous()
    assert torch.equal(found.view(torch.uint8).narrow(dim, 0, count), part.view(torch.uint8))
    assert not found.float().narrow(dim, count, size - count).any()
    if dim == 1:
        assert torch.equal(found.double() @ b[:, :size].t(), part.double() @ b[:, :count].t())


@pytest.mark.gpu
@pytest.mark.parametrize(("a_block", "b_block", "dtype"), SUMMED, ids=str)
def test_products_of_several_streams_do_not_meet(a_block, b_block, dtype) -> None:
    """Each stream has a workspace of its own, and scales are those of the product that they were given to, also where
    they are copied to lie as they are read."""
    device = torch.device("cuda")
    skip_what_is_hoppers("cublaslt", a_block)
    product = REGISTRY["scaled_product"]["cublaslt"]
    form = {"a_block": a_block, "b_block": b_block, "dtype": torch.float32}
    (_, a8, a_scale), (_, b8, b_scale) = factors(512, 1024, 4096, a_block, b_block, dtype, device)
    one = product(a8, b8, a_scale, b_scale, **form)
    torch.cuda.synchronize()
    found = []
    streams = [torch.cuda.Stream() for _ in range(3)]
    scales = [a_scale * 2.0**number for number in range(24)]
    torch.cuda.synchronize()
    for number, scale in enumerate(scales):
        with torch.cuda.stream(streams[number % 3]):
            found.append(product(a8, b8, scale, b_scale, **form))
    torch.cuda.synchronize()
    for number, result in enumerate(found):
        assert torch.equal(result, one * 2.0**number), number


@pytest.mark.gpu
@pytest.mark.parametrize(("a_block", "b_block", "dtype"), SUMMED, ids=str)
def test_buffers_that_begin_anywhere(a_block, b_block, dtype) -> None:
    """A main gradient lies in a buffer of many, on 16 bytes alone."""
    device = torch.device("cuda")
    skip_what_is_hoppers("cublaslt", a_block)
    (a, a8, a_scale), (b, b8, b_scale) = factors(64, 128, 256, a_block, b_block, dtype, device)
    flat = torch.zeros(64 * 128 + 8, device=device)
    into = flat[4:-4].view(64, 128)
    assert into.data_ptr() % 32 == 16
    REGISTRY["scaled_product"]["cublaslt"](
        a8, b8, a_scale, b_scale, a_block=a_block, b_block=b_block, dtype=torch.float32, into=into
    )
    check({"out": into}, {"out": by_tensor_cores(a, b, dtype=torch.float32)}, {"out": a @ b.t()})
    assert not flat[:4].any()
    assert not flat[-4:].any()


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "N", "K"), [(8192, 6144, 4096), (2048, 28672, 4096)])
def test_small_tiles_with_fast_sums_change_no_bit(M, N, K) -> None:
    """On Hopper a small tile comes first, see note "Fast sums"; all that cuBLASLt found agree to the bit."""
    device = torch.device("cuda")
    x8 = torch.randn(M, K, device=device).to(E4M3)
    weight8 = torch.randn(N, K, device=device).to(E4M3)
    one = torch.ones(1, 1, device=device)
    form = {"a_block": ALL, "b_block": ALL}
    out = torch.empty(M, N, dtype=torch.bfloat16, device=device)
    count = cublaslt.algorithms(x8, weight8, out, **form, fast=True)
    call = partial(cublaslt.scaled_product, x8, weight8, one, one, **form, dtype=torch.bfloat16, fast=True)
    first = call()
    for algorithm in range(1, count):
        assert torch.equal(call(algorithm=algorithm), first), algorithm
    if torch.cuda.get_device_capability() != (9, 0):
        return
    shape = cublaslt._shape(x8, weight8, out, **form, fast=True)
    taken = cublaslt._plan(shape).found[0]
    assert cublaslt._configured(taken, cublaslt._TILE) in cublaslt.SMALL_TILES
    # without fast sums, and with scales of lines, cuBLASLt's own
    assert not cublaslt.has_small_tiles(shape._replace(fast=False), (9, 0))


@pytest.mark.gpu
def test_what_cublaslt_is_not_made_for_is_told() -> None:
    device = torch.device("cuda")
    (_, a8, a_scale), (_, b8, b_scale) = factors(32, 32, 128, ALL, ALL, E5M2, device)
    product = partial(REGISTRY["scaled_product"]["cublaslt"], a_block=ALL, b_block=ALL, dtype=torch.float32)
    with pytest.raises(AssertionError, match=r"scales \(1, 1\) of \(32, 128\) by \(1, None\)"):
        REGISTRY["scaled_product"]["cublaslt"](
            a8, b8, a_scale, b_scale, a_block=LINES, b_block=LINES, dtype=torch.float32
        )
    with pytest.raises(AssertionError, match="for units of 16"):
        product(a8, b8[:24].contiguous(), a_scale, b_scale)
    into = torch.zeros(24, 32, device=device)
    with pytest.raises(AssertionError, match="for units of 16"):
        product(a8[:24].contiguous(), b8, a_scale, b_scale, into=into)
    # both in e5m2: no tensor core takes them
    with pytest.raises(RuntimeError, match=r"set kernels\.scaled_product=torch"):
        product(a8, b8.view(E5M2), a_scale, b_scale)


def test_a_torch_without_cublaslt_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "0.0")
    cublaslt.library.cache_clear()
    with pytest.raises(RecipeError, match=r"libcublasLt\.so\.0.*; set kernels\.scaled_product=torch"):
        cublaslt.library()
    cublaslt.library.cache_clear()


@pytest.mark.parametrize(
    ("version", "recipe", "is_enough"),
    [(120800, "delayed", True), (120803, "rowwise", False), (120803, "blockwise", False), (130002, "rowwise", True)],
)
def test_a_cublaslt_without_scales_of_lines_is_told(version, recipe, is_enough, monkeypatch) -> None:
    monkeypatch.setattr(cublaslt, "library", lambda: SimpleNamespace(cublasLtGetVersion=lambda: version))
    if is_enough:
        cublaslt.must_have(recipe)
        return
    with pytest.raises(RecipeError) as raised:
        cublaslt.must_have(recipe)
    text = f"kernels.scaled_product=cublaslt needs cuBLASLt 12.9.0 for precision.recipe={recipe}, torch"
    assert str(raised.value).startswith(text)
    # torch multiplies blocks by the same library
    way = "set kernels.scaled_product=torch"
    if recipe == "blockwise":
        way = "install a torch for CUDA 12.9 or newer, or set precision.recipe=tensorwise"
    assert str(raised.value).endswith(f"has 12.8.3; {way}")


@pytest.mark.parametrize("a_block", [ALL, LINES, (1, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("b_block", [ALL, LINES, (1, 128), (128, 128)], ids=str)
def test_each_factor_is_described_by_its_own_scales(a_block, b_block, monkeypatch) -> None:
    """A mode that is left out would have one scale multiply everything. cuBLASLt's first factor is our second one."""
    said = {}

    def set_attribute(description, attribute, value, size) -> int:
        said[attribute] = value._obj.value
        return 0

    def succeed(*_) -> int:
        return 0

    functions = dict.fromkeys(cublaslt._SIGNATURES, succeed)
    functions["cublasLtMatmulDescSetAttribute"] = set_attribute
    monkeypatch.setattr(cublaslt, "library", lambda: SimpleNamespace(**functions))
    shape = cublaslt.Shape(0, 256, 256, 256, E4M3, E4M3, torch.bfloat16, a_block, b_block, False, (256, 256, 256))
    cublaslt.describe(shape)
    # cublasLtMatmulMatrixScale_t: SCALAR_32F, which is the default, OUTER_VEC_32F, VEC128_32F, BLK128x128_32F
    modes = {ALL: 0, LINES: 3, (1, 128): 4, (128, 128): 5}
    assert said.get(cublaslt._A_SCALE_MODE, 0) == modes[b_block]
    assert said.get(cublaslt._B_SCALE_MODE, 0) == modes[a_block]


def test_structs_are_those_of_the_header() -> None:
    """cublasLtMatmulAlgo_t, cublasLtMatmulHeuristicResult_t."""
    assert ctypes.sizeof(cublaslt._Algorithm) == 64
    assert ctypes.sizeof(cublaslt._Found) == 96
    assert (cublaslt._Found.workspace.offset, cublaslt._Found.status.offset, cublaslt._Found.waves.offset) == (
        64,
        72,
        76,
    )


def test_a_small_tile_is_taken_where_it_was_measured_to_be_faster(monkeypatch) -> None:
    """Of many waves, of the variant that was measured, the one that cuBLASLt names first; else cuBLASLt's first."""

    def found(tile: int, option: int, waves: float) -> cublaslt._Found:
        one = cublaslt._Found(waves=waves)
        one.algorithm.data[0] = tile
        one.algorithm.data[1] = option
        return one

    def attribute(algorithm, which, value, size, written) -> int:
        at = {cublaslt._TILE: 0, cublaslt._CUSTOM_OPTION: 1}[which]
        value._obj.value = algorithm._obj.data[at]
        return 0

    monkeypatch.setattr(cublaslt, "library", lambda: SimpleNamespace(cublasLtMatmulAlgoConfigGetAttribute=attribute))
    large = found(24, 7, 54.3)
    few_waves = found(201, 2, 11.6)
    another = found(201, 3, 79.0)
    first_small = found(197, 2, 82.9)
    second_small = found(201, 2, 79.0)
    taken = cublaslt.small_tiles_first([large, few_waves, another, first_small, second_small])
    assert [id(one) for one in taken] == [id(one) for one in (first_small, large, few_waves, another, second_small)]
    # nothing of the kind
    kept = [large, few_waves, another]
    assert cublaslt.small_tiles_first(kept) == kept


@pytest.mark.parametrize(
    ("fast", "block", "capability", "has"),
    [
        (True, ALL, (9, 0), True),
        (False, ALL, (9, 0), False),
        (True, LINES, (9, 0), False),
        (True, ALL, (8, 9), False),
        (True, ALL, (10, 0), False),
    ],
)
def test_small_tiles_are_taken_as_they_were_measured(fast, block, capability, has) -> None:
    shape = cublaslt.Shape(0, 8192, 6144, 4096, E4M3, E4M3, torch.bfloat16, block, block, fast, (256, 256, 256))
    assert cublaslt.has_small_tiles(shape, capability) == has


@pytest.mark.parametrize(("M", "K"), [(48, 256), (130, 640), (16, 128)])
def test_scales_lie_as_they_are_read(M, K) -> None:
    """Of parts of rows by the part, of squares by the square row, in whole fours."""
    parts = torch.arange(M * (K // 128), dtype=torch.float32).view(M, K // 128)
    read = as_read(parts, (1, 128))
    assert read.is_contiguous()
    assert torch.equal(read, parts.t())
    squares = torch.arange(1, 1 + 3 * (K // 128), dtype=torch.float32).view(3, K // 128)
    read = as_read(squares, (128, 128))
    assert read.is_contiguous()
    assert read.shape[1] % 4 == 0
    assert torch.equal(read[:, : squares.shape[1]], squares)
    rows = torch.arange(M, dtype=torch.float32).view(M, 1)
    assert torch.equal(as_read(rows, (1, None)), rows)


def test_the_reference_in_fp64_is_exact() -> None:
    (a, a8, a_scale), (b, b8, b_scale) = factors(48, 32, 256, (1, 128), (128, 128), E4M3, torch.device("cpu"))
    product = REGISTRY["scaled_product"]["reference"]
    found = product(
        a8, b8, a_scale.double(), b_scale.double(), a_block=(1, 128), b_block=(128, 128), dtype=torch.float64
    )
    assert torch.equal(found, a @ b.t())


@pytest.mark.parametrize(
    ("capability", "name", "blocks"),
    [
        ((8, 9), "cublaslt", [ALL]),
        ((8, 9), "torch", [ALL, LINES]),
        ((9, 0), "cublaslt", [ALL, LINES, (1, 128)]),
        ((9, 0), "torch", [ALL, LINES, (1, 128)]),
        ((10, 0), "cublaslt", [ALL]),
        ((10, 0), "torch", [ALL, LINES]),
        ((10, 0), "reference", [ALL, LINES, (1, 128)]),
    ],
)
def test_a_benchmark_asks_for_what_a_gpu_has(capability, name, blocks, monkeypatch) -> None:
    """`megaspec bench kernel` on a GPU other than Hopper ended at the first product that there is none of."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = [block for block in (ALL, LINES, (1, 128)) if takes(name, block, torch.device("cuda"))]
    assert found == blocks


def test_wide_models_take_the_reference() -> None:
    for recipe in ("tensorwise", "delayed", "rowwise", "blockwise"):
        use = Use(precision="bf16", fp8_recipe=recipe)
        assert choose("scaled_product", device="cuda", sm=90, use=use) == "cublaslt"
    use = Use(precision="bf16", fp8_recipe="rowwise")
    assert choose("scaled_product", device="cuda", sm=100, use=use) == "torch"
    use = Use(precision="bf16", fp8_recipe="delayed")
    assert choose("scaled_product", device="cuda", sm=100, use=use) == "cublaslt"
    assert choose("scaled_product", device="cuda", sm=90, use=Use(precision="fp64")) == "reference"
    assert (
        unmet("scaled_product", "cublaslt", device="cuda", sm=100, use=Use(precision="bf16", fp8_recipe="rowwise"))
        == "takes precision.recipe=rowwise on sm90 alone, this GPU is sm100"
    )
    assert unmet("scaled_product", "torch", device="cuda", sm=80) == "needs sm89, this GPU is sm80"


@pytest.mark.parametrize(
    ("torch_version", "rowwise", "blockwise"),
    [
        ("2.11.0+cu126", "torch", "reference"),
        ("2.11.0+cu128", "torch", "reference"),
        ("2.11.0+cu129", "cublaslt", "cublaslt"),
        ("2.11.0+cu130", "cublaslt", "cublaslt"),
        # as the package index has it, of the CUDA that torch prefers
        ("2.11.0", "cublaslt", "cublaslt"),
        ("2.11.0+cpu", "cublaslt", "cublaslt"),
        ("2.11.0+cu", "cublaslt", "cublaslt"),
    ],
)
def test_an_older_cuda_has_no_scales_of_lines(torch_version, rowwise, blockwise) -> None:
    packages = {"torch": torch_version}
    for recipe, best in (("rowwise", rowwise), ("blockwise", blockwise), ("delayed", "cublaslt")):
        use = Use(precision="bf16", fp8_recipe=recipe)
        assert choose("scaled_product", device="cuda", sm=90, use=use, packages=packages) == best
    use = Use(precision="bf16", fp8_recipe="rowwise")
    lacks = unmet("scaled_product", "cublaslt", device="cuda", sm=90, use=use, packages={"torch": "2.11.0+cu126"})
    assert lacks == "takes precision.recipe=rowwise from CUDA 12.9 on, torch is built for 12.6"
