"""What kernels that write fp8 by a known scale are held to."""

import torch
from torch import Tensor

from megaspec_kernels.fp8_cast.formats import LARGEST, Known
from megaspec_kernels.fp8_cast.tile import Written


def known_of(scale: float, dtype: torch.dtype, device: torch.device, *, seen: float | None = 0.0) -> Known:
    """Nothing has been recorded but `seen`; None: nothing is."""
    return Known(
        torch.tensor([scale], device=device),
        None if seen is None else torch.tensor([seen], device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
        dtype,
    )


def check_written(written: Written, truth_MK: Tensor, known: Known) -> None:
    """`check_rows`, and in both layouts the same bits."""
    assert torch.equal(written.rows.view(torch.uint8).t(), written.columns.view(torch.uint8))
    assert written.columns.is_contiguous()
    check_rows(written, truth_MK, known)


def check_rows(written: Written, truth_MK: Tensor, known: Known) -> None:
    """The nearest numbers of the format to fp64 ones, or the next where those lie close to the middle of two. What was
    recorded is what there is."""
    assert torch.equal(written.scale, known.scale.view(1, 1))
    scale = known.scale.double()
    got = written.rows.double() * scale
    finite = torch.isfinite(truth_MK)
    assert torch.equal(torch.isfinite(got), finite)
    size = torch.where(finite, truth_MK, 0).abs()
    most = LARGEST[known.dtype] * scale
    bits = 3 if known.dtype == torch.float8_e4m3fn else 2
    least = -6 if known.dtype == torch.float8_e4m3fn else -14
    # half a step of the format at each number, and what fp32 sums are off
    exponent = torch.floor(torch.log2((size / scale).clamp(min=2.0**least)))
    half = torch.exp2(exponent - bits - 1) * scale
    error = (got - truth_MK.clamp(-most, most)).abs()
    allowed = half + 1e-5 * size + 1e-6 * size.max()
    assert (error[finite] <= allowed[finite]).all(), (error - allowed)[finite].max()
    is_over = size > most
    assert abs(int(known.saturated) - int(is_over.sum())) <= int((abs(size / most - 1) < 1e-5).sum())
    if known.seen is not None:
        torch.testing.assert_close(known.seen.double(), size.max().view(1), rtol=1e-5, atol=0.0)
