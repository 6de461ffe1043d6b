"""What the plan counts of fp8 that is computed operation by operation, against the bytes that its operations move."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaspec.estimate.work import DEQUANTISED, PLAIN_FP8_CAST, ROUNDED, SUMMED
from megaspec.nn.fp8 import BLOCKS
from megaspec_kernels.fp8_cast import reference as fp8_cast
from megaspec_kernels.fp8_cast.formats import Block, scale_shape
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
