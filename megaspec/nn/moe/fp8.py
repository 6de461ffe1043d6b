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

Kept for the backward pass are an expert's tokens in columns, with the padding that the product asks for, a byte a
number, by the scales of their weight gradient.

Note "One pass". With scales of whole tensors a matrix is quantised in one pass, which writes both layouts; a delayed
one is known before, so that nothing else is read. Rows that are gathered on the way to experts, and gradients on the
way back, are quantised while they are gathered: see fp8_producers.py.
"""

# R rows: tokens sorted by expert, E experts of this rank, I inputs, O outputs, P rows with padding, M tokens

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megaspec.nn.fp8 import Fp8Input, Fp8Linear, Fp8Pair, Fp8Slots, Fp8Tensor, layer_of
from megaspec.nn.fp8_layouts import FORMATS, Role
from megaspec.nn.linear import Linear, MainGrad, sum_of
from megaspec_kernels.fp8_cast.formats import COLUMN, ROW, Block
from megaspec_kernels.fp8_cast.groups import Groups, scale_of_rows
from megaspec_kernels.registry import ScaledGroupedKernel

# What shares a scale, where that is an expert's whole tensor.
_TENSOR = (None, None)
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

    def groups(self, ends_E: Tensor, rows: int) -> Groups:
        """Where each expert's rows lie."""
        return self.form.cast.groups(ends_E, rows)

    def quantise_rows(
        self,
        x: Tensor,
        role: Role,
        groups: Groups,
        *,
        rows: bool = True,
        columns: bool = True,
        index_R: Tensor | None = None,
        is_full: bool = False,
    ) -> Fp8Pair:
        """Rows as they lie [R, I], and in columns [I, P], in the layouts that are asked for; scales [E or 1, 1], or in
        rows [R, 1] and in columns [E, I].

        `index_R`: which row of x, [M, I], each is; see group_cast in fp8_cast/reference_groups.py. `is_full`: every row
        is one of x's.
        """
        if index_R is not None and self.known(role) is None:
            # another pass comes before the cast, so that nothing is gathered on the way to that
            x = _gathered(x, index_R, is_full=is_full)
            index_R = None
        if self.shares_tensors:
            return self._of_tensors(x, role, groups, rows=rows, columns=columns, index_R=index_R)
        in_rows = None
        in_columns = None
        if rows:
            in_rows = self._by_row(x, role)
        if columns:
            amax_EI = self.form.cast.group_amax(x, groups.ends, by_column=True)
            scale_EI = self._own_scale(amax_EI, role, COLUMN)
            _, values = self.form.cast.group_cast(
                x, scale_EI, groups, dtype=self.form.dtype(role), rows=False, columns=True
            )
            in_columns = Fp8Tensor(values, scale_EI)
        return Fp8Pair(in_rows, in_columns)

    def _of_tensors(
        self, x: Tensor, role: Role, groups: Groups, *, rows: bool, columns: bool, index_R: Tensor | None
    ) -> Fp8Pair:
        """By scales of whole tensors: a pass for the cast, and one before it where none is known."""
        known = self.known(role)
        if known is None:
            scale = self._own_scale(self.form.cast.group_amax(x, groups.ends), role, _TENSOR)
            copy = None
        else:
            scale = known.scale.view(1, 1)
            # the next step overwrites it before what was deferred is computed
            copy = torch.empty_like(scale)
        recorded = self._recorded(role)
        seen = None
        saturated = None
        if recorded is not None:
            seen = recorded.seen
            saturated = recorded.saturated
        by_rows, by_columns = self.form.cast.group_cast(
            x,
            scale,
            groups,
            dtype=self.form.dtype(role),
            rows=rows,
            columns=columns,
            index_R=index_R,
            seen=seen,
            saturated=saturated,
            scale_copy=copy,
        )
        if copy is not None:
            scale = copy
        in_rows = Fp8Tensor(by_rows, scale) if rows else None
        in_columns = Fp8Tensor(by_columns, scale) if columns else None
        return Fp8Pair(in_rows, in_columns)

    def scales(self, role: Role) -> int:
        """How many there are of a matrix, where they are of whole tensors."""
        return self.n_experts if self.known(role) is None else 1

    def _by_row(self, x_RI: Tensor, role: Role) -> Fp8Tensor:
        """Rows by scales of their own, [R, 1]."""
        scale = self._own_scale(self.form.cast.amax(x_RI, block=ROW), role, ROW)
        values, _ = self.form.cast.cast(x_RI, scale, block=ROW, dtype=self.form.dtype(role))
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
        if self.shares_tensors and self.gathered is None:
            return self._quantised_at_once(weight)
        if self.gathered is not None:
            values, scale_E = self.gathered
            return self._of_matrices(values, self.columns(values), scale_E, self._of_outputs(scale_E, values))
        in_rows = self._by_row(weight, "weight")
        ends_E = self._ends_of_weight(weight)
        amax_EI = self.form.cast.group_amax(weight, ends_E, by_column=True)
        scale_EI = self._own_scale(amax_EI, "weight", COLUMN)
        values, _ = self.form.cast.group_cast(
            weight, scale_EI, self.groups(ends_E, weight.shape[0]), dtype=self.form.dtype("weight")
        )
        # nothing is padded: columns of all matrices are one behind the other
        return Fp8Pair(
            Fp8Tensor(in_rows.values, in_rows.scale.view(E, n_out)), Fp8Tensor(self.columns(values), scale_EI)
        )

    def _quantised_at_once(self, weight: Tensor) -> Fp8Pair:
        """Matrices with a scale each: one pass writes both layouts, since all rows of an expert share its scale."""
        amax_E = self.form.cast.group_amax(weight, self._ends_of_weight(weight))
        scale_E = self._own_scale(amax_E, "weight", _TENSOR)
        of_outputs = self._of_outputs(scale_E, weight)
        values, columns = self.form.cast.cast(
            weight, of_outputs.view(-1, 1), block=ROW, dtype=self.form.dtype("weight"), rows=True, columns=True
        )
        return self._of_matrices(values, columns, scale_E, of_outputs)

    def _of_outputs(self, scale_E: Tensor, weight: Tensor) -> Tensor:
        """Of each output of a matrix its scale, [E, 1] -> [E, O]."""
        return scale_E.expand(self.n_experts, weight.shape[0] // self.n_experts).contiguous()

    def _of_matrices(self, values: Tensor, columns: Tensor, scale_E: Tensor, of_outputs: Tensor) -> Fp8Pair:
        """Matrices in both layouts, [E·O, I] and [I, E·O], with a scale each, [E, 1], and that of each output."""
        # of each output and of each input, as grouped products take them: not made anew for each of a step's products
        of_inputs = scale_E.expand(self.n_experts, values.shape[1]).contiguous()
        return Fp8Pair(Fp8Tensor(values, of_outputs), Fp8Tensor(columns, of_inputs))

    def _ends_of_weight(self, weight: Tensor) -> Tensor:
        """Where the rows of each expert's matrix end, int32 [E]."""
        outputs = weight.shape[0]
        n_out = outputs // self.n_experts
        return torch.arange(n_out, outputs + 1, n_out, device=weight.device, dtype=torch.int32)

    def _own_scale(self, amax: Tensor, role: Role, block: Block) -> Tensor:
        """Of the largest elements of blocks, over the ranks that hold parts of one."""
        if self._goes_across_ranks(role, block):
            amax = self.largest(amax)
        return self.form.cast.scale_of(amax, self.form.dtype(role))

    def forward_product(
        self, x: Fp8Tensor, weight: Tensor, groups: Groups, *, whole: bool, dtype: torch.dtype
    ) -> Tensor:
        """x_e W_eᵀ, [R, O]; x in rows."""
        in_rows = self.weight(weight).rows
        return self.grouped.product(
            x.values,
            in_rows.values.unflatten(0, (self.n_experts, -1)),
            self._scale_of_rows(x, groups),
            in_rows.scale,
            groups.ends,
            dtype=dtype,
            whole=whole,
            # as dense products: fewer bits in the sums of the forward pass alone
            fast=True,
        )

    def input_gradient(
        self, grad: Fp8Tensor, weight: Tensor, groups: Groups, *, whole: bool, dtype: torch.dtype
    ) -> Tensor:
        """dy_e W_e, [R, I]; dy in rows."""
        columns = self.weight(weight).columns
        # [I, E·O] -> [E, I, O], which lies along O
        turned_EIO = columns.values.unflatten(1, (self.n_experts, -1)).permute(1, 0, 2)
        return self.grouped.product(
            grad.values,
            turned_EIO,
            self._scale_of_rows(grad, groups),
            columns.scale,
            groups.ends,
            dtype=dtype,
            whole=whole,
        )

    def weight_gradient(self, grad: Fp8Tensor, x: Fp8Tensor, groups: Groups, *, dtype: torch.dtype) -> Tensor:
        """dy_eᵀ x_e, [E·O, I]; both in columns."""
        out_EOI = self.grouped.weight_product(grad.values, x.values, grad.scale, x.scale, groups.padded, dtype=dtype)
        return out_EOI.flatten(0, 1)

    def _scale_of_rows(self, x: Fp8Tensor, groups: Groups) -> Tensor:
        """[R or 1, 1]"""
        if self.shares_tensors:
            return scale_of_rows(x.scale, groups)
        return x.scale


def _gathered(x: Tensor, index_R: Tensor, *, is_full: bool) -> Tensor:
    """[M, I] -> [R, I]; zeros where the index is negative, which it is nowhere where it `is_full`."""
    if is_full:
        return x[index_R]
    return torch.where(index_R[:, None] >= 0, x[index_R.clamp(min=0)], 0)


class GroupedFp8LinearOp(torch.autograd.Function):
    """GroupedLinearOp with products in fp8. Of the rows a byte a number is kept. `given`: x in fp8, for which x is a
    carrier; see nn/fp8.py, note "Producers".

    Not one operation for the compiler, as the dense layer's are: experts are never compiled, since their rows differ
    from step to step.
    """

    @staticmethod
    def forward(ctx, x_RI, weight, groups, whole, layer, given):
        return _product(ctx, x_RI, weight, groups, whole, layer, given)

    @staticmethod
    def backward(ctx, grad_RO):
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        if ctx.groups.rows == 0:
            return *_gradients_of_nothing(ctx, grad_RO), None, None, None, None
        pair = ctx.fp8.quantise_rows(grad_RO, "gradient", ctx.groups, rows=needs_x, columns=needs_weight)
        return *_gradients(ctx, pair, dtype=grad_RO.dtype), None, None, None, None


class GroupedFp8SlotsLinearOp(torch.autograd.Function):
    """GroupedFp8LinearOp whose output's gradient arrives in fp8, as that of the slots: see nn/fp8.py, note
    "Producers"."""

    @staticmethod
    def forward(ctx, x_RI, weight, groups, whole, layer, given):
        # no gradient of y is made up where there is none
        ctx.set_materialize_grads(False)
        y_RO = _product(ctx, x_RI, weight, groups, whole, layer, given)
        ctx.dtype = y_RO.dtype
        return y_RO, *_slots(y_RO, groups, scales=ctx.fp8.scales("gradient"))

    @staticmethod
    def backward(ctx, grad_out, grad_RO, grad_OP, grad_scale):
        assert grad_out is None, "the gradient arrives in the slots; y is handed to one producer alone"
        pair = Fp8Pair(Fp8Tensor(grad_RO, grad_scale), Fp8Tensor(grad_OP, grad_scale))
        return *_gradients(ctx, pair, dtype=ctx.dtype), None, None, None, None


def _slots(y_RO: Tensor, groups: Groups, *, scales: int) -> Fp8Slots:
    """What stands for an output, a number each in memory."""
    R, O = y_RO.shape  # noqa: E741
    one = y_RO.new_empty(1, dtype=EXPERTS_GRADIENT)
    scale = y_RO.new_empty(1, 1, dtype=torch.promote_types(y_RO.dtype, torch.float32))
    return Fp8Slots(one.expand(R, O), one.expand(O, groups.columns), scale.expand(scales, 1))


def _product(
    ctx, x_RI: Tensor, weight: Tensor, groups: Groups, whole: bool, layer: Linear, given: Fp8Input | None
) -> Tensor:
    """x_e W_eᵀ, [R, O], and what the backward pass needs."""
    fp8 = layer_of(layer.fp8.ticket)
    ctx.whole = whole
    ctx.fp8 = fp8
    ctx.main_grad = layer.main_grad
    ctx.groups = groups
    if groups.rows == 0:
        # no token came to this rank, nor to those that hold other parts of its experts; others may have seen some
        fp8.meet("input")
        ctx.save_for_backward(weight)
        return x_RI.new_zeros(0, weight.shape[0] // fp8.n_experts)
    keeps = weight.requires_grad
    if given is None:
        pair = fp8.quantise_rows(x_RI, "input", groups, columns=keeps)
    else:
        pair = Fp8Pair(Fp8Tensor(given.rows, given.scale), Fp8Tensor(given.columns, given.scale))
    kept = pair.columns if keeps else ()
    ctx.save_for_backward(weight, *kept)
    return fp8.forward_product(pair.rows, weight, groups, whole=whole, dtype=x_RI.dtype)


def _gradients(ctx, grad: Fp8Pair, *, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Of x, in `dtype`, and of the weight."""
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    fp8 = ctx.fp8
    groups = ctx.groups
    weight, *kept = ctx.saved_tensors
    grad_x = None
    if needs_x:
        grad_x = fp8.input_gradient(grad.rows, weight, groups, whole=ctx.whole, dtype=dtype)
    if not needs_weight:
        return grad_x, None
    x = Fp8Tensor(*kept)

    def product(dtype: torch.dtype) -> Tensor:
        return fp8.weight_gradient(grad.columns, x, groups, dtype=dtype)

    return grad_x, _summed(ctx.main_grad, product, weight, kernel=fp8.grouped)


def _gradients_of_nothing(ctx, grad_RO: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The same where there are no rows."""
    ctx.fp8.meet("gradient")
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    (weight,) = ctx.saved_tensors
    grad_x = None
    if needs_x:
        grad_x = grad_RO.new_zeros(0, weight.shape[1])
    if not needs_weight:
        return grad_x, None

    def nothing(dtype: torch.dtype) -> Tensor:
        return torch.zeros_like(weight, dtype=dtype)

    return grad_x, _summed(ctx.main_grad, nothing, weight, kernel=ctx.fp8.grouped)


def _summed(
    main_grad: MainGrad | None, product: Callable[[torch.dtype], Tensor], weight: Tensor, *, kernel: ScaledGroupedKernel
) -> Tensor | None:
    """The weight gradient that `product` makes in a format: added to the main gradient where there is one, now or
    later (then None), else handed to autograd."""
    if main_grad is None:
        return product(weight.dtype)

    def add(into: Tensor, overwrite: bool) -> None:
        kernel.add(into, product(into.dtype), overwrite=overwrite)

    sum_of(main_grad.ticket).add(add)
    return None
