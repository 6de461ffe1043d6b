"""Norms through Transformer Engine's kernels, forward and backward; the gradient of the stream behind an RMSNorm is
added in its backward kernel. The sum before a norm is torch's.

Its kernels multiply by a weight and, of a LayerNorm, add a bias: where there is none they get ones and zeros.
"""

# M rows, D features of a row

import torch
from torch import Tensor

from megaspec_kernels.norm import reference
from megaspec_kernels.norm.form import Normed, NormForm, decoded
from megaspec_kernels.norm.reference import add
from megaspec_kernels.operation import fake_of, operation
from megaspec_kernels.te_package import transformer_engine

# SMs that its kernels leave to others.
_MARGIN = 0


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, form: NormForm) -> Tensor:
    """See reference.py."""
    if x.is_meta:
        return reference.norm(x, weight, bias, form=form)
    return _NormOp.apply(x, weight, bias, form.code)


def norm_of_stream(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, form: NormForm) -> Normed:
    """See reference.py."""
    if x.is_meta:
        return reference.norm_of_stream(x, weight, bias, form=form)
    return _NormOfStreamOp.apply(x, weight, bias, form.code)


def norm_of_sum(x: Tensor, term: Tensor, weight: Tensor | None, bias: Tensor | None, *, form: NormForm) -> Normed:
    """See reference.py."""
    return norm_of_stream(add(x, term, scale=form.scale), weight, bias, form=form)


class _NormOp(torch.autograd.Function):
    """A norm of which nobody else takes the input."""

    @staticmethod
    def forward(ctx, x, weight, bias, code):
        y, mean, deviation = _te_norm_forward(x, weight, bias, code)
        ctx.save_for_backward(x, weight, mean, deviation)
        ctx.code = code
        return y

    @staticmethod
    def backward(ctx, grad):
        return *_gradients(ctx, None, grad), None


class _NormOfStreamOp(torch.autograd.Function):
    """A norm that hands on its input, so that the gradient that the stream has behind it is added in its own."""

    @staticmethod
    def forward(ctx, x, weight, bias, code):
        y, mean, deviation = _te_norm_forward(x, weight, bias, code)
        ctx.save_for_backward(x, weight, mean, deviation)
        ctx.code = code
        return x.view_as(x), y

    @staticmethod
    def backward(ctx, grad_stream, grad):
        return *_gradients(ctx, grad_stream, grad), None


def _gradients(ctx, grad_stream: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of x, weight and bias."""
    x, weight, mean, deviation = ctx.saved_tensors
    d_x, d_weight, d_bias = _te_norm_backward(grad, grad_stream, x, weight, mean, deviation, ctx.code)
    _, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    return d_x, d_weight if needs_weight else None, d_bias if needs_bias else None


# Operations of their own, which torch.compile leaves whole.
@operation("megaspec::te_norm_forward")
def _te_norm_forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, code: str) -> tuple[Tensor, Tensor, Tensor]:
    """-> normed; of its rows the mean, empty where none is taken off, and 1 / std, in fp32."""
    form = decoded(code)
    if x.numel() == 0:
        # its kernels take no empty tensors
        of_rows = x.new_zeros(x.numel() // x.shape[-1], dtype=torch.float32)
        return x.new_empty(x.shape), of_rows.new_empty(0), of_rows
    te = transformer_engine()
    rows = x.flatten(0, -2).contiguous()
    weight = _weight(x, weight, form.gain)
    kind = te.pytorch.constants.TE_DType[x.dtype]
    is_centred = form.gain == "one_plus"
    if form.kind == "rms":
        y, _, deviation = te.functions.rmsnorm_fwd(rows, weight, form.eps, None, None, kind, _MARGIN, is_centred)
        return y.view(x.shape), deviation.new_empty(0), deviation
    if bias is None:
        bias = torch.zeros_like(weight)
    y, mean, deviation = te.functions.layernorm_fwd(rows, weight, bias, form.eps, None, None, kind, _MARGIN, is_centred)
    return y.view(x.shape), mean, deviation


@fake_of(_te_norm_forward)
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, code: str) -> tuple[Tensor, Tensor, Tensor]:
    M = x.numel() // x.shape[-1]
    of_rows = x.new_empty(M, dtype=torch.float32)
    mean = x.new_empty(0 if decoded(code).kind == "rms" else M, dtype=torch.float32)
    return x.new_empty(x.shape), mean, of_rows


@operation("megaspec::te_norm_backward")
def _te_norm_backward(
    grad: Tensor,
    grad_stream: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    deviation: Tensor,
    code: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> gradients of x, with that of the stream where there is one, of the weight and of the bias."""
    form = decoded(code)
    weight = _weight(x, weight, form.gain)
    if x.numel() == 0:
        d_bias = torch.zeros_like(weight) if form.kind == "layer" else weight.new_empty(0)
        return torch.empty_like(x), torch.zeros_like(weight), d_bias
    te = transformer_engine()
    rows = x.flatten(0, -2).contiguous()
    of_rows = grad.flatten(0, -2).contiguous()
    is_centred = form.gain == "one_plus"
    if form.kind == "layer":
        d_x, d_weight, d_bias = te.functions.layernorm_bwd(of_rows, rows, mean, deviation, weight, _MARGIN, is_centred)
        d_x = d_x.view(x.shape)
        if grad_stream is not None:
            d_x = d_x.add_(grad_stream)
        return d_x, d_weight, d_bias
    if grad_stream is None:
        d_x, d_weight = te.functions.rmsnorm_bwd(of_rows, rows, deviation, weight, _MARGIN, is_centred)
    else:
        stream = grad_stream.flatten(0, -2).contiguous()
        d_x, d_weight = te.functions.rmsnorm_bwd_add(of_rows, rows, stream, deviation, weight, _MARGIN, is_centred)
    return d_x.view(x.shape), d_weight, d_weight.new_empty(0)


@fake_of(_te_norm_backward)
def _(
    grad: Tensor,
    grad_stream: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    deviation: Tensor,
    code: str,
) -> tuple[Tensor, Tensor, Tensor]:
    D = x.shape[-1]
    return x.new_empty(x.shape), x.new_empty(D), x.new_empty(0 if decoded(code).kind == "rms" else D)


def _weight(x: Tensor, weight: Tensor | None, gain: str) -> Tensor:
    """What its kernels multiply by."""
    if gain == "none":
        return x.new_ones(x.shape[-1])
    return weight.contiguous()
