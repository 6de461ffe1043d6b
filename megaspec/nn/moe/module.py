"""A mixture of experts in place of the feed-forward layer."""

# B sequences, T tokens, M = B·T, D model, F width of an expert, R rows: (token, choice) pairs sorted by expert,
# E experts of this rank, I inputs, O outputs, k choices of a token

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megaspec.nn.attention.module import SequenceContext
from megaspec.nn.dropout import Dropout
from megaspec.nn.linear import Linear, sum_of
from megaspec.nn.mlp.module import FeedForward
from megaspec.nn.moe.router import Router, Routing
from megaspec.nn.moe.rows import sorted_rows
from megaspec_kernels.registry import GroupedKernel, UnpermuteKernel


class GroupedLinearOp(torch.autograd.Function):
    """y = x W_eᵀ for the rows of each expert e. The weight gradient is made, summed and deferred as a Linear's."""

    @staticmethod
    def forward(ctx, x_RI, weight, ends_E, whole, layer):
        ctx.save_for_backward(x_RI, weight, ends_E)
        ctx.whole = whole
        ctx.kernel = layer.kernel
        ctx.main_grad = layer.main_grad
        weight_EOI = weight.unflatten(0, (ends_E.shape[0], -1))
        return layer.kernel(x_RI, weight_EOI.transpose(1, 2), ends_E, whole=whole)

    @staticmethod
    def backward(ctx, grad_RO):
        x_RI, weight, ends_E = ctx.saved_tensors
        kernel = ctx.kernel
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = kernel(grad_RO, weight.unflatten(0, (ends_E.shape[0], -1)), ends_E, whole=ctx.whole)
        if ctx.main_grad is None:
            return grad_x, kernel(grad_RO.t(), x_RI, ends_E).flatten(0, 1), None, None, None

        def product(into: Tensor, overwrite: bool) -> None:
            grad_weight = kernel(grad_RO.t(), x_RI, ends_E).flatten(0, 1)
            if overwrite:
                into.copy_(grad_weight)
            else:
                into.add_(grad_weight)

        sum_of(ctx.main_grad.ticket).add(product)
        return grad_x, None, None, None, None


class GroupedLinear(Linear):
    """y = x W_eᵀ for the rows of each expert e, [R, I] -> [R, O].

    The experts' matrices lie one below the other in the weight, [E·O, I]; `parts`: those of all experts.
    """

    def __init__(self, n_experts: int, n_in: int, *parts: int, kernel: GroupedKernel, residual: bool = False):
        super().__init__(n_in, *parts * n_experts, residual=residual)
        self.n_experts = n_experts
        self.kernel = kernel

    def forward(self, x_RI: Tensor, ends_E: Tensor, *, whole: bool = True) -> Tensor:
        """`ends_E`: int32, the end of each expert's rows. Rows behind the last are zero, unless `whole`: there are none
        then."""
        return GroupedLinearOp.apply(x_RI, self.weight, ends_E, whole, self)

    def extra_repr(self) -> str:
        return f"{self.n_experts} experts, {self.n_in} -> {self.parts[: len(self.parts) // self.n_experts]}"


def weighted_swiglu(gate_up_RF: Tensor, weights_R: Tensor) -> Tensor:
    """weight · silu(gate) · up, computed in the wider of both formats; [R, 2 F], [R] -> [R, F]"""
    gate, up = gate_up_RF.to(weights_R.dtype).chunk(2, dim=-1)
    return (gate * gate.sigmoid() * up * weights_R[:, None]).to(gate_up_RF.dtype)


def weighted_swiglu_gradients(grad_RF: Tensor, gate_up_RF: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor]:
    """-> the gradients of gate and up, [R, 2 F], and of the weights, [R]"""
    gate, up = gate_up_RF.to(weights_R.dtype).chunk(2, dim=-1)
    grad = grad_RF.to(weights_R.dtype)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    weighted = grad * weights_R[:, None]
    # silu'(gate) = σ · (1 + gate · (1 - σ))
    grad_gate = weighted * up * sigmoid * (1 + gate * (1 - sigmoid))
    grad_up = weighted * silu
    grad_gate_up = torch.cat((grad_gate, grad_up), dim=-1).to(gate_up_RF.dtype)
    return grad_gate_up, (grad * silu * up).sum(-1)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled for any number of rows, which differs from step to step. On first use: the compiler takes
    its time to load."""
    return torch.compile(function, dynamic=True)


class WeightedSwiGluOp(torch.autograd.Function):
    """weighted_swiglu, of which the inputs alone are kept."""

    @staticmethod
    def forward(ctx, gate_up_RF, weights_R, fused):
        ctx.save_for_backward(gate_up_RF, weights_R)
        ctx.fused = fused
        if fused:
            return compiled(weighted_swiglu)(gate_up_RF, weights_R)
        return weighted_swiglu(gate_up_RF, weights_R)

    @staticmethod
    def backward(ctx, grad_RF):
        gradients = weighted_swiglu_gradients
        if ctx.fused:
            gradients = compiled(weighted_swiglu_gradients)
        return *gradients(grad_RF, *ctx.saved_tensors), None


class Experts(nn.Module):
    """weight · down_e(silu(gate_e(x)) · up_e(x)) for the rows of each expert e, [R, D] -> [R, D].

    The weight is a factor of what goes into the last product: so its gradient needs no output to be kept. `unpermute`:
    what sums each token's rows, for the dispatch.
    """

    def __init__(
        self, n_experts: int, d_model: int, d_expert: int, *, kernel: GroupedKernel, unpermute: UnpermuteKernel
    ):
        super().__init__()
        self.unpermute = unpermute
        self.w_gate_up = GroupedLinear(n_experts, d_model, d_expert, d_expert, kernel=kernel)
        self.w_down = GroupedLinear(n_experts, d_expert, d_model, kernel=kernel, residual=True)
        self.compiled = False

    @property
    def count(self) -> int:
        """Experts that lie here."""
        return self.w_gate_up.n_experts

    def activate(self, gate_up_RF: Tensor, weights_R: Tensor) -> Tensor:
        """[R, 2 F], [R] -> [R, F]"""
        return WeightedSwiGluOp.apply(gate_up_RF, weights_R, self.compiled)

    def forward(self, x_RD: Tensor, weights_R: Tensor, ends_E: Tensor, *, whole: bool = True) -> Tensor:
        """Rows and their ends as GroupedLinear takes them."""
        hidden_RF = self.activate(self.w_gate_up(x_RD, ends_E, whole=whole), weights_R)
        return self.w_down(hidden_RF, ends_E, whole=whole)


SharedExperts = Callable[[], Tensor | None]
"""What every token takes beside its own experts; None: nothing."""


class Dispatch(Protocol):
    """How tokens reach their experts and come back. The slot where ways over several ranks are put."""

    balanced: bool
    """Experts are chosen in turn, whatever the router says: loads are known without a look at the device."""

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

    def __call__(
        self, x_MD: Tensor, routing: Routing, experts: Experts, *, shared_experts: SharedExperts, capacity: int | None
    ) -> tuple[Tensor, Tensor | None]:
        rows = sorted_rows(routing.experts, routing.keep, experts.count, unpermute=experts.unpermute)
        if capacity is not None:
            rows = rows.padded(capacity)
        y_RD = experts(rows.permute(x_MD), rows.pick(routing.weights), rows.ends, whole=rows.whole)
        return rows.unpermute(y_RD), shared_experts()


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
