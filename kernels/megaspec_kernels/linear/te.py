"""The three products of a linear layer through Transformer Engine's general_gemm, cuBLASLt in bf16 and fp16.

Note "Layouts". general_gemm(A, B, layout) speaks of matrices by columns: of ours, by rows, "TN" makes B Aᵀ, "NN" makes
B A and "NT" makes Bᵀ A. These are the three products of a layer, in this order, with the weight or the input for A. It
looks at shapes and not at strides, so everything that goes in lies in one piece.
"""

# M tokens, I inputs, O outputs

from torch import Tensor

from megaspec_kernels.linear import torch as plain
from megaspec_kernels.operation import fake_of, operation
from megaspec_kernels.te_package import transformer_engine


def forward(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """See reference.py."""
    if x.is_meta:
        return plain.forward(x, weight_OI, bias_O)
    return _forward(x, weight_OI, bias_O)


def input_gradient(grad_out: Tensor, weight_OI: Tensor) -> Tensor:
    """See reference.py."""
    if grad_out.is_meta:
        return plain.input_gradient(grad_out, weight_OI)
    return _input_gradient(grad_out, weight_OI)


def weight_gradient(grad_out: Tensor, x: Tensor) -> Tensor:
    """See reference.py."""
    if grad_out.is_meta:
        return plain.weight_gradient(grad_out, x)
    return _weight_gradient(grad_out, x)


def add_weight_gradient(into_OI: Tensor, grad_out: Tensor, x: Tensor, *, overwrite: bool) -> None:
    """See reference.py. The product itself adds, in the format of `into`."""
    if into_OI.is_meta:
        return
    assert into_OI.is_contiguous(), f"a sum of weight gradients with strides {into_OI.stride()}"
    transformer_engine().general_gemm(
        _matrix(x),
        _matrix(grad_out),
        out_dtype=into_OI.dtype,
        layout="NT",
        out=into_OI,
        accumulate=not overwrite,
        grad=True,
    )


# Operations of their own, which torch.compile leaves whole: it can't trace what lies below.
@operation("megaspec::te_linear_forward")
def _forward(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    y_MO, *_ = transformer_engine().general_gemm(
        weight_OI.contiguous(), _matrix(x), out_dtype=x.dtype, layout="TN", bias=bias_O
    )
    return y_MO.view(*x.shape[:-1], weight_OI.shape[0])


@fake_of(_forward)
def _(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight_OI.shape[0])


@operation("megaspec::te_linear_input_gradient")
def _input_gradient(grad_out: Tensor, weight_OI: Tensor) -> Tensor:
    grad_MI, *_ = transformer_engine().general_gemm(
        weight_OI.contiguous(), _matrix(grad_out), out_dtype=grad_out.dtype, layout="NN", grad=True
    )
    return grad_MI.view(*grad_out.shape[:-1], weight_OI.shape[1])


@fake_of(_input_gradient)
def _(grad_out: Tensor, weight_OI: Tensor) -> Tensor:
    return grad_out.new_empty(*grad_out.shape[:-1], weight_OI.shape[1])


@operation("megaspec::te_linear_weight_gradient")
def _weight_gradient(grad_out: Tensor, x: Tensor) -> Tensor:
    grad_OI, *_ = transformer_engine().general_gemm(
        _matrix(x), _matrix(grad_out), out_dtype=x.dtype, layout="NT", grad=True
    )
    return grad_OI


@fake_of(_weight_gradient)
def _(grad_out: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(grad_out.shape[-1], x.shape[-1])


def _matrix(x: Tensor) -> Tensor:
    """[..., K] -> [M, K] in one piece."""
    return x.flatten(0, -2).contiguous()
