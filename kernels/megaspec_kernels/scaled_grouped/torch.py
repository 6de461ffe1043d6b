"""Grouped fp8 products through torch's _scaled_grouped_mm: on Hopper one CUTLASS kernel that reads the groups itself.

It takes e4m3 alone, a scale for each row and each column of a result, and writes bf16, of sums in fp32. A scale of
something larger is one for all of its rows.
"""

# E groups, R rows, K numbers that a sum is over, N columns of the result, P rows with padding, O outputs, I inputs

import torch
from torch import Tensor


def product(
    a_RK: Tensor,
    b_ENK: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    ends_E: Tensor,
    *,
    dtype: torch.dtype,
    whole: bool = True,
    fast: bool = False,
) -> Tensor:
    """See reference.py; `dtype` is bf16. N and K are multiples of 16, R is any number. The host reads nothing."""
    assert dtype == torch.bfloat16, f"torch's grouped products write bf16, not {dtype}"
    E, N, _ = b_ENK.shape
    R = a_RK.shape[0]
    if R == 0:
        return a_RK.new_zeros(0, N, dtype=dtype)
    if a_RK.is_meta:
        return a_RK.new_empty(R, N, dtype=dtype)
    out_RN = torch._scaled_grouped_mm(
        a_RK,
        b_ENK.transpose(1, 2),
        a_scale.view(-1).expand(R).contiguous(),
        b_scale.expand(E, N).contiguous(),
        offs=ends_E,
        out_dtype=dtype,
        use_fast_accum=fast,
    )
    if not whole:
        # rows of no group are never written
        past_R = torch.arange(R, device=out_RN.device) >= ends_E[-1]
        return out_RN.masked_fill_(past_R[:, None], 0)
    return out_RN


def weight_product(
    a_OP: Tensor, b_IP: Tensor, a_scale: Tensor, b_scale: Tensor, ends_E: Tensor, *, dtype: torch.dtype
) -> Tensor:
    """See reference.py; in bf16 whatever `dtype` says, as the bf16 grouped product rounds it: whoever adds it up widens
    it on the way, which saves a pass. O and I are multiples of 16, and so are P and all ends."""
    E = ends_E.shape[0]
    O = a_OP.shape[0]  # noqa: E741
    I = b_IP.shape[0]  # noqa: E741
    if a_OP.is_meta:
        return a_OP.new_empty(E, O, I, dtype=torch.bfloat16)
    return torch._scaled_grouped_mm(
        a_OP,
        b_IP.t(),
        # of each group one behind the other
        a_scale.expand(E, O).reshape(-1).contiguous(),
        b_scale.expand(E, I).reshape(-1).contiguous(),
        offs=ends_E,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
