"""What evens the load of experts: Sinkhorn's balancing, capacities."""

# N tokens of the whole micro batch, E experts, k choices of a token

import torch
from torch import Tensor

_SINKHORN_PASSES = 64
_SINKHORN_EPS = 1e-8
# Weights that differ by less than this share a rank when experts drop tokens: see within_capacity.
_WEIGHT_STEP = 2.0**-16


def sinkhorn(logits_NE: Tensor, *, tolerance: float = 1e-4) -> Tensor:
    """exp(logits) with rows and columns scaled to sum to 1/N and 1/E each, in at least fp32 (Clark et al. 2022).

    Scaling stops where the columns' factors move by less than `tolerance` on average, or after 64 passes; nobody reads
    the device to find out: later passes change nothing.
    """
    wide = logits_NE.to(torch.promote_types(logits_NE.dtype, torch.float32))
    N, E = wide.shape
    # a factor on a row cancels in the result, and the largest can't overflow
    mass_NE = (wide - wide.amax(dim=1, keepdim=True)).exp()
    rows_N = wide.new_ones(N)
    columns_E = wide.new_ones(E)
    # on the device, where a pass that is not needed any more selects what it had
    done = torch.zeros((), dtype=torch.bool, device=wide.device)
    for _ in range(_SINKHORN_PASSES):
        rows_N = torch.where(done, rows_N, 1 / N / (mass_NE @ columns_E + _SINKHORN_EPS))
        moved_E = torch.where(done, columns_E, 1 / E / (rows_N @ mass_NE + _SINKHORN_EPS))
        done = done | ((moved_E - columns_E).abs().mean() <= tolerance)
        columns_E = moved_E
    return rows_N[:, None] * mass_NE * columns_E


def within_capacity(experts_Nk: Tensor, weights_Nk: Tensor | None, *, n_experts: int, capacity: int) -> Tensor:
    """bool [N, k]: the choices that experts have room for: the highest weights, or the first tokens without weights.

    Of equal weights the earlier token comes first. Weights count in steps of 2^-16: where packed documents begin with
    the same token, those tokens' weights are equal but for rounding, which must not say who is dropped.
    """
    # C = N·k choices, numbered token by token
    chosen_C = experts_Nk.flatten()
    count_C = torch.arange(chosen_C.shape[0], device=chosen_C.device)
    # choices, the one to keep first at the front
    order_C = count_C
    if weights_Nk is not None:
        order_C = (weights_Nk.flatten() / _WEIGHT_STEP).round().argsort(descending=True, stable=True)
    # now by expert: the sort is stable, so that within an expert they stay in that order
    order_C = order_C[chosen_C[order_C].argsort(stable=True)]
    ranked_C = chosen_C[order_C]
    # an expert's choices lie side by side from `first` on; `place` counts within the expert
    first_E = torch.searchsorted(ranked_C, torch.arange(n_experts, device=chosen_C.device))
    place_C = count_C - first_E[ranked_C]
    has_room_C = place_C < capacity
    return torch.empty_like(chosen_C, dtype=torch.bool).scatter(0, order_C, has_room_C).view_as(experts_Nk)


def load(experts_BTk: Tensor, n_experts: int, which_BTk: Tensor | None = None) -> Tensor:
    """int64 [B, E]: how many tokens of each sequence chose each expert; `which`: only these choices."""
    chosen_BTE = torch.zeros(*experts_BTk.shape[:2], n_experts, dtype=torch.bool, device=experts_BTk.device)
    if which_BTk is None:
        return chosen_BTE.scatter(-1, experts_BTk, True).sum(1)
    return chosen_BTE.scatter(-1, experts_BTk, which_BTk).sum(1)
