"""The linear layer: one operation with separate forward, input gradient and weight gradient."""

# B sequences, T tokens, I inputs, O outputs

from collections import deque

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WeightGradientQueue:
    """Weight gradients that were put off. `run` computes the oldest ones and adds them to `weight.grad`."""

    def __init__(self) -> None:
        self._pending: deque[tuple[nn.Parameter, Tensor, Tensor]] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def put(self, weight: nn.Parameter, grad_out: Tensor, x: Tensor) -> None:
        self._pending.append((weight, grad_out, x))

    def run(self, count: int | None = None) -> None:
        """Computes `count` of the pending gradients, all when None."""
        for _ in range(len(self._pending) if count is None else min(count, len(self._pending))):
            weight, grad_out, x = self._pending.popleft()
            grad = weight_gradient(grad_out, x)
            weight.grad = grad if weight.grad is None else weight.grad + grad


def input_gradient(grad_out: Tensor, weight: Tensor) -> Tensor:
    """[..., O], [O, I] -> [..., I]"""
    return grad_out @ weight


def weight_gradient(grad_out: Tensor, x: Tensor) -> Tensor:
    """[..., O], [..., I] -> [O, I], summed over the leading dimensions."""
    return grad_out.flatten(0, -2).t() @ x.flatten(0, -2)


class LinearOp(torch.autograd.Function):
    """y = x Wᵀ + b. The weight gradient runs at once, or goes into `queue`."""

    @staticmethod
    def forward(ctx, x, weight, bias, queue):
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.queue = bias is not None, queue
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad_out):
        x, weight = ctx.saved_tensors
        grad_x = input_gradient(grad_out, weight) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            if ctx.queue is None:
                grad_weight = weight_gradient(grad_out, x)
            else:
                ctx.queue.put(weight, grad_out, x)
        grad_bias = grad_out.flatten(0, -2).sum(0) if ctx.has_bias else None
        return grad_x, grad_weight, grad_bias, None


class Linear(nn.Module):
    """y = x Wᵀ + b, [..., I] -> [..., O].

    `parts` are the sizes of outputs that are computed together (query, key, value; gate, up): O is their sum, and
    each is initialised and split on its own. `residual` marks a layer that writes into the residual stream.
    """

    def __init__(self, n_in: int, *parts: int, bias: bool = False, residual: bool = False):
        super().__init__()
        self.n_in, self.parts, self.residual = n_in, parts, residual
        self.weight = nn.Parameter(torch.empty(sum(parts), n_in))
        self.bias = nn.Parameter(torch.empty(sum(parts))) if bias else None
        self.queue: WeightGradientQueue | None = None

    def forward(self, x: Tensor) -> Tensor:
        return LinearOp.apply(x, self.weight, self.bias, self.queue)

    def extra_repr(self) -> str:
        return f"{self.n_in} -> {self.parts}, bias={self.bias is not None}"
