"""The linear layer: one operation with separate forward, input gradient and weight gradient."""

# B sequences, T tokens, I inputs, O outputs

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from megaspec.nn.fp8 import (
    Fp8Input,
    Fp8Slots,
    Fp8Use,
    fp8_backward,
    fp8_backward_of,
    fp8_forward,
    fp8_forward_of,
    fp8_weight_gradient,
    slots_of,
    weight_gradient_of,
)
from megaspec_kernels.operation import fake_of, operation
from megaspec_kernels.registry import REGISTRY, LinearKernel

TORCH: LinearKernel = REGISTRY["linear"]["torch"]

Product = Callable[[Tensor, bool], None]
"""(buffer, overwrite) -> nothing: adds a gradient to the buffer, or overwrites it"""


class MainGrad(NamedTuple):
    """Where a layer's weight gradient goes, as tensors: what compiled code can hand on. See the note "Tickets"."""

    buffer: Tensor
    """[O, I], in at least fp32."""
    ticket: Tensor
    """int64 [1] on the CPU: the number of the WeightGradientSum."""


class WeightGradientSum:
    """A layer's weight gradient, summed up in `buffer` by the matrix product itself.

    The first product after `start` overwrites it, later ones add, and `done` is called after each. After `stop` the
    buffer has no memory: a product that comes then is a bug, and is told so.
    """

    def __init__(
        self,
        owner: "WeightGradientSums",
        buffer: Tensor,
        done: Callable[[], None],
        products: LinearKernel = TORCH,
    ):
        """`products`: the linear layer's."""
        self.products = products
        self._owner = owner
        self._buffer = buffer
        self._done = done
        self._is_open = True
        self._is_fresh = True

    def start(self) -> None:
        """Forgets what was summed up."""
        self._is_open = True
        self._is_fresh = True

    def stop(self) -> None:
        """Takes no product until the next `start`."""
        self._is_open = False

    def add(self, product: Product) -> None:
        """`product(buffer, overwrite)` adds to the buffer, or overwrites it where it is the first since `start`.

        Inside `WeightGradientSums.defer` that waits until the queue runs.
        """
        queue = self._owner.queue
        if queue is None:
            self.add_now(product)
        else:
            queue.put(self, product)

    def add_now(self, product: Product) -> None:
        """`add`, deferred or not."""
        self.add_part(product)
        self.arrived()

    def add_part(self, product: Product) -> None:
        """`add_now` of a part of what a backward pass adds: `arrived` tells when all of it is there."""
        assert self._is_open, f"a weight gradient {tuple(self._buffer.shape)} came while its sum has no memory"
        product(self._buffer, self._is_fresh)
        self._is_fresh = False

    def arrived(self) -> None:
        """What a backward pass adds is there."""
        self._done()


class TableSum:
    """The gradient of a table of the vocabulary, added to its WeightGradientSum by an embedding or output head.

    A tied table has one sum and two of these. `ends_pass`: a backward pass adds nothing to the table behind this
    module, the embedding where a chunk has both.

    Note "Tables". The loss makes the table's gradient in its forward pass, from logits that it drops there. So it is
    added before anyone knows what the loss's own gradient will be: only a loss that the backward pass starts from, with
    a gradient of 1, may do that, which is what the passes of a step are. Whoever calls `backward` on something else
    has gradients through autograd: `is_open` is false outside of WeightGradientSums.step.
    """

    def __init__(self, owner: "WeightGradientSums", one: WeightGradientSum, *, ends_pass: bool):
        self._owner = owner
        self._sum = one
        self._ends_pass = ends_pass

    @property
    def is_open(self) -> bool:
        """Gradients are to be added here; else they are autograd's."""
        return self._owner.is_step

    def add(self, product: Product) -> None:
        """`product(buffer, overwrite)` adds to the buffer, or overwrites it."""
        self._sum.add_part(product)

    def arrived(self) -> None:
        """Called in the backward pass, when what this module adds is there."""
        if self._ends_pass:
            self._sum.arrived()


class TableUser(Protocol):
    """An embedding or an output head."""

    table_sum: TableSum | None


class WeightGradientSums:
    """The weight gradients of one built model, which its linear layers and the pipeline's queues agree on.

    Note "Tickets". A product has to find its sum: to know whether it is the first, and whom to tell. Compiled graphs
    hand on nothing but tensors, so it can't be given the sum itself; a Python number would be a constant of the graph,
    and each layer would be compiled anew, where one compiled block serves all. So the number of the sum travels in a
    tensor beside its buffer. That tensor is on the CPU: reading it waits for no GPU. Numbers are given once in a
    process, whichever model asks, so that models side by side never meet, and a sum that is gone leaves its number to
    nobody (as an address would). The table below holds sums weakly: they live as long as the model that owns them.
    """

    def __init__(self) -> None:
        self.queue: WeightGradientQueue | None = None
        """Where products wait; None: they are computed at once."""
        self.is_step = False
        """The passes that run are those of a step: losses are what their backward passes start from."""
        self._sums: list[WeightGradientSum] = []

    def connect(self, layer: "Linear", buffer: Tensor, done: Callable[[], None]) -> WeightGradientSum:
        """From now on the layer's weight gradients are summed in `buffer`; `done` is called after each."""
        one = WeightGradientSum(self, buffer, done, layer.products)
        number = next(_numbers)
        _sum_of_number[number] = one
        self._sums.append(one)
        layer.main_grad = MainGrad(buffer, torch.tensor([number], dtype=torch.int64, device="cpu"))
        return one

    def connect_table(
        self, users: Sequence[tuple[TableUser, bool]], buffer: Tensor, done: Callable[[], None]
    ) -> WeightGradientSum:
        """From now on the modules that hold a table sum its gradients in `buffer`, in the passes of a step; `done` is
        called once for each. `users`: with whether they are the last that a backward pass comes to."""
        one = WeightGradientSum(self, buffer, done)
        self._sums.append(one)
        for user, ends_pass in users:
            user.table_sum = TableSum(self, one, ends_pass=ends_pass)
        return one

    @contextmanager
    def step(self) -> Iterator[None]:
        """The passes in here are those of a step: see the note "Tables"."""
        self.is_step = True
        try:
            yield
        finally:
            self.is_step = False

    @contextmanager
    def defer(self, queue: "WeightGradientQueue | None") -> Iterator[None]:
        """A backward pass in here leaves its products to the queue, where there is one. They keep what they multiply:
        nothing may reuse that memory, see COMPILED_FOR_LATER."""
        self.queue = queue
        try:
            yield
        finally:
            self.queue = None


_numbers = count()
_sum_of_number: WeakValueDictionary[int, WeightGradientSum] = WeakValueDictionary()


def sum_of(ticket: Tensor) -> WeightGradientSum:
    """The sum that a ticket stands for."""
    return _sum_of_number[int(ticket)]


# What torch.compile must not do with layers whose weight gradients are summed in place: pad the rows of its buffers, as
# it does on GPUs where 128 bytes do not divide them. It lays the gradient out without padding for add_weight_gradient,
# and the product that makes the input gradient reads that memory as if it were padded (torch 2.11; 2.13 does not).
# Nothing fails: the input gradient is wrong, and its last rows are what lies behind the buffer.
COMPILED: dict[str, str | int | bool] = {"comprehensive_padding": False}
# Where products may be deferred, neither may it give the memory of a buffer to another one after the last operation
# that it sees reading it.
COMPILED_FOR_LATER = COMPILED | {"allow_buffer_reuse": False, "inplace_buffers": False}


@operation("megaspec::add_weight_gradient", mutates_args=("buffer",))
def add_weight_gradient(buffer: Tensor, ticket: Tensor, grad_out: Tensor, x: Tensor) -> None:
    """buffer += grad_outᵀ x, now or later, in one operation that torch.compile leaves whole.

    [O, I], [1], [..., O], [..., I]
    """
    one = sum_of(ticket)
    one.add(lambda into, overwrite: one.products.add_weight_gradient(into, grad_out, x, overwrite=overwrite))


@fake_of(add_weight_gradient)
def _(buffer: Tensor, ticket: Tensor, grad_out: Tensor, x: Tensor) -> None:
    pass


class WeightGradientQueue:
    """Products that were deferred: the weight gradients of one backward pass."""

    def __init__(self) -> None:
        self._pending: list[tuple[WeightGradientSum, Product]] = []

    def __len__(self) -> int:
        return len(self._pending)

    def put(self, one: WeightGradientSum, product: Product) -> None:
        """See WeightGradientSum.add."""
        self._pending.append((one, product))

    @torch.no_grad()
    def run(self) -> None:
        """Computes them, the oldest first."""
        pending, self._pending = self._pending, []
        for one, product in pending:
            one.add_now(product)


def weight_gradient(
    main_grad: MainGrad | None, grad_out: Tensor, x: Tensor, products: LinearKernel = TORCH
) -> Tensor | None:
    """[..., O], [..., I] -> [O, I], the one place where weight gradients of linear layers are made.

    Added to `main_grad` when there is one, now or later (then None), else handed to autograd. `products`: the layer's.
    """
    if main_grad is not None:
        add_weight_gradient(main_grad.buffer, main_grad.ticket, grad_out, x)
        return None
    return products.weight_gradient(grad_out, x)


def bias_gradient(grad_out: Tensor) -> Tensor:
    """[..., O] -> [O]"""
    return grad_out.flatten(0, -2).sum(0)


class LinearOp(torch.autograd.Function):
    """y = x Wᵀ + b. `main_grad`: see weight_gradient. A frozen weight has no gradient, and its input is not kept."""

    @staticmethod
    def forward(ctx, x, weight, bias, main_grad, products):
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.main_grad = main_grad
        ctx.products = products
        return products.forward(x, weight, bias)

    @staticmethod
    def backward(ctx, grad_out):
        x, weight = ctx.saved_tensors
        products = ctx.products
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = products.input_gradient(grad_out, weight) if needs_x else None
        grad_weight = weight_gradient(ctx.main_grad, grad_out, x, products) if needs_weight else None
        grad_bias = bias_gradient(grad_out) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None, None


@operation("megaspec::add_fp8_weight_gradient", mutates_args=("buffer",))
def add_fp8_weight_gradient(
    buffer: Tensor, ticket: Tensor, fp8: Tensor, grad_OM: Tensor, grad_scale: Tensor, x_IM: Tensor, x_scale: Tensor
) -> None:
    """`add_weight_gradient` of factors in fp8, both in columns. `fp8`: the layer's ticket there."""

    def product(into: Tensor, overwrite: bool) -> None:
        weight_gradient_of(fp8, grad_OM, grad_scale, x_IM, x_scale, dtype=into.dtype, into=into, overwrite=overwrite)

    sum_of(ticket).add(product)


@fake_of(add_fp8_weight_gradient)
def _(
    buffer: Tensor, ticket: Tensor, fp8: Tensor, grad_OM: Tensor, grad_scale: Tensor, x_IM: Tensor, x_scale: Tensor
) -> None:
    pass


class Fp8Factors(NamedTuple):
    """What a weight gradient is made of, in columns."""

    grad_OM: Tensor
    grad_scale: Tensor
    x_IM: Tensor
    x_scale: Tensor


def fp8_weight_gradient_into(
    main_grad: MainGrad | None, fp8: Tensor, factors: Fp8Factors, weight: Tensor
) -> Tensor | None:
    """`weight_gradient` of factors in fp8. `fp8`: the layer's ticket there."""
    if main_grad is not None:
        add_fp8_weight_gradient(main_grad.buffer, main_grad.ticket, fp8, *factors)
        return None
    return fp8_weight_gradient(*factors, weight, fp8)


class Fp8LinearOp(torch.autograd.Function):
    """LinearOp with products in fp8. Of the input a byte a number is kept. See fp8.py.

    `given`: the input arrives in fp8, and x stands for it.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, main_grad, fp8, given):
        return _fp8_forward(ctx, x, weight, bias, main_grad, fp8, given)

    @staticmethod
    def backward(ctx, grad_out):
        kept, kept_scale, weight = ctx.saved_tensors
        fp8 = ctx.fp8
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x, grad_OM, grad_scale = fp8_backward(
            grad_out, weight, fp8.ticket, fp8.recipe, fp8.gradient_format, needs_x, needs_weight
        )
        grad_weight = None
        if needs_weight:
            factors = Fp8Factors(grad_OM, grad_scale, kept, kept_scale)
            grad_weight = fp8_weight_gradient_into(ctx.main_grad, fp8.ticket, factors, weight)
        grad_bias = bias_gradient(grad_out) if needs_bias else None
        return grad_x if needs_x else None, grad_weight, grad_bias, None, None, None


class Fp8SlotsLinearOp(torch.autograd.Function):
    """Fp8LinearOp whose output's gradient arrives in fp8, as that of the slots: see fp8.py, note "Producers"."""

    @staticmethod
    def forward(ctx, x, weight, main_grad, fp8, given):
        # no gradient of y is made up where there is none
        ctx.set_materialize_grads(False)
        y = _fp8_forward(ctx, x, weight, None, main_grad, fp8, given)
        ctx.dtype = y.dtype
        ctx.x_shape = x.shape
        return y, *slots_of(y, fp8.gradient_format)

    @staticmethod
    def backward(ctx, grad_out, grad_MO, grad_OM, grad_scale):
        # torch.compile traces this with a gradient for each output, whether there is one or not
        if not torch.compiler.is_compiling():
            assert grad_out is None, "the gradient arrives in the slots; y is handed to one producer alone"
        kept, kept_scale, weight = ctx.saved_tensors
        fp8 = ctx.fp8
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = None
        if needs_x:
            grad_x = fp8_backward_of(grad_MO, grad_scale, weight, fp8.ticket, ctx.dtype).view(ctx.x_shape)
        grad_weight = None
        if needs_weight:
            factors = Fp8Factors(grad_OM, grad_scale, kept, kept_scale)
            grad_weight = fp8_weight_gradient_into(ctx.main_grad, fp8.ticket, factors, weight)
        return grad_x, grad_weight, None, None, None


def _fp8_forward(
    ctx,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    main_grad: MainGrad | None,
    fp8: Fp8Use,
    given: Fp8Input | None,
) -> Tensor:
    """x Wᵀ + b, and what the backward pass needs."""
    if given is None:
        y, kept, kept_scale = fp8_forward(x, weight, fp8.ticket, fp8.recipe, weight.requires_grad, 0, 1)
    else:
        y, kept, kept_scale = forward_of_given(given, weight, fp8)
    ctx.save_for_backward(kept, kept_scale, weight)
    ctx.main_grad = main_grad
    ctx.fp8 = fp8
    return y if bias is None else y + bias


def forward_of_given(given: Fp8Input, weight: Tensor, fp8: Fp8Use) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x Wᵀ, and what is kept of an input that arrives in both layouts, with its scale; of a frozen weight nothing is
    kept."""
    y_MO = fp8_forward_of(given.rows, given.scale, weight, fp8.ticket, given.carrier.dtype)
    y = y_MO.view(*given.carrier.shape[:-1], weight.shape[0])
    if not weight.requires_grad:
        return y, None, None
    return y, given.columns, given.scale


class Linear(nn.Module):
    """y = x Wᵀ + b, [..., I] -> [..., O].

    `parts` are the sizes of outputs that are computed together (query, key, value; gate, up): O is their sum, and
    each is initialised and split on its own. `residual` marks a layer that writes into the residual stream.
    `main_grad`, when set, is where the weight gradient goes: see WeightGradientSums.connect. `fp8`, when set, has the
    products take fp8: see fp8.py. `products` are what computes them otherwise, kernels.linear.
    """

    def __init__(self, n_in: int, *parts: int, bias: bool = False, residual: bool = False):
        super().__init__()
        self.n_in, self.parts, self.residual = n_in, parts, residual
        self.weight = nn.Parameter(torch.empty(sum(parts), n_in))
        self.bias = nn.Parameter(torch.empty(sum(parts))) if bias else None
        self.products = TORCH
        self.main_grad: MainGrad | None = None
        self.fp8: Fp8Use | None = None

    def forward(self, x: Tensor | Fp8Input) -> Tensor:
        return self.product(x, self.bias)

    def product(self, x: Tensor | Fp8Input, bias: Tensor | None) -> Tensor:
        """x Wᵀ + b, by the operation that the layer's precision asks for."""
        if self.fp8 is None:
            return LinearOp.apply(x, self.weight, bias, self.main_grad, self.products)
        carrier, given = carrier_and_given(x)
        return Fp8LinearOp.apply(carrier, self.weight, bias, self.main_grad, self.fp8, given)

    def with_slots(self, x: Tensor | Fp8Input) -> tuple[Tensor, Fp8Slots]:
        """x Wᵀ, and what stands for it so that its gradient arrives in fp8: see fp8.py, note "Producers"."""
        assert self.fp8 is not None, "the layer has products in another precision"
        assert self.bias is None, "the bias's gradient needs the output's, in more than fp8"
        carrier, given = carrier_and_given(x)
        y, *slots = Fp8SlotsLinearOp.apply(carrier, self.weight, self.main_grad, self.fp8, given)
        return y, Fp8Slots(*slots)

    def extra_repr(self) -> str:
        return f"{self.n_in} -> {self.parts}, bias={self.bias is not None}"


def carrier_and_given(x: Tensor | Fp8Input) -> tuple[Tensor, Fp8Input | None]:
    """What stands for an input in autograd, and the input where it arrives in fp8."""
    if isinstance(x, Fp8Input):
        return x.carrier, x
    return x, None
