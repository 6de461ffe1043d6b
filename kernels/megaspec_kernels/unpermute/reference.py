"""The sum of some rows for each token."""

# M tokens, k choices of a token, R rows, D features

import torch
from torch import Tensor


def unpermute(y_RD: Tensor, place_Mk: Tensor, kept_Mk: Tensor | None) -> Tensor:
    """out[m] = Σ_j y[place[m, j]] over the choices j that are kept, [R, D] -> [M, D], summed in at least fp32.

    `place_Mk`: int64 in [0, R), R > 0. `kept_Mk`: bool; None: all.
    """
    rows_MkD = y_RD[place_Mk]
    if kept_Mk is not None:
        # not a product: 0 · inf is no number
        rows_MkD = torch.where(kept_Mk[..., None], rows_MkD, 0)
    return rows_MkD.sum(1)
