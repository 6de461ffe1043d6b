"""What the plan counts of fp8, against the passes that a layer asks kernels for and, where it is computed operation by
operation, the bytes that its operations move."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaspec.estimate.work import (
    DEQUANTISED,
    FP8_CAST,
    FP8_CAST_APART,
    FP8_WEIGHT_CAST,
    PLAIN_FP8_CAST,
    ROUNDED,
    SUMMED,
)
from megaspec.nn.fp8 import BLOCKS, REMEMBERED, Fp8Form, Fp8Linear, Fp8Memory, Fp8Shared, Role, has_one_scale
from megaspec_kernels.fp8_cast import reference as fp8_cast
from megaspec_kernels.fp8_cast.formats import Block, scale_shape
from megaspec_kernels.registry import REGISTRY
from megaspec_kernels.scaled_product.reference import scaled_product

E4M3 = torch.float8_e4m3fn
# Large enough that what is counted once for a matrix is nothing beside its numbers.
M = 512
K = 256
N = 384


class MovedBytes(TorchDispatchMode):
    """Counts what operations read and write, views and matrix products apart."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        taken = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        results = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
        if function is torch.ops.aten.mm.default or function.is_view:
            return made
        self.total += sum(one.nbytes for one in (*taken, *results))
        return made


def moved(run: Callable[[], object]) -> int:
    with MovedBytes() as counted:
        run()
    return counted.total


def quantised(x: Tensor, block: Block, *, rows: bool, columns: bool) -> None:
    scale = fp8_cast.scale(x, block=block, dtype=E4M3)
    fp8_cast.cast(x, scale, block=block, dtype=E4M3, rows=rows, columns=columns)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_the_cast(recipe: str) -> None:
    x = torch.randn(M, K, dtype=torch.bfloat16)
    blocks = BLOCKS[recipe]["input"]
    if recipe == "tensorwise":
        found = moved(lambda: quantised(x, blocks.rows, rows=True, columns=True))
    else:
        found = moved(lambda: quantised(x, blocks.rows, rows=True, columns=False))
        found += moved(lambda: quantised(x, blocks.columns, rows=False, columns=True))
    assert found / x.numel() == pytest.approx(PLAIN_FP8_CAST[recipe], rel=0.01)


def test_the_cast_by_a_delayed_scale() -> None:
    x = torch.randn(M, K, dtype=torch.bfloat16)

    def run() -> None:
        seen = torch.zeros(1)
        saturated = torch.zeros(1, dtype=torch.int64)
        scale = torch.ones(1, 1)
        block = (None, None)
        fp8_cast.cast(x, scale, block=block, dtype=E4M3, columns=True, seen=seen, saturated=saturated)

    assert moved(run) / x.numel() == pytest.approx(PLAIN_FP8_CAST["delayed"], rel=0.01)


@pytest.mark.parametrize(("block", "into"), [((None, None), None), ((1, None), None), ((None, None), "sum")], ids=str)
def test_the_product(block: Block, into: str | None) -> None:
    a = torch.randn(M, K).to(E4M3)
    b = torch.randn(N, K).to(E4M3)
    a_scale = torch.ones(scale_shape(block, (M, K)))
    b_scale = torch.ones(scale_shape(block, (N, K)))
    blocks = {"a_block": block, "b_block": block}
    if into is None:
        found = moved(lambda: scaled_product(a, b, a_scale, b_scale, **blocks, dtype=torch.bfloat16))
        assert found == pytest.approx(DEQUANTISED * (M + N) * K + ROUNDED * M * N, rel=0.01)
        return
    total = torch.zeros(M, N)
    found = moved(lambda: scaled_product(a, b, a_scale, b_scale, **blocks, dtype=torch.float32, into=total))
    # the tensor that is added to is read, and what is returned counts once
    assert found == pytest.approx(DEQUANTISED * (M + N) * K + SUMMED * M * N, rel=0.01)


class CountedPasses:
    """Bytes of a number in bf16 that kernels move, which read it once for its scale and once for the cast."""

    def __init__(self) -> None:
        self.total = 0

    def scale(self, x: Tensor, **rest: Any) -> Tensor:
        self.total += 2
        return fp8_cast.scale(x, **rest)

    def cast(self, x: Tensor, scale: Tensor, *, rows: bool = True, columns: bool = False, **rest: Any) -> Any:
        self.total += 2 + rows + columns
        return fp8_cast.cast(x, scale, rows=rows, columns=columns, **rest)

    def scales_of_lines(self, x: Tensor, **rest: Any) -> Any:
        self.total += 2
        return fp8_cast.scales_of_lines(x, **rest)

    def cast_lines(self, x: Tensor, *scales: Tensor, **rest: Any) -> Any:
        self.total += 2 + 2
        return fp8_cast.cast_lines(x, *scales, **rest)

    def quantise_short_lines(self, x: Tensor, **rest: Any) -> Any:
        self.total += 2 + 2
        return fp8_cast.quantise_short_lines(x, **rest)


def passes_of(recipe: str, role: Role, *, apart: bool = False) -> int:
    """Of what a layer quantises in a step that is not its first. `apart`: each layout by itself."""
    counted = CountedPasses()
    cast = replace(
        REGISTRY["fp8_cast"]["reference"],
        scale=counted.scale,
        cast=counted.cast,
        scales_of_lines=counted.scales_of_lines,
        cast_lines=counted.cast_lines,
        quantise_short_lines=counted.quantise_short_lines,
    )
    memory = None
    if recipe == "delayed":
        memory = Fp8Memory(torch.ones(2), torch.zeros(2), torch.zeros(1, dtype=torch.int64), fresh=frozenset())
    form = Fp8Form(recipe, "e4m3", 0, cast, scaled_product)
    layer = Fp8Linear(form, Fp8Shared(is_recording=True), memory=memory)
    x = torch.randn(M, K, dtype=torch.bfloat16)
    if apart:
        layer.quantise(x, role, columns=False)
        layer.quantise(x, role, rows=False)
    else:
        layer.quantise(x, role)
    return counted.total


@pytest.mark.parametrize("recipe", BLOCKS)
def test_passes_of_kernels(recipe: str) -> None:
    for role in REMEMBERED:
        assert passes_of(recipe, role) == FP8_CAST[recipe], role
        if not has_one_scale(recipe):
            assert passes_of(recipe, role, apart=True) == FP8_CAST_APART[recipe], role
    assert passes_of(recipe, "weight") == FP8_WEIGHT_CAST[recipe]
