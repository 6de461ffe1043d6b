"""The products of experts in fp8. What nn/fp8.py says of roles and layouts holds here, too, for each expert.

Note "Experts". Each expert is a layer of its own, with factors of its own: its tokens, its matrix, its gradients. So:

tensorwise   a scale for what an expert takes, one for its matrix, one for the gradient of its outputs
delayed      a matrix as tensorwise; tokens, and gradients, of all experts of a layer share a scale and its history
rowwise      a scale for each token and each output; for weight gradients one for each feature of an expert's tokens

What an expert takes are the tokens that come to it at once: those of a micro batch from all ranks of its ep group. With
ep inside of tp that is what it takes on one rank; with ep over data-parallel ranks it is the micro batches of all of
them. Ranks of etp hold parts of the same matrices and take the same tokens: where a scale goes across their parts they
agree on the largest element.

Gradients are e4m3, whatever precision.format says: torch's grouped products take nothing else.

Kept for the backward pass are an expert's tokens as they lie, a byte a number, by the scales of their weight gradient.
They are turned into columns, with the padding that the product asks for, when the backward pass comes to it.
"""

# R rows: tokens sorted by expert, E experts of this rank, I inputs, O outputs, P rows with padding

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megaspec.nn.fp8 import FORMATS, REMEMBERED, Fp8Linear, Fp8Pair, Fp8Tensor, Role, layer_of
from megaspec.nn.linear import MainGrad, sum_of
from megaspec_kernels.fp8_cast.formats import Block
from megaspec_kernels.fp8_cast.groups import padded_ends, padded_rows, scale_of_rows
from megaspec_kernels.grouped.add import add_
from megaspec_kernels.registry import ScaledGroupedKernel

# What shares a scale, where it is an expert's tensor or one of its rows: dimensions that a scale is taken over.
_TENSOR = (None, None)
_ROW = (1, None)
_COLUMN = (None, 1)
EXPERTS_GRADIENT = FORMATS["e4m3"]
"""Format of the gradients of experts' outputs."""


@dataclass(eq=False, kw_only=True)
class Fp8Experts(Fp8Linear):
    """One product of all experts of a layer that lie on this rank, [E·O, I]."""

    n_experts: int
    grouped: ScaledGroupedKernel

    def __post_init__(self) -> None:
        # first: the layer's known scales are of this format
        self.form = replace(self.form, gradient_format="e4m3")
        super().__post_init__()

    @property
    def shares_tensors(self) -> bool:
        """A scale is one of whole tensors, in rows and in columns alike."""
        return self.form.recipe in ("tensorwise", "delayed")

    def lying(self, x_RI: Tensor, role: Role, ends_E: Tensor) -> Fp8Tensor:
        """Rows as they lie, by the scales that they have in columns: [E or 1, I or 1]."""
        amax_EI = self.form.cast.group_amax(x_RI, ends_E)
        if self.shares_tensors:
            scale = self._scale_of_tensors(amax_EI.amax(1, keepdim=True), role)
        else:
            scale = self.form.cast.scale_of(self._of_all(amax_EI, role, _COLUMN), self.form.dtype(role))
        saturated = None
        if self.memory is not None and role != "weight":
            saturated = self.memory.saturated_in(role)
        values = self.form.cast.group_cast(x_RI, scale, ends_E, dtype=self.form.dtype(role), saturated=saturated)
        return Fp8Tensor(values, scale)

    def rows(self, x_RI: Tensor, role: Role, ends_E: Tensor) -> Fp8Tensor:
        """Rows by scales of their own, [R, 1]."""
        assert not self.shares_tensors, "a tensor is quantised once: `lying` is in rows, too"
        amax_R = self.form.cast.amax(x_RI, block=_ROW)
        scale = self.form.cast.scale_of(self._of_all(amax_R, role, _ROW), self.form.dtype(role))
        values, _ = self.form.cast.cast(x_RI, scale, block=_ROW, dtype=self.form.dtype(role))
        return Fp8Tensor(values, scale)

    def weight(self, weight: Tensor) -> Fp8Pair:
        """[E·O, I] in rows, and in columns [I, E·O], quantised once for each version of it."""
        if self._weight is None or self._weight_version != self.shared.version:
            self._weight = self._quantised_weight(weight)
            self._weight_version = self.shared.version
        return self._weight

    def _quantised_weight(self, weight: Tensor) -> Fp8Pair:
        E = self.n_experts
        n_out = weight.shape[0] // E
        ends_E = torch.arange(1, E + 1, device=weight.device, dtype=torch.int32) * n_out
        lying = self.gathered
        if lying is None and self.shares_tensors:
            return self._quantised_at_once(weight, ends_E)
        if lying is None:
            lying = self.lying(weight, "weight", ends_E)
        in_rows = lying
        scale_EO = lying.scale
        if not self.shares_tensors:
            in_rows = self.rows(weight, "weight", ends_E)
            scale_EO = in_rows.scale.view(E, n_out)
        # whole units of rows: nothing is padded
        columns = self.form.cast.group_columns(lying.values, ends_E, ends_E, columns=E * n_out)
        return Fp8Pair(Fp8Tensor(in_rows.values, scale_EO), Fp8Tensor(columns, lying.scale))

    def _quantised_at_once(self, weight: Tensor, ends_E: Tensor) -> Fp8Pair:
        """Matrices with a scale each: one pass writes both layouts, since all rows of an expert share its scale."""
        amax_EI = self.form.cast.group_amax(weight, ends_E)
        scale_E = self._scale_of_tensors(amax_EI.amax(1, keepdim=True), "weight")
        n_out = weight.shape[0] // self.n_experts
        scale_R = scale_E.expand(-1, n_out).reshape(-1, 1)
        values, columns = self.form.cast.cast(
            weight, scale_R, block=_ROW, dtype=self.form.dtype("weight"), rows=True, columns=True
        )
        return Fp8Pair(Fp8Tensor(values, scale_E), Fp8Tensor(columns, scale_E))

    def _of_all(self, amax: Tensor, role: Role, block: Block) -> Tensor:
        """Of whole tensors, where a block goes across the ranks that hold parts of one."""
        if self._goes_across_ranks(role, block):
            return self.largest(amax)
        return amax

    def _scale_of_tensors(self, amax_E: Tensor, role: Role) -> Tensor:
        """Of each expert's, [E, 1], or delayed of all, [1, 1]."""
        if self.memory is None or role == "weight":
            return self.form.cast.scale_of(self._of_all(amax_E, role, _TENSOR), self.form.dtype(role))
        place = REMEMBERED.index(role)
        if self.shared.is_recording:
            seen = self.memory.seen[place]
            # what is not finite shows in the loss, and makes no scale
            finite_E = torch.where(torch.isfinite(amax_E), amax_E, 0)
            seen.copy_(torch.maximum(seen, finite_E.amax().to(seen.dtype)))
        if self.shared.is_fresh:
            return self.form.cast.scale_of(self._of_all(amax_E, role, _TENSOR), self.form.dtype(role))
        return self.memory.scales[place].view(1, 1)

    def forward_product(
        self, x: Fp8Tensor, weight: Tensor, ends_E: Tensor, *, whole: bool, dtype: torch.dtype
    ) -> Tensor:
        """x_e W_eᵀ, [R, O]; x with scales of rows."""
        in_rows = self.weight(weight).rows
        return self.grouped.product(
            x.values,
            in_rows.values.unflatten(0, (self.n_experts, -1)),
            x.scale,
            in_rows.scale,
            ends_E,
            dtype=dtype,
            whole=whole,
            # as dense products: fewer bits in the sums of the forward pass alone
            fast=True,
        )

    def input_gradient(
        self, grad: Fp8Tensor, weight: Tensor, ends_E: Tensor, *, whole: bool, dtype: torch.dtype
    ) -> Tensor:
        """dy_e W_e, [R, I]; dy with scales of rows."""
        columns = self.weight(weight).columns
        # [I, E·O] -> [E, I, O], which lies along O
        turned_EIO = columns.values.unflatten(1, (self.n_experts, -1)).permute(1, 0, 2)
        return self.grouped.product(
            grad.values, turned_EIO, grad.scale, columns.scale, ends_E, dtype=dtype, whole=whole
        )

    def weight_gradient(self, grad: Fp8Tensor, x: Fp8Tensor, ends_E: Tensor, *, dtype: torch.dtype) -> Tensor:
        """dy_eᵀ x_e, [E·O, I]; both as they lie, by the scales of columns."""
        padded_E = padded_ends(ends_E)
        columns = padded_rows(x.values.shape[0], self.n_experts)
        in_columns = self.form.cast.group_columns
        out_EOI = self.grouped.weight_product(
            in_columns(grad.values, ends_E, padded_E, columns=columns),
            in_columns(x.values, ends_E, padded_E, columns=columns),
            grad.scale,
            x.scale,
            padded_E,
            dtype=dtype,
        )
        return out_EOI.flatten(0, 1)

    def by_rows(self, lying: Fp8Tensor, x_RI: Tensor, role: Role, ends_E: Tensor) -> Fp8Tensor:
        """The same rows with scales of rows, as products take them that sum along a row."""
        if not self.shares_tensors:
            return self.rows(x_RI, role, ends_E)
        return Fp8Tensor(lying.values, scale_of_rows(lying.scale, ends_E, x_RI.shape[0]))


class GroupedFp8LinearOp(torch.autograd.Function):
    """GroupedLinearOp with products in fp8. Of the rows a byte a number is kept.

    Not one operation for the compiler, as the dense layer's are: experts are never compiled, since their rows differ
    from step to step.
    """

    @staticmethod
    def forward(ctx, x_RI, weight, ends_E, whole, layer):
        fp8 = layer_of(layer.fp8.ticket)
        ctx.whole = whole
        ctx.fp8 = fp8
        ctx.main_grad = layer.main_grad
        if x_RI.shape[0] == 0:
            # no token came to this rank, nor to those that hold other parts of its experts
            ctx.save_for_backward(weight, ends_E)
            return x_RI.new_zeros(0, weight.shape[0] // fp8.n_experts)
        keeps = weight.requires_grad
        lying = None
        if keeps or fp8.shares_tensors:
            lying = fp8.lying(x_RI, "input", ends_E)
        in_rows = fp8.by_rows(lying, x_RI, "input", ends_E)
        kept = (None, None)
        if keeps:
            # a copy of the scale: delayed, it is a view of what the next step overwrites
            kept = (lying.values, lying.scale.clone())
        ctx.save_for_backward(weight, ends_E, *kept)
        return fp8.forward_product(in_rows, weight, ends_E, whole=whole, dtype=x_RI.dtype)

    @staticmethod
    def backward(ctx, grad_RO):
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        fp8 = ctx.fp8
        weight, ends_E, *kept = ctx.saved_tensors
        if not kept:
            grad_x = grad_RO.new_zeros(0, weight.shape[1]) if needs_x else None

            def nothing(dtype: torch.dtype) -> Tensor:
                return torch.zeros_like(weight, dtype=dtype)

            return grad_x, _summed(ctx.main_grad, nothing, weight) if needs_weight else None, None, None, None
        lying = None
        if needs_weight or fp8.shares_tensors:
            lying = fp8.lying(grad_RO, "gradient", ends_E)
        grad_x = None
        if needs_x:
            in_rows = fp8.by_rows(lying, grad_RO, "gradient", ends_E)
            grad_x = fp8.input_gradient(in_rows, weight, ends_E, whole=ctx.whole, dtype=grad_RO.dtype)
        if not needs_weight:
            return grad_x, None, None, None, None
        # what is deferred is what was there: a delayed scale is a view of what the next step overwrites
        grad = Fp8Tensor(lying.values, lying.scale.clone())
        x = Fp8Tensor(*kept)

        def product(dtype: torch.dtype) -> Tensor:
            return fp8.weight_gradient(grad, x, ends_E, dtype=dtype)

        return grad_x, _summed(ctx.main_grad, product, weight), None, None, None


def _summed(main_grad: MainGrad | None, product: Callable[[torch.dtype], Tensor], weight: Tensor) -> Tensor | None:
    """The weight gradient that `product` makes in a format: added to the main gradient where there is one, now or
    later (then None), else handed to autograd."""
    if main_grad is None:
        return product(weight.dtype)

    def add(into: Tensor, overwrite: bool) -> None:
        add_(into, product(into.dtype), overwrite=overwrite)

    sum_of(main_grad.ticket).add(add)
    return None
