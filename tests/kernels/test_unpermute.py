"""Sums of tokens' rows against fp64, with choices that were dropped and tokens that lost all of theirs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megaspec_kernels.gate import check, filled_with_nan
from megaspec_kernels.registry import REGISTRY
from megaspec_kernels.unpermute import reference
from megaspec_kernels.unpermute import triton as triton

INTERPRETED = triton.triton is not None and triton.triton.knobs.runtime.interpret


def inputs_of(M: int, k: int, D: int, *, drops: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    draw = torch.Generator().manual_seed(M + k + D)
    place = torch.randperm(M * k, generator=draw).view(M, k)
    kept = None
    if drops:
        kept = torch.rand(M, k, generator=draw) < 0.6
        kept[M // 2] = False
        kept[0] = True
        place = torch.where(kept, place, 0)
        kept = kept.to(device)
    y = torch.randn(M * k, D, generator=draw, dtype=torch.float64).to(device)
    return y, place.to(device), kept


@pytest.mark.parametrize("implementation", list(REGISTRY["unpermute"]))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(("M", "k", "D"), [(1, 1, 1), (9, 8, 64), (7, 3, 1000), (2, 2, 4097)])
def test_sums(
    implementation: str, dtype: torch.dtype, drops: bool, M: int, k: int, D: int, device: torch.device
) -> None:
    if implementation == "triton" and device.type == "cpu" and not INTERPRETED:
        pytest.skip("runs under TRITON_INTERPRET=1: test_triton_interpreted.py")
    function: Callable[..., Tensor] = REGISTRY["unpermute"][implementation]
    y, place, kept = inputs_of(M, k, D, drops=drops, device=device)
    one_by_one = torch.zeros(M, D, dtype=torch.float64, device=device)
    for m in range(M):
        for j in range(k):
            if kept is None or kept[m, j]:
                one_by_one[m] += y[place[m, j]]
    with filled_with_nan():
        # every second column of a wider tensor: not contiguous
        fast = function(y.to(dtype).repeat_interleave(2, dim=1)[:, ::2], place, kept)
    plain = reference.unpermute(y.to(dtype), place, kept)
    check({"out": fast}, {"out": plain}, {"out": one_by_one})
