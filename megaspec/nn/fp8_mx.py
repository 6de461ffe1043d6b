"""Linear layers whose three products take MXFP8 (OCP Microscaling Formats 1.0): blocks of 32 numbers along which a
product sums.

The roles, what is kept and who asks whom are those of fp8.py. A block never goes across ranks: they divide features by
multiples of 32 (a rule), and tokens that others hold are gathered before they are quantised. So no rank asks another
for a largest element, and nothing is remembered over steps.
"""

# M tokens, I inputs, O outputs

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megaspec.nn.fp8 import Fp8Linear, Fp8Pair, Fp8Tensor
from megaspec.nn.fp8_layouts import FORMATS, Role
from megaspec.nn.fp8_te import LAYOUTS
from megaspec_kernels.linear.factors import Factor
from megaspec_kernels.registry import MxFp8Kernel


@dataclass(frozen=True)
class MxFp8Form:
    """How the layers of a model compute in MXFP8; see Fp8Form."""

    gradient_format: Literal["e4m3", "e5m2"]
    kernel: MxFp8Kernel

    recipe = "mxfp8"
    counts_saturated = False
    takes_written = False

    def memory_dtype(self, wide: torch.dtype) -> torch.dtype:
        """See Fp8Form. Nothing is remembered."""
        return wide

    def dtype(self, role: Role) -> torch.dtype:
        return FORMATS[self.gradient_format if role == "gradient" else "e4m3"]


class MxFp8Linear(Fp8Linear):
    """One linear layer's side of it."""

    form: MxFp8Form

    def known(self, role: Role) -> None:
        """See Fp8Linear. Nobody else writes blocks of 32."""
        return None

    def quantise(self, x_MK: Tensor, role: Role, *, rows: bool = True, columns: bool = True) -> Fp8Pair:
        """See Fp8Linear. Each layout by scales of its own, made of the numbers themselves."""
        cast = self.form.kernel.cast(x_MK, self.form.dtype(role), rows=rows, columns=columns)
        in_rows = None
        in_columns = None
        if rows:
            in_rows = Fp8Tensor(*cast.rows)
        if columns:
            in_columns = Fp8Tensor(*cast.columns)
        return Fp8Pair(in_rows, in_columns)

    def for_columns(self, x_MI: Tensor, in_rows: Fp8Tensor | None) -> Fp8Tensor:
        """See Fp8Linear. They lie so."""
        return self.quantise(x_MI, "input", rows=False).columns

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
        layout = LAYOUTS[roles]
        # its first factor is our second one
        return self.form.kernel.product(
            layout,
            Factor(*b),
            Factor(*a),
            dtype=dtype,
            # as Transformer Engine has it: fewer bits in the sums of the forward pass alone
            fast=layout == "TN",
            into=into,
            overwrite=into is None or overwrite,
        )
