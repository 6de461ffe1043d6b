"""Norms, gates and rotations that write what layers beside them multiply in fp8 themselves: see fp8.py, note
"Producers".

A scale is known before the elements only where it is delayed, and not in the first step; then they make the matrix as
usual, within the same operation, and have the layer quantise it.

Note "Gradients that are none". Nobody has a gradient for what is written in fp8. Autograd would make one all the same,
a matrix of zeros for each layout in each backward pass (also of outputs that are marked as not differentiable; of
experts 3.2 ms of a step of 6 layers like gpt-oss-20b's on an H200), so the operations here ask for None in its place.
"""

# B sequences, T tokens, D model, F width between both products; M tokens; N query heads, K key and value heads, H head
# size, R features of a head that turn, C features of a token in the product of queries, keys and values

from typing import NamedTuple

import torch
from torch import Tensor

from megaspec.nn.fp8 import Fp8Input, Fp8Slots, carrier_of, layer_of
from megaspec.nn.fp8_layouts import FORMATS
from megaspec.nn.linear import Linear
from megaspec_kernels.fp8_cast.tile import empty_pair
from megaspec_kernels.gated.form import GatedForm
from megaspec_kernels.norm.form import NormForm
from megaspec_kernels.operation import fake_of, operation
from megaspec_kernels.registry import REGISTRY
from megaspec_kernels.rope.form import Heads, Turned, values_of


class Producer(NamedTuple):
    """What writes the input of a layer in fp8."""

    implementation: str
    """Of its operation, by the name in the registry."""
    ticket: Tensor
    """Of the layer."""
    columns: bool = True
    """Whether it writes both layouts: not of tokens that ranks gather, which are turned round behind that, and not for
    a frozen weight."""


@operation("megaspec::norm_into_fp8")
def norm_into_fp8(
    x: Tensor,
    term: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    code: str,
    implementation: str,
    ticket: Tensor,
    columns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """[..., D] -> x + scale · term, empty without a term; that, or x, normed in fp8: rows [M, D], columns [D, M], empty
    where they are not asked for, and scale; statistics for the backward pass."""
    producer = REGISTRY["norm"][implementation].producer
    layer = layer_of(ticket)
    known = layer.known("input")
    if known is not None:
        made = producer.forward_in_fp8(x, term, weight, bias, code, known=known, columns=columns)
        return made.total, *made.written, made.statistics
    total, y, statistics = producer.forward(x, term, weight, bias, code)
    in_rows, in_columns = layer.quantise(y.flatten(0, -2), "input", columns=columns)
    values = in_rows.values.new_empty(0)
    if columns:
        values = in_columns.values
    return total, in_rows.values, values, in_rows.scale, statistics


@fake_of(norm_into_fp8)
def _(
    x: Tensor,
    term: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    code: str,
    implementation: str,
    ticket: Tensor,
    columns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    total, y, statistics = REGISTRY["norm"][implementation].producer.forward(x, term, weight, bias, code)
    D = y.shape[-1]
    return total, *empty_pair(y, y.numel() // D, D, FORMATS["e4m3"], columns=columns), statistics


def _grad_or_zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    """Of what is handed on in fp8, of the shape of `like`; None: nobody took it."""
    if grad is None:
        return torch.zeros_like(like)
    return grad


class NormIntoFp8Op(torch.autograd.Function):
    """A norm that hands on its input. `producer`: of the norm's implementation. See fp8.Fp8Input."""

    @staticmethod
    def forward(ctx, x, weight, bias, code, into):
        # see note "Gradients that are none"
        ctx.set_materialize_grads(False)
        _, rows, columns, scale, statistics = norm_into_fp8(
            x, None, weight, bias, code, into.implementation, into.ticket, into.columns
        )
        ctx.save_for_backward(x, weight, statistics)
        ctx.code = code
        ctx.implementation = into.implementation
        ctx.mark_non_differentiable(rows, columns, scale)
        return x.view_as(x), carrier_of(x, *x.shape), rows, columns, scale

    @staticmethod
    def backward(ctx, grad_stream, grad, *_):
        x, weight, statistics = ctx.saved_tensors
        grad = _grad_or_zeros(grad, x)
        gradients = REGISTRY["norm"][ctx.implementation].producer.gradients
        found = gradients(
            grad, grad_stream, x, weight, statistics, ctx.code, has_term=False, needs=ctx.needs_input_grad[1:3]
        )
        return found.x, found.weight, found.bias, None, None


class SumAndNormIntoFp8Op(torch.autograd.Function):
    """The sum before a norm, and the norm."""

    @staticmethod
    def forward(ctx, x, term, weight, bias, code, into, is_scaled):
        # see note "Gradients that are none"
        ctx.set_materialize_grads(False)
        total, rows, columns, scale, statistics = norm_into_fp8(
            x, term, weight, bias, code, into.implementation, into.ticket, into.columns
        )
        ctx.save_for_backward(total, weight, statistics)
        ctx.code = code
        ctx.implementation = into.implementation
        ctx.is_scaled = is_scaled
        ctx.mark_non_differentiable(rows, columns, scale)
        return total, carrier_of(x, *x.shape), rows, columns, scale

    @staticmethod
    def backward(ctx, grad_stream, grad, *_):
        total, weight, statistics = ctx.saved_tensors
        grad = _grad_or_zeros(grad, total)
        gradients = REGISTRY["norm"][ctx.implementation].producer.gradients
        found = gradients(
            grad, grad_stream, total, weight, statistics, ctx.code, has_term=True, needs=ctx.needs_input_grad[2:4]
        )
        grad_term = found.term if ctx.is_scaled else found.x
        return found.x, grad_term, found.weight, found.bias, None, None, None


def norm_of_stream(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, form: NormForm, into: Producer
) -> tuple[Tensor, Fp8Input]:
    """-> the stream as it is, and normed."""
    stream, *normed = NormIntoFp8Op.apply(x, weight, bias, form.code, into)
    return stream, Fp8Input(*normed)


def norm_of_sum(
    x: Tensor, term: Tensor, weight: Tensor | None, bias: Tensor | None, *, form: NormForm, into: Producer
) -> tuple[Tensor, Fp8Input]:
    """-> x + scale · term, and normed."""
    total, *normed = SumAndNormIntoFp8Op.apply(x, term, weight, bias, form.code, into, form.is_scaled)
    return total, Fp8Input(*normed)


@operation("megaspec::gated_into_fp8")
def gated_into_fp8(gate_up: Tensor, code: str, implementation: str, ticket: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[..., 2 F] -> what the layer behind the gate takes, in fp8: rows [M, F], columns [F, M] and scale."""
    producer = REGISTRY["gated"][implementation].producer
    layer = layer_of(ticket)
    known = layer.known("input")
    if known is not None:
        rows, columns, scale = producer.forward_in_fp8(gate_up, code, known=known)
        return rows, columns, scale
    pair = layer.quantise(producer.forward(gate_up, code).flatten(0, -2), "input")
    return pair.rows.values, pair.columns.values, pair.rows.scale


@fake_of(gated_into_fp8)
def _(gate_up: Tensor, code: str, implementation: str, ticket: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    F = gate_up.shape[-1] // 2
    rows, columns, scale = empty_pair(gate_up, gate_up.numel() // (2 * F), F, FORMATS["e4m3"])
    return rows, columns, scale


@operation("megaspec::gated_gradient_into_fp8")
def gated_gradient_into_fp8(
    grad: Tensor, gate_up: Tensor, code: str, implementation: str, ticket: Tensor, gradient_format: str
) -> tuple[Tensor, Tensor, Tensor]:
    """[..., F], [..., 2 F] -> the gradient of the layer before the gate, in fp8: rows [M, 2 F], columns [2 F, M] and
    scale."""
    producer = REGISTRY["gated"][implementation].producer
    layer = layer_of(ticket)
    known = layer.known("gradient")
    if known is not None:
        rows, columns, scale = producer.backward_in_fp8(grad, gate_up, code, known=known)
        return rows, columns, scale
    pair = layer.quantise(producer.backward(grad, gate_up, code).flatten(0, -2), "gradient")
    return pair.rows.values, pair.columns.values, pair.rows.scale


@fake_of(gated_gradient_into_fp8)
def _(
    grad: Tensor, gate_up: Tensor, code: str, implementation: str, ticket: Tensor, gradient_format: str
) -> tuple[Tensor, Tensor, Tensor]:
    F = gate_up.shape[-1]
    rows, columns, scale = empty_pair(gate_up, gate_up.numel() // F, F, FORMATS[gradient_format])
    return rows, columns, scale


class GatedBetweenFp8Op(torch.autograd.Function):
    """A gate between two layers, whose gradient for the one before is written in fp8, too. `before`, `behind`: their
    tickets."""

    @staticmethod
    def forward(
        ctx, gate_up, slot_rows, slot_columns, slot_scale, code, implementation, before, behind, gradient_format
    ):
        # see note "Gradients that are none"
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(gate_up)
        ctx.code = code
        ctx.implementation = implementation
        ctx.before = before
        ctx.gradient_format = gradient_format
        rows, columns, scale = gated_into_fp8(gate_up, code, implementation, behind)
        ctx.mark_non_differentiable(rows, columns, scale)
        shape = (*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        return carrier_of(gate_up, *shape), rows, columns, scale

    @staticmethod
    def backward(ctx, grad, *_):
        (gate_up,) = ctx.saved_tensors
        grad = _grad_or_zeros(grad, gate_up.chunk(2, dim=-1)[0])
        rows, columns, scale = gated_gradient_into_fp8(
            grad, gate_up, ctx.code, ctx.implementation, ctx.before, ctx.gradient_format
        )
        return None, rows, columns, scale, None, None, None, None, None


def gated(
    gate_up: Tensor, slots: Fp8Slots, *, form: GatedForm, implementation: str, before: Linear, behind: Linear
) -> Fp8Input:
    """What the layer `behind` takes. `slots`: of the layer `before`, with `gate_up` its output."""
    made = GatedBetweenFp8Op.apply(
        gate_up,
        *slots,
        form.code,
        implementation,
        before.fp8.ticket,
        behind.fp8.ticket,
        before.fp8.gradient_format,
    )
    return Fp8Input(*made)


@operation("megaspec::rope_gradient_into_fp8")
def rope_gradient_into_fp8(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    cos: Tensor,
    sin: Tensor,
    implementation: str,
    ticket: Tensor,
    gradient_format: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T, N, H], [B, T, K, H] twice, [T or B T, R / 2] twice -> the gradient of the layer that makes queries, keys
    and values, in fp8: rows [M, C], columns [C, M] and scale."""
    producer = REGISTRY["rope"][implementation].producer
    layer = layer_of(ticket)
    known = layer.known("gradient")
    if known is not None:
        rows, columns, scale = producer.backward_in_fp8(grad_q, grad_k, grad_v, cos, sin, known=known)
        return rows, columns, scale
    pair = layer.quantise(producer.backward(grad_q, grad_k, grad_v, cos, sin).flatten(0, -2), "gradient")
    return pair.rows.values, pair.columns.values, pair.rows.scale


@fake_of(rope_gradient_into_fp8)
def _(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    cos: Tensor,
    sin: Tensor,
    implementation: str,
    ticket: Tensor,
    gradient_format: str,
) -> tuple[Tensor, Tensor, Tensor]:
    B, T, N, H = grad_q.shape
    C = (N + 2 * grad_k.shape[2]) * H
    rows, columns, scale = empty_pair(grad_q, B * T, C, FORMATS[gradient_format])
    return rows, columns, scale


class TurnedBehindFp8Op(torch.autograd.Function):
    """Queries and keys that are turned by their positions, behind the layer that makes them and the values, whose
    gradient is written in fp8. `before`: its ticket."""

    @staticmethod
    def forward(
        ctx,
        qkv,
        slot_rows,
        slot_columns,
        slot_scale,
        cos,
        sin,
        queries,
        keys,
        size,
        implementation,
        before,
        gradient_format,
    ):
        ctx.save_for_backward(cos, sin)
        ctx.implementation = implementation
        ctx.before = before
        ctx.gradient_format = gradient_format
        q, k = REGISTRY["rope"][implementation].producer.forward(qkv, cos, sin, queries, keys, size)
        return q, k, values_of(qkv, Heads(queries, keys, size))

    @staticmethod
    def backward(ctx, grad_q, grad_k, grad_v):
        cos, sin = ctx.saved_tensors
        rows, columns, scale = rope_gradient_into_fp8(
            grad_q, grad_k, grad_v, cos, sin, ctx.implementation, ctx.before, ctx.gradient_format
        )
        return None, rows, columns, scale, None, None, None, None, None, None, None, None


def turned(
    qkv_BTC: Tensor, slots: Fp8Slots, cos: Tensor, sin: Tensor, *, heads: Heads, implementation: str, before: Linear
) -> Turned:
    """What attention takes. `slots`: of the layer `before`, with `qkv_BTC` its output."""
    made = TurnedBehindFp8Op.apply(
        qkv_BTC, *slots, cos, sin, *heads, implementation, before.fp8.ticket, before.fp8.gradient_format
    )
    return Turned(*made)
