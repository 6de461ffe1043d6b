"""Linear layers whose three products take fp8 through Transformer Engine's casts and products.

The layouts, the roles, what is kept and who asks whom are those of fp8.py; only what touches numbers differs. Scales
are Transformer Engine's: the format's largest number over amax, which is no power of two, but for blocks.

Note "Scales over steps". Its delayed scaling keeps a history of its own, which moves with each micro batch and lies in
buffers of its modules. Here the history is that of parallelism/fp8.py: it moves once a step, so that it is a property
of the step and not of the layout, lies in checkpoints by the weight's global name, and holds what all ranks saw. The
formula is Transformer Engine's, over the same history. A weight has its own amax, since it is cast once an update.
"""

# M tokens, I inputs, O outputs

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megaspec.nn.fp8 import REMEMBERED, Fp8Linear, Fp8Pair, Fp8Tensor
from megaspec.nn.fp8_layouts import BLOCKS, FORMATS, Blocks, Role, scale_in_columns
from megaspec_kernels.linear import te_fp8
from megaspec_kernels.linear.factors import Cast, Factor, Layout
from megaspec_kernels.linear.te_fp8 import Scales

TeRecipe = Literal["tensorwise", "delayed", "blockwise"]

_BY_TENSOR: dict[Role, Scales] = {"input": "tensor", "weight": "tensor", "gradient": "tensor"}
_BY_BLOCK: dict[Role, Scales] = {"input": "lines", "weight": "squares", "gradient": "lines"}
SCALES: dict[TeRecipe, dict[Role, Scales]] = {
    "tensorwise": _BY_TENSOR,
    "delayed": _BY_TENSOR,
    "blockwise": _BY_BLOCK,
}
"""Its recipes: current scaling, delayed scaling, block scaling."""
# Of the products of a layer, see the note "Layouts" in te.py.
LAYOUTS: dict[tuple[Role, Role], Layout] = {
    ("input", "weight"): "TN",
    ("gradient", "weight"): "NN",
    ("gradient", "input"): "NT",
}


@dataclass(frozen=True)
class TeFp8Form:
    """How the layers of a model compute in fp8 by Transformer Engine; see Fp8Form."""

    recipe: TeRecipe
    gradient_format: Literal["e4m3", "e5m2"]
    margin: int

    counts_saturated = False
    takes_written = False

    def memory_dtype(self, wide: torch.dtype) -> torch.dtype:
        """Of what is remembered: its casts read and write nothing else."""
        return torch.float32

    def blocks(self, role: Role) -> Blocks:
        return BLOCKS[self.recipe][role]

    def scales(self, role: Role) -> Scales:
        return SCALES[self.recipe][role]

    def dtype(self, role: Role) -> torch.dtype:
        return FORMATS[self.gradient_format if role == "gradient" else "e4m3"]

    def delayed_scale(self, amax: Tensor, role: Role) -> Tensor:
        """What elements are multiplied by: Transformer Engine takes the inverse of a scale."""
        return te_fp8.factor_of(amax, self.dtype(role), margin=self.margin)


class TeFp8Linear(Fp8Linear):
    """One linear layer's side of it. `memory.scales` are what elements are multiplied by."""

    form: TeFp8Form

    def known(self, role: Role) -> None:
        """See Fp8Linear. What multiplies is no power of two: who writes fp8 by itself can't make the same numbers."""
        return None

    def quantise(self, x_MK: Tensor, role: Role, *, rows: bool = True, columns: bool = True) -> Fp8Pair:
        """See Fp8Linear. Rows are made in any case: the cast makes no columns without them."""
        cast = self._cast_of(x_MK, role, columns=columns)
        is_whole = self.form.scales(role) == "tensor"
        in_rows = Fp8Tensor(*cast.rows)
        if is_whole:
            in_rows = Fp8Tensor(cast.rows.values, cast.rows.scale.view(1, 1))
        if not columns:
            return Fp8Pair(in_rows, None)
        in_columns = Fp8Tensor(*cast.columns)
        if is_whole:
            in_columns = Fp8Tensor(cast.columns.values, cast.columns.scale.view(1, 1))
        elif role != "weight":
            # what is kept has its scales as fp8.py has them, [K, m]; a weight is handed to nobody
            scale = scale_in_columns(cast.columns.scale, BLOCKS[self.form.recipe][role].columns)
            in_columns = Fp8Tensor(cast.columns.values, scale)
        return Fp8Pair(in_rows, in_columns)

    def columns(self, values_MK: Tensor) -> Tensor:
        """See Fp8Linear."""
        return _turned(values_MK)

    def for_columns(self, x_MI: Tensor, in_rows: Fp8Tensor) -> Fp8Tensor:
        """See Fp8Linear."""
        if self.form.scales("input") == "tensor":
            return Fp8Tensor(in_rows.values, in_rows.scale.view(1, 1))
        values_IM, scale = self._cast_of(x_MI, "input", columns=True).columns
        # turned back as bytes: their scales stay those of columns
        return Fp8Tensor(_turned(values_IM), scale)

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
        of_b, of_a = roles[1], roles[0]
        return te_fp8.product(
            layout,
            self._factor(b, of_b, turned=layout == "NT"),
            self._factor(a, of_a, turned=layout == "NT"),
            a_scales=self.form.scales(of_b),
            b_scales=self.form.scales(of_a),
            dtype=dtype,
            # as its recipes have it: fewer bits in the sums of the forward pass alone
            fast=layout == "TN",
            into=into,
            overwrite=into is None or overwrite,
        )

    def _factor(self, one: Fp8Tensor, role: Role, *, turned: bool) -> Factor:
        """With scales as Transformer Engine has them: the inverse of what `quantise` does to them. `turned`: of what
        was kept in columns."""
        scale = one.scale
        if self.form.scales(role) == "tensor":
            # of a gradient in slots autograd may have made it wider than it is
            scale = scale.view(1).to(torch.float32)
        elif turned:
            scale = scale.t().contiguous()
        return Factor(one.values, scale)

    def _cast_of(self, x_MK: Tensor, role: Role, *, columns: bool) -> Cast:
        dtype = self.form.dtype(role)
        scales = self.form.scales(role)
        if scales != "tensor":
            return te_fp8.cast_blocks(x_MK, dtype, scales=scales, columns=columns)
        if self.memory is None or role == "weight":
            if not self.is_divided(role):
                return te_fp8.cast_current(x_MK, dtype, columns=columns)
            factor = te_fp8.factor_of(self.largest(te_fp8.amax(x_MK)), dtype)
            return te_fp8.cast_scaled(x_MK, dtype, factor=factor, seen=torch.zeros_like(factor), columns=columns)
        place = REMEMBERED.index(role)
        # what evaluations see is not remembered
        seen = torch.zeros(1, dtype=torch.float32, device=x_MK.device)
        if self.shared.is_recording:
            seen = self.memory.seen[place].view(1)
        factor = self.memory.scales[place].view(1)
        self.meet(role)
        if self.is_fresh(role):
            amax = te_fp8.amax(x_MK)
            if self.is_divided(role):
                amax = self.largest(amax)
            factor = te_fp8.factor_of(amax, dtype)
        return te_fp8.cast_scaled(x_MK, dtype, factor=factor, seen=seen, columns=columns)


def _turned(values: Tensor) -> Tensor:
    """As bytes: they are moved, not computed with."""
    return values.view(torch.uint8).t().contiguous().view(values.dtype)
