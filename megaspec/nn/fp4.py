"""Linear layers whose three products take NVFP4 (NVIDIA 2025, arXiv 2509.25149): blocks of 16 numbers, and a scale for
the matrix.

The roles, what is kept and who asks whom are those of fp8.py. Ranks that hold parts of a matrix agree on its largest
element, of rows and of columns together; blocks lie on one rank, whose widths are multiples of 32 (a rule).
"""

# M tokens, I inputs, O outputs

from dataclasses import dataclass

import torch
from torch import Tensor

from megaspec.nn.fp8 import Fp8Linear, Fp8Pair, Fp8Tensor
from megaspec.nn.fp8_layouts import Role
from megaspec_kernels.linear.factors import Factor
from megaspec_kernels.linear.nvfp4 import ALONE, Agreement, Rounding
from megaspec_kernels.registry import NvFp4Kernel


@dataclass(frozen=True)
class Fp4Form:
    """How the layers of a model compute in NVFP4; see Fp8Form."""

    rounding: Rounding
    """Of gradients of outputs."""
    kernel: NvFp4Kernel

    recipe = "nvfp4"
    gradient_format = "e4m3"
    """Of scales; nothing else of fp8 is there."""
    counts_saturated = False
    takes_written = False

    def memory_dtype(self, wide: torch.dtype) -> torch.dtype:
        """See Fp8Form. Nothing is remembered."""
        return wide


class Fp4Linear(Fp8Linear):
    """One linear layer's side of it."""

    form: Fp4Form

    def known(self, role: Role) -> None:
        """See Fp8Linear. Nobody else writes it."""
        return None

    def quantise(self, x_MK: Tensor, role: Role, *, rows: bool = True, columns: bool = True) -> Fp8Pair:
        """See Fp8Linear. Rows are made in any case: of a matrix in two layouts one cast makes both."""
        agreement = ALONE
        if self.is_divided(role):
            agreement = Agreement(self.largest, self.group)
        cast = self.form.kernel.cast(x_MK, role, rounding=self.form.rounding, columns=columns, agreement=agreement)
        in_columns = None
        if columns:
            in_columns = Fp8Tensor(*cast.columns)
        return Fp8Pair(Fp8Tensor(*cast.rows), in_columns)

    def for_columns(self, x_MI: Tensor, in_rows: Fp8Tensor | None) -> Fp8Tensor:
        """See Fp8Linear. In columns."""
        return self.quantise(x_MI, "input").columns

    def product(
        self,
        a: Fp8Tensor,
        b: Fp8Tensor,
        roles: tuple[Role, Role],
        *,
        along: str,
        dtype: torch.dtype,
        into: Tensor | None = None,
        overwrite: bool = False,
    ) -> Tensor:
        """See Fp8Linear. The product itself adds."""
        # its first factor is our second one
        found = self.form.kernel.product(
            Factor(*b), Factor(*a), dtype=dtype, into=into, overwrite=into is None or overwrite
        )
        return found
