"""A mixture of experts in place of the feed-forward layer."""

# B sequences, T tokens, M = B·T, D model, F width of an expert, R rows: (token, choice) pairs sorted by expert,
# E experts of this rank, I inputs, O outputs, k choices of a token

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from megaspec.nn.attention.module import SequenceContext
from megaspec.nn.dropout import Dropout
from megaspec.nn.fp8 import Fp8Input, Fp8Slots, Split, layer_of
from megaspec.nn.linear import Linear, carrier_and_given, sum_of
from megaspec.nn.mlp.module import FeedForward
from megaspec.nn.moe.activation import WeightedActivation, WeightedActivationOp, WeightedRowsOp
from megaspec.nn.moe.fp8 import GroupedFp8LinearOp, GroupedFp8SlotsLinearOp
from megaspec.nn.moe.fp8_producers import gated, permuted, unpermuted
from megaspec.nn.moe.router import Router, Routing
from megaspec.nn.moe.rows import Rows, sorted_rows
from megaspec.nn.moe.spec import Weighted
from megaspec_kernels.fp8_cast.groups import Groups
from megaspec_kernels.registry import GroupedKernel, UnpermuteKernel


class GroupedLinearOp(torch.autograd.Function):
    """y = x W_eᵀ for the rows of each expert e. The weight gradient is made, summed and deferred as a Linear's."""

    @staticmethod
    def forward(ctx, x_RI, weight, ends_E, whole, layer):
        ctx.save_for_backward(x_RI if weight.requires_grad else None, weight, ends_E)
        ctx.whole = whole
        ctx.kernel = layer.kernel
        ctx.main_grad = layer.main_grad
        weight_EOI = weight.unflatten(0, (ends_E.shape[0], -1))
        return layer.kernel.product(x_RI, weight_EOI.transpose(1, 2), ends_E, whole=whole)

    @staticmethod
    def backward(ctx, grad_RO):
        x_RI, weight, ends_E = ctx.saved_tensors
        kernel = ctx.kernel
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = kernel.product(grad_RO, weight.unflatten(0, (ends_E.shape[0], -1)), ends_E, whole=ctx.whole)
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None, None, None
        if ctx.main_grad is None:
            return grad_x, kernel.product(grad_RO.t(), x_RI, ends_E).flatten(0, 1), None, None, None

        def product(into: Tensor, overwrite: bool) -> None:
            kernel.add(into, kernel.product(grad_RO.t(), x_RI, ends_E).flatten(0, 1), overwrite=overwrite)

        sum_of(ctx.main_grad.ticket).add(product)
        return grad_x, None, None, None, None


class GroupBiasOp(torch.autograd.Function):
    """y + scale · b_e for the rows of each expert e. Rows of no expert stay as they are.

    With `is_added` false y is left alone, and b has a gradient of zero: another rank adds it.
    """

    @staticmethod
    def forward(ctx, y_RO, bias, scale_R, ends_E, is_added):
        ctx.save_for_backward(bias, scale_R, ends_E)
        ctx.is_added = is_added
        if not is_added:
            return y_RO.view_as(y_RO)
        bias_RO = _bias_of_rows(bias, ends_E, y_RO.shape[0])
        if scale_R is not None:
            bias_RO = bias_RO.to(scale_R.dtype) * scale_R[:, None]
        # one rounding, where the bias is in a wider format than y
        return (y_RO + bias_RO).to(y_RO.dtype)

    @staticmethod
    def backward(ctx, grad_RO):
        bias, scale_R, ends_E = ctx.saved_tensors
        needs_bias = ctx.needs_input_grad[1]
        if not ctx.is_added:
            return grad_RO, torch.zeros_like(bias) if needs_bias else None, None, None, None
        wide = torch.promote_types(grad_RO.dtype, torch.float32)
        scaled_RO = grad_RO.to(wide)
        grad_scale = None
        if scale_R is not None:
            bias_RO = _bias_of_rows(bias, ends_E, grad_RO.shape[0])
            grad_scale = (scaled_RO * bias_RO).sum(-1).to(scale_R.dtype)
            scaled_RO = scaled_RO * scale_R[:, None]
        if not needs_bias:
            return grad_RO, None, grad_scale, None, None
        ends = ends_E.to(torch.int64)
        rows_E = torch.diff(ends, prepend=ends.new_zeros(1))
        # unsafe: the host does not look at the sizes, which leave out rows of no expert
        grad_EO = torch.segment_reduce(scaled_RO, "sum", lengths=rows_E, axis=0, unsafe=True, initial=0)
        return grad_RO, grad_EO.flatten().to(bias.dtype), grad_scale, None, None


def _bias_of_rows(bias: Tensor, ends_E: Tensor, n_rows: int) -> Tensor:
    """[E·O] -> [R, O]: of each row's expert, zero for rows of none."""
    bias_EO = bias.unflatten(0, (ends_E.shape[0], -1))
    none_1O = bias_EO.new_zeros(1, bias_EO.shape[1])
    row_R = torch.arange(n_rows, device=bias.device, dtype=ends_E.dtype)
    # rows behind the last end are of number E
    expert_R = torch.searchsorted(ends_E, row_R, right=True)
    return torch.cat((bias_EO, none_1O))[expert_R]


class GroupedLinear(Linear):
    """y = x W_eᵀ + b_e for the rows of each expert e, [R, I] -> [R, O].

    The experts' matrices lie one below the other in the weight, [E·O, I], their biases in the bias, [E·O]; `parts`:
    those of all experts.
    """

    def __init__(
        self, n_experts: int, n_in: int, *parts: int, kernel: GroupedKernel, bias: bool = False, residual: bool = False
    ):
        super().__init__(n_in, *parts * n_experts, bias=bias, residual=residual)
        self.n_experts = n_experts
        self.kernel = kernel
        self.split: Split = "none"
        """What of each expert's matrix ranks divide among them."""
        self.adds_bias = True

    def forward(
        self,
        x_RI: Tensor | Fp8Input,
        ends_E: Tensor,
        *,
        whole: bool = True,
        bias_scale: Tensor | None = None,
        groups: Groups | None = None,
    ) -> Tensor:
        """`ends_E`: int32, the end of each expert's rows. Rows behind the last are zero, unless `whole`: there are none
        then. `bias_scale`: [R], what the bias is multiplied by; None: 1. `groups`: what `groups` makes of the ends,
        where it has been called."""
        if self.fp8 is None:
            y_RO = GroupedLinearOp.apply(x_RI, self.weight, ends_E, whole, self)
        else:
            carrier, given = carrier_and_given(x_RI)
            if groups is None:
                groups = self.groups(ends_E, carrier.shape[0])
            y_RO = GroupedFp8LinearOp.apply(carrier, self.weight, groups, whole, self, given)
        if self.bias is None:
            return y_RO
        return GroupBiasOp.apply(y_RO, self.bias, bias_scale, ends_E, self.adds_bias)

    def groups(self, ends_E: Tensor, rows: int) -> Groups:
        """Where each expert's rows lie, as products in fp8 take them."""
        return layer_of(self.fp8.ticket).groups(ends_E, rows)

    def with_slots(self, x_RI: Tensor | Fp8Input, groups: Groups, *, whole: bool) -> tuple[Tensor, Fp8Slots]:
        """The product, and what stands for it so that its gradient arrives in fp8: see nn/fp8.py, note "Producers"."""
        assert self.fp8 is not None, "the layer has products in another precision"
        assert self.bias is None, "the bias's gradient needs the output's, in more than fp8"
        carrier, given = carrier_and_given(x_RI)
        y_RO, *slots = GroupedFp8SlotsLinearOp.apply(carrier, self.weight, groups, whole, self, given)
        return y_RO, Fp8Slots(*slots)

    def extra_repr(self) -> str:
        return f"{self.n_experts} experts, {self.n_in} -> {self.parts[: len(self.parts) // self.n_experts]}"


class Experts(nn.Module):
    """weight · (down_e(activate(into_e(x))) + b_e) for the rows of each expert e, [R, D] -> [R, D].

    The weight is a factor of what goes into the last product, and of the bias behind it: so its gradient needs no
    output to be kept. With `weights_on="inputs"` the weight is a factor of x, and of nothing else.
    """

    def __init__(
        self,
        n_experts: int,
        form: FeedForward,
        *,
        activation: WeightedActivation,
        weights_on: Weighted = "outputs",
        kernel: GroupedKernel,
        unpermute: UnpermuteKernel,
    ):
        """`form`: a feed-forward layer with the names and sizes of each expert; its weights are not used.
        `activation`: what lies between its products. `unpermute`: what sums each token's rows, for the dispatch."""
        super().__init__()
        self.unpermute = unpermute
        self.weights_on = weights_on
        self.activation = activation
        self.into_name = _into_name(form)
        for name in (self.into_name, "w_down"):
            one: Linear = getattr(form, name)
            has_bias = one.bias is not None
            grouped = GroupedLinear(
                n_experts, one.n_in, *one.parts, kernel=kernel, bias=has_bias, residual=one.residual
            )
            setattr(self, name, grouped)
        self.compiled = False
        self.writes_fp8 = False
        """What lies between the products writes what w_down takes, and the gradient of the first product, in fp8."""
        self.moves_fp8 = False
        """Rows of tokens, and of gradients on their way back, are quantised while they are gathered."""

    @property
    def count(self) -> int:
        """Experts that lie here."""
        return self.w_down.n_experts

    @property
    def is_in_fp8(self) -> bool:
        """Both products take fp8."""
        return self.entry.fp8 is not None and self.w_down.fp8 is not None

    @property
    def shares_scales(self) -> bool:
        """Of experts in fp8: rows and columns of what a product takes have the same scales."""
        return layer_of(self.entry.fp8.ticket).shares_tensors

    @property
    def entry(self) -> GroupedLinear:
        """The first product."""
        return getattr(self, self.into_name)

    def into(self, x_RD: Tensor, ends_E: Tensor, *, whole: bool) -> Tensor:
        """The first product, [R, D] -> what `activate` takes."""
        return self.entry(x_RD, ends_E, whole=whole)

    def activate(self, into_RI: Tensor, weights_R: Tensor) -> Tensor:
        """-> [R, F]"""
        return WeightedActivationOp.apply(into_RI, weights_R, self.activation, self.compiled)

    def forward(self, x_RD: Tensor, weights_R: Tensor, ends_E: Tensor, *, whole: bool = True) -> Tensor:
        """Rows and their ends as GroupedLinear takes them."""
        bias_scale = weights_R
        if self.weights_on == "inputs":
            x_RD = WeightedRowsOp.apply(x_RD, weights_R)
            # one number for all rows
            weights_R = weights_R.new_ones(()).expand(weights_R.shape)
            bias_scale = None
        if self.writes_fp8 and x_RD.shape[0]:
            groups = self.entry.groups(ends_E, x_RD.shape[0])
            hidden_RF = self._between(x_RD, weights_R, groups, whole=whole)
            return self.w_down(hidden_RF, ends_E, whole=whole, bias_scale=bias_scale, groups=groups)
        hidden_RF = self.activate(self.into(x_RD, ends_E, whole=whole), weights_R)
        return self.w_down(hidden_RF, ends_E, whole=whole, bias_scale=bias_scale)

    def of_tokens(self, x_MD: Tensor, weights_Mk: Tensor, rows: Rows) -> Tensor:
        """The weighted sum over each token's experts, [M, D] -> [M, D]; `rows`: those of the experts here."""
        weights_R = rows.pick(weights_Mk)
        if not self.moves_fp8 or not weights_R.shape[0]:
            return rows.unpermute(self(rows.permute(x_MD), weights_R, rows.ends, whole=rows.whole))
        groups = self.entry.groups(rows.ends, weights_R.shape[0])
        token_R = rows.token
        x_RD = permuted(x_MD, rows, token_R, groups, into=self.entry)
        hidden_RF = self._between(x_RD, weights_R, groups, whole=rows.whole)
        if self.w_down.bias is not None:
            return rows.unpermute(
                self.w_down(hidden_RF, rows.ends, whole=rows.whole, bias_scale=weights_R, groups=groups)
            )
        y_RD, slots = self.w_down.with_slots(hidden_RF, groups, whole=rows.whole)
        return unpermuted(y_RD, slots, rows, token_R, groups, behind=self.w_down)

    def _between(self, x_RD: Tensor | Fp8Input, weights_R: Tensor, groups: Groups, *, whole: bool) -> Tensor | Fp8Input:
        """What w_down takes, of experts in fp8."""
        if not self.writes_fp8:
            return self.activate(self.entry(x_RD, groups.ends, whole=whole, groups=groups), weights_R)
        if self.entry.bias is None:
            into_RI, slots = self.entry.with_slots(x_RD, groups, whole=whole)
        else:
            into_RI = self.entry(x_RD, groups.ends, whole=whole, groups=groups)
            slots = None
        return gated(
            into_RI, slots, weights_R, groups, activation=self.activation, before=self.entry, behind=self.w_down
        )


def _into_name(form: FeedForward) -> str:
    """What a feed-forward layer calls its first product."""
    names = [name for name, module in form.named_children() if isinstance(module, Linear) and name != "w_down"]
    assert len(names) == 1, f"experts of {type(form).__name__}: one product before w_down is needed, found {names}"
    return names[0]


SharedExperts = Callable[[], Tensor | None]
"""What every token takes beside its own experts; None: nothing."""


class Dispatch(Protocol):
    """How tokens reach their experts and come back. The slot where ways over several ranks are put."""

    balanced: bool
    """Experts are chosen in turn, whatever the router says: loads are known without a look at the device."""
    hands_tokens: bool
    """Experts take tokens, and gather the rows of each themselves; otherwise rows, from whoever has gathered them."""

    def __call__(
        self, x_MD: Tensor, routing: Routing, experts: Experts, *, shared_experts: SharedExperts, capacity: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """-> [M, D], the weighted sum over each token's experts, and what `shared_experts` returned.

        `capacity`: experts get so many rows of this rank's tokens, padded with zeros, and never more; None: as many as
        have chosen them.
        """


class LocalDispatch:
    """All experts lie on this device."""

    balanced = False
    hands_tokens = True

    def __call__(
        self, x_MD: Tensor, routing: Routing, experts: Experts, *, shared_experts: SharedExperts, capacity: int | None
    ) -> tuple[Tensor, Tensor | None]:
        rows = sorted_rows(routing.experts, routing.keep, experts.count, unpermute=experts.unpermute)
        if capacity is not None:
            rows = rows.padded(capacity)
        return experts.of_tokens(x_MD, routing.weights, rows), shared_experts()


class Moe(nn.Module):
    """Σ weight_e · expert_e(x) over the experts e that the router chose, + σ(g·x) shared(x), [B, T, D] -> [B, T, D].

    A token that an expert has no room for gets nothing from it. `pad`: each expert's rows are padded to its capacity.
    `shared`: experts that every token takes; `shared_gate`: g, without it they count in full.
    """

    recompute_parts = frozenset({"moe", "shared_experts", "activation"})

    def __init__(
        self,
        router: Router,
        experts: Experts,
        *,
        shared: FeedForward | None,
        shared_gate: Linear | None,
        pad: bool,
        out: Dropout,
    ):
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate
        self.pad = pad
        self.dropout = out
        self.dispatch: Dispatch = LocalDispatch()

    def forward(self, x_BTD: Tensor, context: SequenceContext) -> Tensor:
        routing = self.router(x_BTD, context)
        x_MD = x_BTD.flatten(0, 1)
        capacity = None
        if self.pad:
            # a token takes an expert once
            capacity = min(self.router.moe.capacity(x_BTD.shape[0] * context.length), x_MD.shape[0])
        y_MD, shared_BTD = self.dispatch(
            x_MD, routing, self.experts, shared_experts=lambda: self._shared_experts(x_BTD, context), capacity=capacity
        )
        y_BTD = y_MD.view_as(x_BTD)
        if shared_BTD is not None:
            y_BTD = y_BTD + shared_BTD
        return self.dropout(y_BTD, context.noise)

    def _shared_experts(self, x_BTD: Tensor, context: SequenceContext) -> Tensor | None:
        if self.shared is None:
            return None
        y_BTD = self.shared(x_BTD, context.noise)
        if self.shared_gate is None:
            return y_BTD
        return y_BTD * self.shared_gate(x_BTD).sigmoid()

    def compile_parts(self, *, options: dict[str, str | int | bool] | None = None) -> None:
        """Compiles what can be traced, with torch.compile's `options`: the shared experts and what lies between the
        products of the others. Rows differ from step to step, and their numbers may have to be read."""
        self.experts.compiled = True
        if self.shared is not None:
            self.shared.compile(options=options)

    def force_balance(self) -> None:
        """From now on tokens take experts in turn: for benchmarks, and for traces that have no numbers to read."""
        self.router.choose = partial(_in_turn, n_experts=self.router.moe.n_experts, k=self.router.moe.top_k)
        self.dispatch.balanced = True


def _in_turn(ranking_BTE: Tensor, context: SequenceContext, *, n_experts: int, k: int) -> Tensor:
    B, T, _ = ranking_BTE.shape
    return (torch.arange(B * T * k, device=ranking_BTE.device) % n_experts).view(B, T, k)


def loads_in_turn(tokens: int, *, k: int, n_experts: int) -> list[int]:
    """How many of `tokens` tokens take each expert under forced balance."""
    fewest, rest = divmod(tokens * k, n_experts)
    # the first experts take one more, as _in_turn begins with them
    return [fewest + 1] * rest + [fewest] * (n_experts - rest)
