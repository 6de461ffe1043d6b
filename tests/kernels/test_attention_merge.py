"""Blocks of attention put together in place, against fp64; strided slices, and queries that see nothing of a block."""

import pytest
import torch
from torch import Tensor

from megaspec_kernels.attention_merge import reference, triton
from megaspec_kernels.gate import check

INTERPRETED = triton.triton is not None and triton.triton.knobs.runtime.interpret
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1, 1), (2, 7, 3, 64), (1, 63, 4, 128), (3, 5, 2, 80)]
# a thousand rows are for a GPU: the interpreter takes one program after the other
LARGE = pytest.param((2, 1000, 8, 128), marks=pytest.mark.gpu)

pytestmark = [
    pytest.mark.parametrize("implementation", ["reference", "triton"]),
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    pytest.mark.parametrize("shape", [*SHAPES, LARGE], ids=str),
]


def module_of(implementation: str, device: torch.device):
    if implementation == "reference":
        return reference
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("runs under TRITON_INTERPRET=1: test_triton_interpreted.py")
    return triton


def half(x: Tensor, dim: int) -> Tensor:
    """The same numbers as the second half of a longer dimension, the first of which is NaN."""
    longer = torch.cat((torch.full_like(x, torch.nan), x), dim)
    return longer.narrow(dim, x.shape[dim], x.shape[dim])


def test_merge(implementation: str, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    (B, T, N, _), wide = shape, torch.promote_types(dtype, torch.float32)
    draw = torch.Generator().manual_seed(sum(shape))
    out, new = torch.randn(2, *shape, generator=draw).to(dtype).double().to(device)
    lse, new_lse = (20 * torch.randn(2, B, N, T, generator=draw)).double().to(device)
    new_lse[0, 0, T // 2] = -torch.inf
    new[0, T // 2, 0] = 0
    total = torch.logaddexp(lse, new_lse)
    a, b = ((x - total).exp().transpose(1, 2)[..., None] for x in (lse, new_lse))
    truth = {"out": a * out + b * new, "lse": total}

    def merged(module) -> dict[str, Tensor]:
        mine = half(out.to(wide), 1), half(lse.to(wide), 2)
        # heads before tokens, as an operator may lay them
        turned = half(new.to(dtype).transpose(1, 2), 2).transpose(1, 2)
        assert N == 1 or turned.stride(1) < turned.stride(2)
        module.merge(*mine, turned, new_lse.to(wide))
        return dict(zip(("out", "lse"), mine, strict=True))

    check(merged(module_of(implementation, device)), merged(reference), truth)


def test_add(implementation: str, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    draw = torch.Generator().manual_seed(sum(shape))
    total, new = torch.randn(2, *shape, generator=draw).to(dtype).double().to(device)

    def added(module) -> dict[str, Tensor]:
        mine = half(total.to(torch.promote_types(dtype, torch.float32)), 1)
        module.add(mine, half(new.to(dtype), 3))
        return {"out": mine}

    check(added(module_of(implementation, device)), added(reference), {"out": total + new})
