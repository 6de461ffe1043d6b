"""The linear layer: one operation with separate forward, input gradient and weight gradient."""

# B sequences, T tokens, I inputs, O outputs

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaspec_kernels.product import add_product_

Product = Callable[[Tensor, bool], None]
"""(main_grad, overwrite) -> nothing: adds a gradient to main_grad, or overwrites it"""


class WeightGradientSum:
    """Where a layer's weight gradients are summed up by the matrix product itself, in at least fp32.

    `main_grad`: [O, I]. The first product after `start` overwrites it, later ones add. `done` is called after each.
    Compiled graphs hand on nothing but tensors, so a product finds its sum by the address of `main_grad`.
    """

    _by_address: ClassVar[WeakValueDictionary[int, "WeightGradientSum"]] = WeakValueDictionary()
    _queue: ClassVar["WeightGradientQueue | None"] = None

    def __init__(self, main_grad: Tensor, done: Callable[[], None]):
        self.main_grad, self._done, self._fresh = main_grad, done, True
        self._by_address[main_grad.data_ptr()] = self

    def start(self) -> None:
        """Forgets what was summed up."""
        self._fresh = True

    @classmethod
    def add(cls, main_grad: Tensor, product: Product) -> None:
        """`product(main_grad, overwrite)` adds to it, or overwrites it where it is the first since `start`.

        Inside `defer` that waits until the queue runs.
        """
        if cls._queue is None:
            cls.add_now(main_grad, product)
        else:
            cls._queue.put(main_grad, product)

    @classmethod
    def add_now(cls, main_grad: Tensor, product: Product) -> None:
        """`add`, deferred or not."""
        sum_ = cls._by_address[main_grad.data_ptr()]
        product(main_grad, sum_._fresh)
        sum_._fresh = False
        sum_._done()

    @classmethod
    @contextmanager
    def defer(cls, queue: "WeightGradientQueue | None") -> Iterator[None]:
        """A backward pass in here leaves its products to the queue, where there is one. They keep what they multiply:
        nothing may reuse that memory, see COMPILED_FOR_LATER."""
        cls._queue = queue
        try:
            yield
        finally:
            cls._queue = None


# What torch.compile must not do where products may be deferred: give the memory of a buffer to another one after the
# last operation that it sees reading it.
COMPILED_FOR_LATER = {"allow_buffer_reuse": False, "inplace_buffers": False}


@torch.library.custom_op("megaspec::add_weight_gradient", mutates_args=("main_grad",))
def add_weight_gradient(main_grad: Tensor, grad_out: Tensor, x: Tensor) -> None:
    """main_grad += grad_outᵀ x, now or later, in one operation that torch.compile leaves whole.

    [O, I], [..., O], [..., I]
    """
    a, b = grad_out.flatten(0, -2).t(), x.flatten(0, -2)
    WeightGradientSum.add(main_grad, lambda into, overwrite: add_product_(into, a, b, overwrite=overwrite))


@add_weight_gradient.register_fake
def _(main_grad: Tensor, grad_out: Tensor, x: Tensor) -> None:
    pass


class WeightGradientQueue:
    """Products that were deferred: the weight gradients of one backward pass."""

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, Product]] = []

    def __len__(self) -> int:
        return len(self._pending)

    def put(self, main_grad: Tensor, product: Product) -> None:
        """See WeightGradientSum.add."""
        self._pending.append((main_grad, product))

    @torch.no_grad()
    def run(self) -> None:
        """Computes them, the oldest first."""
        pending, self._pending = self._pending, []
        for main_grad, product in pending:
            WeightGradientSum.add_now(main_grad, product)


def input_gradient(grad_out: Tensor, weight: Tensor) -> Tensor:
    """[..., O], [O, I] -> [..., I]"""
    return grad_out @ weight


def weight_gradient(main_grad: Tensor | None, grad_out: Tensor, x: Tensor) -> Tensor | None:
    """[..., O], [..., I] -> [O, I], the one place where weight gradients of linear layers are made.

    Added to `main_grad` when there is one, now or later (then None), else handed to autograd.
    """
    if main_grad is not None:
        add_weight_gradient(main_grad, grad_out, x)
        return None
    return grad_out.flatten(0, -2).t() @ x.flatten(0, -2)


class LinearOp(torch.autograd.Function):
    """y = x Wᵀ + b. `main_grad`: see weight_gradient."""

    @staticmethod
    def forward(ctx, x, weight, bias, main_grad):
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.main_grad = bias is not None, main_grad
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad_out):
        x, weight = ctx.saved_tensors
        grad_x = input_gradient(grad_out, weight) if ctx.needs_input_grad[0] else None
        grad_weight = weight_gradient(ctx.main_grad, grad_out, x)
        grad_bias = grad_out.flatten(0, -2).sum(0) if ctx.has_bias else None
        return grad_x, grad_weight, grad_bias, None


class Linear(nn.Module):
    """y = x Wᵀ + b, [..., I] -> [..., O].

    `parts` are the sizes of outputs that are computed together (query, key, value; gate, up): O is their sum, and
    each is initialised and split on its own. `residual` marks a layer that writes into the residual stream.
    `main_grad`, when set, is where the weight gradient goes: see weight_gradient.
    """

    def __init__(self, n_in: int, *parts: int, bias: bool = False, residual: bool = False):
        super().__init__()
        self.n_in, self.parts, self.residual = n_in, parts, residual
        self.weight = nn.Parameter(torch.empty(sum(parts), n_in))
        self.bias = nn.Parameter(torch.empty(sum(parts))) if bias else None
        self.main_grad: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return LinearOp.apply(x, self.weight, self.bias, self.main_grad)

    def extra_repr(self) -> str:
        return f"{self.n_in} -> {self.parts}, bias={self.bias is not None}"
