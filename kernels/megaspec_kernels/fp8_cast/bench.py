"""Quantising to fp8."""

# M rows, K columns

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from megaspec_kernels.bench import Bench, Held, Work, copy_of, on_device, random, training_dtype
from megaspec_kernels.fp8_cast.formats import SHORT_COLUMN, SHORT_ROW, Block, Known, scale_of, spread
from megaspec_kernels.fp8_cast.tiles import TILES, TILES_OF_LARGEST, TILES_OF_LINES, TILES_OF_SHORT_LINES, Tile
from megaspec_kernels.gate import Results
from megaspec_kernels.registry import REGISTRY, Fp8CastKernel

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
BLOCKS: dict[str, Block] = {"a tensor": (None, None), "rows": (1, None), "1x128": (1, 128), "128x128": (128, 128)}


def _quantised(kernel: Fp8CastKernel, x_MK: Tensor, block: Block) -> Results:
    """What is left of a matrix, in the format that the kernel computes in."""
    amax = kernel.amax(x_MK, block=block)
    scale = scale_of(amax, E4M3)
    by_rows, by_columns = kernel.cast(x_MK, scale, block=block, dtype=E4M3, columns=True)
    factor = spread(scale, block, x_MK.shape)
    return {
        "out": by_rows.to(scale.dtype) * factor,
        "columns": by_columns.t().to(scale.dtype) * factor,
        "amax": amax,
    }


def _quantised_lines(kernel: Fp8CastKernel, x_MK: Tensor) -> Results:
    """The same where rows and columns have scales of their own."""
    whole = kernel.quantise_lines(x_MK, dtype=E4M3)
    short = kernel.quantise_short_lines(x_MK, dtype=E4M3)
    wide = whole.row_scale.dtype
    return {
        "out": whole.rows.to(wide) * whole.row_scale,
        "columns": whole.columns.t().to(wide) * whole.column_scale,
        "short rows": short.rows.to(wide) * spread(short.row_scale, SHORT_ROW, x_MK.shape),
        "short columns": short.columns.t().to(wide) * spread(short.column_scale, SHORT_COLUMN, x_MK.shape),
    }


def held(name: str, device: torch.device) -> Iterator[Held]:
    """Blocks of each recipe, and ends that fill none. The truth is the cast itself, in fp64: rounding is the same."""
    kernel = REGISTRY["fp8_cast"][name]
    plain = REGISTRY["fp8_cast"]["reference"]
    dtype = training_dtype(device)
    for shape in ((1, 16), (63, 1000), (256, 384)):
        x_MK = random(*shape, seed=1, device=device)
        mine = x_MK.to(dtype)
        for what, block in BLOCKS.items():
            yield Held(
                f"{shape[0]} x {shape[1]}, a scale for {what}",
                _quantised(kernel, mine, block),
                _quantised(plain, mine, block),
                _quantised(plain, x_MK, block),
            )
        yield Held(
            f"{shape[0]} x {shape[1]}, scales for the lines of each layout",
            _quantised_lines(kernel, mine),
            _quantised_lines(plain, mine),
            _quantised_lines(plain, x_MK),
        )


def works(name: str, device: torch.device) -> Iterator[Work]:
    """What is read and written once: the largest elements and their scales, the cast into both layouts, both at once by
    a scale that is known before, as delayed scales are, and by scales of the lines of each layout. Sizes of a model of
    8B."""
    M, K = (8192, 14336) if device.type == "cuda" else (256, 512)
    kernel = REGISTRY["fp8_cast"][name]
    x_MK = torch.randn(M, K, device=device).to(training_dtype(device))
    where = f"{M} x {K}, a scale for"
    size = M * K
    for what, block in BLOCKS.items():
        scale = scale_of(kernel.amax(x_MK, block=block), E4M3)

        def find(block: Block = block) -> Tensor:
            return kernel.scale(x_MK, block=block, dtype=E4M3)

        def cast(block: Block = block, scale: Tensor = scale) -> object:
            return kernel.cast(x_MK, scale, block=block, dtype=E4M3, columns=True)

        yield Work(f"scales, {where} {what}", find, x_MK.itemsize * size, "bytes")
        yield Work(f"cast, both layouts, {where} {what}", cast, (x_MK.itemsize + 2) * size, "bytes")
    yield from _known(name, device)
    yield from _lines(kernel, device, name)
    yield from _columns(kernel, device)
    yield from _of_groups(kernel, device, name)


def _columns(kernel: Fp8CastKernel, device: torch.device) -> Iterator[Work]:
    """Rows that were gathered in fp8, turned round."""
    shapes = [(8192, 4096), (16384, 8192)] if device.type == "cuda" else [(256, 512)]
    for M, K in shapes:
        x8_MK = torch.randn(M, K, device=device).to(E5M2)
        call = _alone(partial(kernel.columns, x8_MK), device)
        yield Work(f"columns of fp8, {M} x {K}", call, 2 * M * K, "bytes", copy_of(2 * M * K, device))


def _lines(kernel: Fp8CastKernel, device: torch.device, name: str) -> Iterator[Work]:
    """Inputs and gradients of layers, in both layouts by scales of lines: of whole ones in two passes, the first of
    which only reads, of short ones in one."""
    shapes = [(256, 512)]
    compared = shapes
    if device.type == "cuda":
        shapes = [(8192, 4096), (8192, 6144), (8192, 14336), (8192, 28672)]
        compared = [(8192, 4096), (8192, 14336)]
    for M, K in shapes:
        x_MK = torch.randn(M, K, device=device).to(training_dtype(device))
        amax = kernel.amax_of_lines(x_MK)
        read = x_MK.itemsize * M * K
        written = 2 * M * K
        has_tiles = name == "triton" and (M, K) in compared
        for what, form in _forms(TILES_OF_LARGEST if has_tiles else {}):
            find = _alone(partial(kernel.amax_of_lines, x_MK, **form), device)
            title = f"largest elements of all rows and columns, {M} x {K}{what}"
            yield Work(title, find, read, "bytes", copy_of(read, device))
        both = _alone(partial(kernel.quantise_lines, x_MK, dtype=E4M3), device)
        title = f"scales of all rows and columns, cast, both layouts, {M} x {K}"
        yield Work(title, both, 2 * read + written, "bytes", copy_of(2 * read + written, device))
        amount = read + written
        for what, form in _forms(TILES_OF_LINES if has_tiles else {}):
            cast = _alone(partial(kernel.quantise_lines, x_MK, dtype=E4M3, amax=amax, **form), device)
            title = f"cast by known scales of rows and of columns, both layouts, {M} x {K}{what}"
            yield Work(title, cast, amount, "bytes", copy_of(amount, device))
        for what, form in _forms(TILES_OF_SHORT_LINES if has_tiles else {}):
            both = _alone(partial(kernel.quantise_short_lines, x_MK, dtype=E4M3, **form), device)
            title = f"scales of 1x128 and 128x1, cast, both layouts, {M} x {K}{what}"
            yield Work(title, both, amount, "bytes", copy_of(amount, device))


def _forms(tiles: dict[str, Tile]) -> Iterator[tuple[str, dict[str, Tile]]]:
    """What a run takes, then each of the tiles: how titles tell it, and what the call is given."""
    yield "", {}
    for what, tile in tiles.items():
        yield f", tile {what}", {"tile": tile}


def known_one(dtype: torch.dtype, device: torch.device) -> Known:
    """A scale of one that is known, with what kernels record beside it."""
    return Known(
        torch.ones(1, device=device),
        torch.zeros(1, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
        dtype,
    )


def unbalanced_ends(groups: int, rows: int, device: torch.device) -> Tensor:
    """Ends of groups as routers choose them, int32 [groups]: one has eight times its share, every eighth none, and the
    others the rest in sizes that fill no unit."""
    sizes = []
    rest = rows - 8 * rows // groups
    others = [group for group in range(1, groups) if group % 8 != 7]
    for group in range(groups):
        size = 0
        if group == 0:
            size = 8 * rows // groups
        elif group in others:
            # a third more for one half of them than for the other
            share = rest * (8 if group % 2 else 6) // (7 * len(others))
            # odd
            size = share - 1 + share % 2
        sizes.append(size)
    # whatever that leaves
    sizes[others[-1]] += rows - sum(sizes)
    assert min(sizes) >= 0, f"{rows} rows are too few for {groups} groups: {sizes}"
    return torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)


def tokens_of_rows(ends_E: Tensor, tokens: int) -> Tensor:
    """int32 [rows]: within each group every row is another token's, the earlier one first."""
    draw = torch.Generator().manual_seed(1)
    parts = []
    for size in torch.diff(ends_E.cpu(), prepend=torch.zeros(1, dtype=torch.int32)).tolist():
        parts.append(torch.randperm(tokens, generator=draw)[:size].sort().values)
    return torch.cat(parts).to(torch.int32).to(ends_E.device)


def _of_groups(kernel: Fp8CastKernel, device: torch.device, name: str) -> Iterator[Work]:
    """Rows of 32 unequal groups, as a layer like gpt-oss-20b's takes 8 k tokens: what experts take and the gradient of
    the first product, by a scale that is known and by those of groups; and matrices, whose largest elements are found
    first."""
    E, rows, tokens, widths = (32, 32768, 8192, (2880, 5760))
    if device.type != "cuda":
        E, rows, tokens, widths = (32, 256, 64, (96,))
    ends_E = unbalanced_ends(E, rows, device)
    groups = kernel.groups(ends_E, rows)
    start = partial(kernel.groups, ends_E, rows)
    yield Work(
        f"places of {E} unequal groups of {rows} rows", _alone(start, device), 12 * groups.first.numel(), "bytes"
    )
    index_R = tokens_of_rows(ends_E, tokens)
    for K in widths:
        x_RI = torch.randn(rows, K, device=device).to(training_dtype(device))
        where = f"{E} unequal groups of {rows} x {K}"
        find = partial(kernel.group_amax, x_RI, ends_E)
        amount = x_RI.itemsize * x_RI.numel()
        yield Work(f"largest elements of {where}", _alone(find, device), amount, "bytes")
        amount = (x_RI.itemsize + 2) * x_RI.numel()
        of_groups = scale_of(kernel.group_amax(x_RI, ends_E), E4M3)
        by_column = scale_of(kernel.group_amax(x_RI, ends_E, by_column=True), E4M3)
        for what, scale in (("groups", of_groups), ("columns of groups", by_column)):
            cast = partial(kernel.group_cast, x_RI, scale, groups, dtype=E4M3, columns=True)
            title = f"cast of groups, both layouts, scales of {what}, {where}"
            yield Work(title, _alone(cast, device), amount, "bytes", copy_of(amount, device))
        known = {
            "scale": torch.full((1, 1), 2.0**-4, device=device),
            "seen": torch.zeros(1, device=device),
            "saturated": torch.zeros(1, dtype=torch.int64, device=device),
            "scale_copy": torch.empty(1, 1, device=device),
        }
        known |= {"groups": groups, "dtype": E4M3, "columns": True}
        # the first one is what a run takes
        forms: dict[str, dict[str, object]] = {"": {}}
        if name == "triton":
            for tile, form in TILES.items():
                forms[f", tile {tile}"] = {"tile": form}
        for what, form in forms.items():
            cast = partial(kernel.group_cast, x_RI, **known, **form)
            title = f"cast of groups by a known scale, both layouts, recorded, {where}{what}"
            yield Work(title, _alone(cast, device), amount, "bytes", copy_of(amount, device))
            # every token is read once at least
            x_MI = x_RI[:tokens]
            least = x_MI.itemsize * x_MI.numel() + 2 * x_RI.numel()
            cast = partial(kernel.group_cast, x_MI, index_R=index_R, **known, **form)
            title = f"the same, gathered from {tokens} tokens, {where}{what}"
            yield Work(title, _alone(cast, device), least, "bytes", copy_of(least, device))
    K = widths[0]
    weight = torch.randn(E * 2 * K, K, device=device).to(training_dtype(device))
    ends_E = torch.arange(1, E + 1, device=device, dtype=torch.int32) * (2 * K)
    find = partial(kernel.group_amax, weight, ends_E)
    amount = weight.itemsize * weight.numel()
    yield Work(f"largest elements of {E} matrices, {2 * K} x {K}", find, amount, "bytes", copy_of(amount, device))


def _alone(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Without what the host takes to start it, where it may take longer than the kernel."""
    return on_device(call) if device.type == "cuda" else call


def _known(name: str, device: torch.device) -> Iterator[Work]:
    """One pass by a scale that is known: inputs and gradients of layers."""
    shapes = [(256, 512)]
    compared = shapes
    if device.type == "cuda":
        shapes = [(8192, 4096), (8192, 6144), (8192, 14336), (8192, 28672)]
        compared = [(8192, 4096), (8192, 14336)]
    for M, K in shapes:
        x_MK = torch.randn(M, K, device=device).to(training_dtype(device))
        scale = torch.full((1, 1), 2.0**-4, device=device)
        seen = torch.zeros(1, device=device)
        saturated = torch.zeros(1, dtype=torch.int64, device=device)
        amount = (x_MK.itemsize + 2) * M * K
        # of some shapes all tiles, of which the first one is what a run takes
        forms: dict[str, dict[str, object]] = {"": {}}
        if name == "triton" and (M, K) in compared:
            for tile, form in TILES.items():
                forms[f", tile {tile}"] = {"tile": form}
        for what, form in forms.items():
            call = partial(
                REGISTRY["fp8_cast"][name].cast,
                x_MK,
                scale,
                block=(None, None),
                dtype=E5M2,
                columns=True,
                seen=seen,
                saturated=saturated,
                scale_copy=torch.empty_like(scale),
                **form,
            )
            if device.type == "cuda":
                # a kernel may run for less than the host takes to start it
                call = on_device(call)
            title = f"cast by a known scale, both layouts, recorded, {M} x {K}{what}"
            yield Work(title, call, amount, "bytes", copy_of(amount, device))


BENCH = Bench(held, works)
