"""Matrices with all singular values brought to about 1, by matrix products alone."""

# G matrices, O outputs, I inputs

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

# One (a, b, c) an iteration: x -> a x + b x³ + c x⁵ on each singular value. simple: Jordan et al. 2024, the steepest at
# 0 that stays near 1. quintic: five that were tuned one after the other, from modded-nanogpt.
COEFFICIENTS = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
_SMALLEST_NORM = 1e-7


def working_dtype(like: Tensor) -> torch.dtype:
    """What matrices are orthogonalised in: bf16 on CUDA, fp32 on a CPU, fp64 where the master weights are fp64.

    The iteration forgives the rounding of bf16 (Jordan et al. 2024).
    """
    if torch.promote_types(like.dtype, torch.float32) == torch.float64:
        return torch.float64
    if like.is_cuda:
        return torch.bfloat16
    return torch.float32


def orthogonalised(x_GOI: Tensor, *, steps: int, coefficients: Literal["simple", "quintic"]) -> Tensor:
    """Each matrix U S Vᵀ -> about U Vᵀ in the same dtype; zero stays zero (Bernstein and Newhouse 2024)."""
    # the iteration multiplies by x xᵀ, which is smaller for a wide matrix than for a tall one
    is_tall = x_GOI.shape[-2] > x_GOI.shape[-1]
    x = x_GOI.mT if is_tall else x_GOI
    # the iteration begins with singular values of at most 1, and the Frobenius norm bounds them
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide).clamp(min=_SMALLEST_NORM)
    x = (x / norm).to(x_GOI.dtype)
    table = COEFFICIENTS[coefficients]
    for step in range(steps):
        a, b, c = table[min(step, len(table) - 1)]
        # a x + (b x xᵀ + c (x xᵀ)²) x
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def orthogonalised_all(
    matrices: Sequence[Tensor], *, steps: int, coefficients: Literal["simple", "quintic"]
) -> list[Tensor]:
    """`orthogonalised` of matrices [O, I] of any shapes, those of one shape together."""
    alike: dict[torch.Size, list[int]] = defaultdict(list)
    for i, matrix in enumerate(matrices):
        alike[matrix.shape].append(i)
    done: dict[int, Tensor] = {}
    for indices in alike.values():
        together = torch.stack([matrices[i] for i in indices])
        results = orthogonalised(together, steps=steps, coefficients=coefficients)
        done |= dict(zip(indices, results, strict=True))
    return [done[i] for i in range(len(matrices))]
