"""Where Transformer Engine runs, and one that computes on a CPU in its place.

The fake takes what the package's own functions take, by the same names (test_te_signatures.py holds them to it),
refuses what those would refuse or read wrongly, and computes in fp64 what its documentation says. What it can't tell is
whether the package does so: the tests marked `gpu` do.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megaspec_kernels import te_package
from megaspec_kernels.attention import reference_block
from megaspec_kernels.attention import te as attention_te
from megaspec_kernels.attention.documents import BlockDocuments, Documents
from megaspec_kernels.attention.scoring import Scoring
from megaspec_kernels.linear import te, te_fp8, te_mxfp8, te_nvfp4
from megaspec_kernels.norm import te as norm_te
from megaspec_kernels.te_package import TransformerEngine

E4M3 = "e4m3"
E5M2 = "e5m2"
TORCH = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
LINE = 128
MX_LINE = 32
E2M1 = "e2m1"
FP4_LINE = 16
# What codes stand for, by their last three bits.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def te_runs(dtype: torch.dtype, device: torch.device) -> None:
    """Skips what the catalog says that te doesn't run, and where it is not installed."""
    if device.type == "cpu" or dtype not in (torch.bfloat16, torch.float16):
        pytest.skip("the catalog says that te computes on GPUs in bf16 and fp16")
    lacks = te_package.missing()
    if lacks is not None:
        pytest.skip(lacks)


@dataclass(frozen=True)
class Call:
    """A product that was asked for."""

    layout: str
    accumulate: bool
    out: Tensor | None
    split: bool
    in_fp8: bool


@dataclass
class Fake:
    """What was asked of it."""

    products: list[Call] = field(default_factory=list)
    casts: list[str] = field(default_factory=list)
    attentions: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)


class Float8TensorStorage:
    def __init__(self, *, data, fp8_scale_inv, fp8_dtype, fake_dtype=None, data_transpose=None, quantizer=None):
        self._data = data
        self._transpose = data_transpose
        self._scale_inv = fp8_scale_inv
        self._fp8_dtype = fp8_dtype
        for values in (data, data_transpose):
            assert values is None or (values.dtype == torch.uint8 and values.is_contiguous())
        assert fp8_scale_inv.shape == (1,), f"a scale of a tensor {tuple(fp8_scale_inv.shape)}"
        assert fp8_scale_inv.dtype == torch.float32

    def wide(self, *, in_rows: bool) -> Tensor:
        """[M, K] in fp64 of one of the layouts, which has to be there: Hopper has no other."""
        values = self._data if in_rows else self._transpose
        assert values is not None, f"a product asks for {'rows' if in_rows else 'columns'}, which are not there"
        wide = values.view(TORCH[self._fp8_dtype]).double() * self._scale_inv.double()
        return wide if in_rows else wide.t()


class Float8BlockwiseQTensorStorage:
    def __init__(
        self, rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, fp8_dtype, quantizer,
        is_2D_scaled, fake_dtype=None,
    ):  # fmt: skip
        self._rowwise_data = rowwise_data
        self._rowwise_scale_inv = rowwise_scale_inv
        self._columnwise_data = columnwise_data
        self._columnwise_scale_inv = columnwise_scale_inv
        self._fp8_dtype = fp8_dtype
        self._is_2D_scaled = is_2D_scaled

    def wide(self, *, in_rows: bool) -> Tensor:
        values = self._rowwise_data if in_rows else self._columnwise_data
        scale = self._rowwise_scale_inv if in_rows else self._columnwise_scale_inv
        assert values is not None, f"a product asks for {'rows' if in_rows else 'columns'}, which are not there"
        assert values.dtype == torch.uint8
        assert values.is_contiguous()
        assert scale.is_contiguous(), "scales that lie apart are read wrongly"
        rows, inner = values.shape
        if self._is_2D_scaled:
            assert scale.shape == (-(-rows // LINE), _padded(-(-inner // LINE)))
            each = scale.repeat_interleave(LINE, 0)[:rows].repeat_interleave(LINE, 1)[:, :inner]
        else:
            assert scale.shape == (-(-inner // LINE), _padded(rows))
            each = scale[:, :rows].t().repeat_interleave(LINE, 1)[:, :inner]
        wide = values.view(TORCH[self._fp8_dtype]).double() * each.double()
        return wide if in_rows else wide.t()


def _padded(count: int, to: int = 4) -> int:
    return -(-count // to) * to


class MXFP8TensorStorage:
    """Blackwell's: values lie alike in both layouts."""

    def __init__(
        self, rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, fp8_dtype, quantizer,
        with_gemm_swizzled_scales, *, fake_dtype=None,
    ):  # fmt: skip
        self._rowwise_data = rowwise_data
        self._rowwise_scale_inv = rowwise_scale_inv
        self._columnwise_data = columnwise_data
        self._columnwise_scale_inv = columnwise_scale_inv
        self._fp8_dtype = fp8_dtype
        self._with_gemm_swizzled_scales = with_gemm_swizzled_scales
        for values in (rowwise_data, columnwise_data):
            assert values is None or (values.dtype == torch.uint8 and values.is_contiguous())
        for scale in (rowwise_scale_inv, columnwise_scale_inv):
            assert scale is None or (scale.dtype == torch.uint8 and scale.is_contiguous())

    def wide(self, *, in_rows: bool) -> Tensor:
        values = self._rowwise_data if in_rows else self._columnwise_data
        scale = self._rowwise_scale_inv if in_rows else self._columnwise_scale_inv
        assert values is not None, f"a product asks for {'rows' if in_rows else 'columns'}, which are not there"
        assert not self._with_gemm_swizzled_scales, "these are not in that order"
        assert scale.shape == _mx_scale_shape(values.shape, in_rows=in_rows)
        rows, inner = values.shape
        assert rows % MX_LINE == inner % MX_LINE == 0
        exponent = scale.double() - 127
        each = torch.where(scale == 255, torch.nan, torch.exp2(exponent))
        if in_rows:
            each = each[:rows].repeat_interleave(MX_LINE, 1)[:, :inner]
        else:
            each = each[:, :inner].repeat_interleave(MX_LINE, 0)[:rows]
        return values.view(TORCH[self._fp8_dtype]).double() * each


def _mx_scale_shape(shape: tuple[int, int], *, in_rows: bool) -> tuple[int, int]:
    rows, inner = shape
    if in_rows:
        return _padded(rows, 128), _padded(-(-inner // MX_LINE))
    return _padded(-(-rows // MX_LINE)), _padded(inner, 128)


def _e8m0(value: Tensor) -> Tensor:
    """Bits of fp32 rounded up to a power of two, as the package's kernels do it."""
    bits = value.float().view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    mantissa = bits & 0x7FFFFF
    goes_up = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    found = exponent + goes_up.int()
    found = torch.where(value.isinf(), 254, found)
    return torch.where(value.isnan(), 255, found).to(torch.uint8)


def _cast(x: Tensor, factor: Tensor, form: str) -> Tensor:
    """Multiplied, and what is too large cut off: as bytes."""
    scaled = (x.float() * factor).clamp(-LARGEST[form], LARGEST[form])
    return scaled.to(TORCH[form]).view(torch.uint8)


class _Quantizer:
    internal = False
    fake: Fake

    def __call__(self, x: Tensor) -> Any:
        assert self.internal, "its class for autograd is slow, and not what is taken apart here"
        assert x.dim() == 2
        self.fake.casts.append(type(self).__name__)
        return self.cast(x.contiguous())


class Float8CurrentScalingQuantizer(_Quantizer):
    def __init__(self, fp8_dtype, device, *, rowwise=True, columnwise=True):
        assert rowwise, "it makes no columns without rows"
        self.form = fp8_dtype
        self.columns = columnwise

    def cast(self, x: Tensor) -> Float8TensorStorage:
        amax = x.abs().amax().float().view(1)
        factor = torch.where(amax > 0, LARGEST[self.form] / amax, 1.0)
        values = _cast(x, factor, self.form)
        turned = values.t().contiguous() if self.columns else None
        return Float8TensorStorage(data=values, data_transpose=turned, fp8_scale_inv=1 / factor, fp8_dtype=self.form)


class Float8Quantizer(_Quantizer):
    def __init__(self, scale, amax, fp8_dtype, *, rowwise=True, columnwise=True):
        assert rowwise, "it makes no columns without rows"
        assert scale.shape == amax.shape == (1,)
        assert scale.dtype == amax.dtype == torch.float32
        self.scale = scale
        self.amax = amax
        self.form = fp8_dtype
        self.columns = columnwise

    def cast(self, x: Tensor) -> Float8TensorStorage:
        self.amax.copy_(torch.maximum(self.amax, x.abs().amax().float()))
        values = _cast(x, self.scale, self.form)
        turned = values.t().contiguous() if self.columns else None
        return Float8TensorStorage(
            data=values, data_transpose=turned, fp8_scale_inv=1 / self.scale, fp8_dtype=self.form
        )


class Float8BlockQuantizer(_Quantizer):
    def __init__(
        self, fp8_dtype, *, rowwise, columnwise, amax_epsilon=0.0, force_pow_2_scales=True, block_scaling_dim=2
    ):
        assert force_pow_2_scales
        assert amax_epsilon == 0.0
        self.form = fp8_dtype
        self.dim = block_scaling_dim
        self.columns = columnwise

    def cast(self, x: Tensor) -> Float8BlockwiseQTensorStorage:
        rows = self._one(x)
        columns = self._one(x.t().contiguous()) if self.columns else (None, None)
        return Float8BlockwiseQTensorStorage(*rows, *columns, self.form, None, self.dim == 2)

    def _one(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows, inner = x.shape
        high = LINE if self.dim == 2 else 1
        # blocks at the ends may be smaller
        whole = torch.nn.functional.pad(x.float(), (0, -inner % LINE, 0, -rows % high))
        blocks = whole.unflatten(1, (-1, LINE)).unflatten(0, (-1, high))
        amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
        factor = torch.where(amax > 0, torch.exp2(torch.floor(torch.log2(LARGEST[self.form] / amax))), 1.0)
        values = _cast(blocks, factor, self.form).flatten(2, 3).flatten(0, 1)[:rows, :inner]
        scale = (1 / factor)[:, 0, :, 0]
        if self.dim == 1:
            scale = scale.t()
        scale = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4))
        return values.contiguous(), scale.contiguous()


class MXFP8Quantizer(_Quantizer):
    def __init__(self, fp8_dtype, *, rowwise=True, columnwise=True):
        self.form = fp8_dtype
        self.rows = rowwise
        self.columns = columnwise

    def cast(self, x: Tensor) -> MXFP8TensorStorage:
        assert x.shape[0] % MX_LINE == x.shape[1] % MX_LINE == 0, f"{tuple(x.shape)} has no whole blocks"
        rows = (None, None)
        columns = (None, None)
        if self.rows:
            rows = self._one(x, in_rows=True)
        if self.columns:
            columns = self._one(x, in_rows=False)
        return MXFP8TensorStorage(*rows, *columns, self.form, None, False)

    def _one(self, x: Tensor, *, in_rows: bool) -> tuple[Tensor, Tensor]:
        dim = 1 if in_rows else 0
        blocks = x.float().unflatten(dim, (-1, MX_LINE))
        found = blocks.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(dim + 1, keepdim=True)
        scale = _e8m0(found * torch.tensor(1 / LARGEST[self.form]))
        values = _cast(blocks, torch.exp2(127 - scale.double()).float(), self.form).flatten(dim, dim + 1)
        # behind the scales there may be anything
        shape = _mx_scale_shape(x.shape, in_rows=in_rows)
        whole = torch.full(shape, 255, dtype=torch.uint8)
        scale = scale.squeeze(dim + 1)
        whole[: scale.shape[0], : scale.shape[1]] = scale
        return values.contiguous(), whole


class NVFP4TensorStorage:
    """Two numbers a byte; columns are turned round."""

    def __init__(
        self, rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, amax_rowwise, amax_columnwise,
        fp4_dtype, quantizer, with_gemm_swizzled_scales, *, fake_dtype=None,
    ):  # fmt: skip
        assert fp4_dtype == E2M1
        self._rowwise_data = rowwise_data
        self._rowwise_scale_inv = rowwise_scale_inv
        self._columnwise_data = columnwise_data
        self._columnwise_scale_inv = columnwise_scale_inv
        self._amax_rowwise = amax_rowwise
        self._amax_columnwise = amax_columnwise
        self._with_gemm_swizzled_scales = with_gemm_swizzled_scales
        for tensor in (rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv):
            assert tensor is None or (tensor.dtype == torch.uint8 and tensor.is_contiguous())
            # what kernels load at a time
            assert tensor is None or tensor.data_ptr() % 16 == 0
        for amax in (amax_rowwise, amax_columnwise):
            assert amax is None or (amax.dtype == torch.float32 and amax.shape == (1,))

    def lines(self, *, in_rows: bool) -> Tensor:
        """[lines, numbers that are summed over] in fp64."""
        values = self._rowwise_data if in_rows else self._columnwise_data
        scale = self._rowwise_scale_inv if in_rows else self._columnwise_scale_inv
        amax = self._amax_rowwise if in_rows else self._amax_columnwise
        assert values is not None, f"a product asks for {'rows' if in_rows else 'columns'}, which are not there"
        assert not self._with_gemm_swizzled_scales, "these are not in that order"
        lines = values.shape[0]
        inner = 2 * values.shape[1]
        assert lines % 8 == 0
        assert inner % MX_LINE == 0
        assert scale.shape == (_padded(lines, 128), _padded(inner // FP4_LINE))
        table = torch.tensor([*FP4, *(-one for one in FP4)], dtype=torch.float64)
        numbers = torch.empty(lines, inner, dtype=torch.float64)
        numbers[:, ::2] = table[(values % 16).long()]
        numbers[:, 1::2] = table[(values // 16).long()]
        each = scale[:lines, : inner // FP4_LINE].contiguous().view(torch.float8_e4m3fn).double()
        return numbers * each.repeat_interleave(FP4_LINE, 1) * (amax.double() / 2688)


class NVFP4Quantizer(_Quantizer):
    def __init__(
        self, fp4_dtype, rowwise=True, columnwise=True, with_amax_reduction=False, amax_reduction_group=None,
        with_rht=False, with_post_rht_amax=False, with_2d_quantization=False, stochastic_rounding=False,
    ):  # fmt: skip
        assert fp4_dtype == E2M1
        assert with_rht == with_post_rht_amax, "an amax before the rotation is not supported"
        assert with_amax_reduction == (amax_reduction_group is not None)
        self.rows = rowwise
        self.columns = columnwise
        self.group = amax_reduction_group
        self.rotates = with_rht
        self.squares = with_2d_quantization
        self.at_random = stochastic_rounding

    def cast(self, x: Tensor) -> NVFP4TensorStorage:
        assert x.shape[0] % FP4_LINE == x.shape[1] % FP4_LINE == 0, f"{tuple(x.shape)} has no whole blocks"
        kind = x.dtype
        lines = {}
        if self.rows:
            lines["rows"] = x.float()
        if self.columns:
            turned = x.t().float()
            if self.rotates:
                turned = (turned.reshape(-1, FP4_LINE) @ _rotation()).to(kind).float().view(turned.shape)
            lines["columns"] = turned
        amax = torch.stack([one.abs().max() for one in lines.values()])
        if self.group is not None:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.group)
        found = {"rows": (None, None, None), "columns": (None, None, None)}
        for (name, one), its_amax in zip(lines.items(), amax.split(1), strict=True):
            found[name] = (*self._one(one, its_amax), its_amax.clone())
        rows, row_scale, row_amax = found["rows"]
        columns, column_scale, column_amax = found["columns"]
        return NVFP4TensorStorage(rows, row_scale, columns, column_scale, row_amax, column_amax, E2M1, None, False)

    def _one(self, x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
        lines, inner = x.shape
        encode = 2688 / amax if amax > 0 else torch.ones(1)
        blocks = x.view(lines, -1, FP4_LINE)
        largest = blocks.abs().amax(2)
        if self.squares:
            largest = largest.view(lines // FP4_LINE, FP4_LINE, -1).amax(1, keepdim=True)
            largest = largest.expand(-1, FP4_LINE, -1).reshape(lines, -1)
        scale = (largest * (encode * torch.tensor(1 / 6))).clamp(max=448).to(torch.float8_e4m3fn)
        decode = scale.float() * (1 / encode)
        each = torch.where(decode > 0, 1 / decode, torch.finfo(torch.float32).max)
        scaled = (blocks * each[:, :, None]).clamp(-6, 6).view(lines, inner)
        codes = self._codes(scaled.abs()) + 8 * (scaled.signbit()).to(torch.uint8)
        # behind the scales there may be anything
        whole = torch.full((_padded(lines, 128), _padded(inner // FP4_LINE)), 0x7F, dtype=torch.uint8)
        whole[:lines, : inner // FP4_LINE] = scale.view(torch.uint8)
        return (codes[:, ::2] + 16 * codes[:, 1::2]).contiguous(), whole

    def _codes(self, size: Tensor) -> Tensor:
        grid = torch.tensor(FP4)
        if self.at_random:
            up = torch.searchsorted(grid, size.contiguous())
            down = (up - 1).clamp(min=0)
            gap = (grid[up] - grid[down]).clamp(min=1e-9)
            return torch.where(torch.rand(size.shape) < (size - grid[down]) / gap, up, down).to(torch.uint8)
        distance = (size[..., None] - grid).abs()
        nearest = distance.amin(-1, keepdim=True)
        # of two that are as near, the even one: odd codes come behind
        behind = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])
        return torch.where(distance == nearest, behind, 9).argmin(-1).to(torch.uint8)


def _rotation() -> Tensor:
    """Of 16 numbers: the matrix of a Hadamard transform, of itself four times over, with the package's signs."""
    one = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    whole = torch.kron(torch.kron(one, one), torch.kron(one, one))
    signs = torch.ones(16)
    signs[torch.tensor([3, 5, 6, 7, 8, 9, 10, 12, 14, 15])] = -1
    return signs[:, None] * whole / 4


def fake_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Puts one in the place of the package that computes on a CPU."""
    fake = Fake()
    package = package_of(fake)
    for user in (te, te_fp8, te_mxfp8, te_nvfp4, attention_te, norm_te):
        monkeypatch.setattr(user, "transformer_engine", lambda: package)
    return fake


def in_its_place() -> TransformerEngine:
    """For ranks, which are not asked what they called."""
    return package_of(Fake())


def package_of(fake: Fake) -> TransformerEngine:
    """A package that tells `fake` what it is asked for."""

    def general_gemm(
        A, B, out_dtype=None, *, layout="TN", out=None, bias=None, accumulate=False, use_split_accumulator=False,
        grad=False,
    ):  # fmt: skip
        in_fp8 = not isinstance(A, Tensor)
        fake.products.append(Call(layout, accumulate, out, use_split_accumulator, in_fp8))
        assert grad == (layout != "TN"), "a bias with `grad` would be one of a backward pass"
        if in_fp8:
            if isinstance(A, NVFP4TensorStorage):
                # lines of both, whatever they were of
                a = A.lines(in_rows=layout[0] == "T")
                b = B.lines(in_rows=layout[1] == "N")
                assert layout == "TN"
            else:
                a = A.wide(in_rows=layout[0] == "T")
                b = B.wide(in_rows=layout[1] == "N")
            if not isinstance(A, MXFP8TensorStorage | NVFP4TensorStorage):
                _refuse_sizes(layout, b, in_blocks=isinstance(A, Float8BlockwiseQTensorStorage))
        else:
            assert A.is_contiguous(), "strides are not looked at"
            assert B.is_contiguous(), "strides are not looked at"
            assert A.dim() == B.dim() == 2
            a = A.double()
            b = B.double()
        products = {"TN": lambda: b @ a.t(), "NN": lambda: b @ a, "NT": lambda: b.t() @ a}
        wide = products[layout]()
        if bias is not None:
            wide = wide + bias.double()
        if out is None:
            assert not accumulate
            return wide.to(out_dtype), None, None, None
        assert out.is_contiguous()
        assert out.dtype == out_dtype
        if accumulate:
            wide = wide + out.double()
        out.copy_(wide)
        return out, None, None, None

    kinds = {}
    casts = (Float8CurrentScalingQuantizer, Float8Quantizer, Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer)
    for kind in casts:
        kinds[kind.__name__] = type(kind.__name__, (kind,), {"fake": fake})
    pytorch = SimpleNamespace(
        DType=SimpleNamespace(kFloat8E4M3=E4M3, kFloat8E5M2=E5M2, kFloat4E2M1=E2M1),
        Float8TensorStorage=Float8TensorStorage,
        Float8BlockwiseQTensorStorage=Float8BlockwiseQTensorStorage,
        MXFP8TensorStorage=MXFP8TensorStorage,
        NVFP4TensorStorage=NVFP4TensorStorage,
        constants=SimpleNamespace(TE_DType={dtype: dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}),
        **kinds,
    )
    functions = SimpleNamespace(compute_amax=lambda x, amax: amax.copy_(x.abs().amax().float()), **_norms(fake))
    return TransformerEngine(general_gemm, _attention(fake), functions, pytorch)


def _refuse_sizes(layout: str, b: Tensor, *, in_blocks: bool) -> None:
    """What common/gemm/cublaslt_gemm.cu, CanonicalizeGemmInput, checks of a number of tokens in fp8 on Hopper. Widths
    are the rules', and smaller here."""
    if layout == "NT":
        assert b.shape[0] % 16 == 0, f"Leading dimension requirement on B for FP8 GEMM, {b.shape[0]}. Caller must pad."
    elif in_blocks:
        assert b.shape[0] % 8 == 0, f"Outer dimension requirement on B, {b.shape[0]}. Caller must pad."


def _norms(fake: Fake) -> dict[str, Any]:
    """By autograd through the equation, in fp64."""

    def equation(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, layer: bool) -> Tensor:
        if layer:
            x = x - x.mean(-1, keepdim=True)
        y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight + centred)
        return y if bias is None else y + bias

    def told(name: str, *tensors: Tensor) -> None:
        fake.norms.append(name)
        for x in tensors:
            assert x.is_contiguous(), "strides are not looked at"
            assert x.dim() <= 2

    def statistics(x: Tensor, eps: float, layer: bool) -> tuple[Tensor, Tensor]:
        wide = x.double()
        mean = wide.mean(-1) if layer else torch.zeros(len(x))
        deviation = ((wide - mean[:, None].double()).square().mean(-1) + eps).rsqrt()
        return mean.float(), deviation.float()

    def forward(name: str, layer: bool) -> Any:
        def fwd(x: Tensor, weight: Tensor, *more: Any) -> list[Tensor | None]:
            bias = more[0] if layer else None
            eps, out, quantizer, kind, _, centred = more[1:] if layer else more
            assert out is None
            assert quantizer is None
            told(name, x, weight)
            mean, deviation = statistics(x, eps, layer)
            wide_bias = None if bias is None else bias.double()
            y = equation(x.double(), weight.double(), wide_bias, eps, centred, layer)
            return [y.to(kind), mean if layer else None, deviation]

        return fwd

    def backward(name: str, layer: bool, adds: bool) -> Any:
        def bwd(grad: Tensor, x: Tensor, *more: Any) -> list[Tensor]:
            added = more[0] if adds else None
            mean = more[0] if layer else None
            *_, deviation, weight, _, centred = more
            told(name, grad, x, deviation, weight)
            of_row = x.double()
            if mean is not None:
                of_row = of_row - mean[:, None].double()
            normed = of_row * deviation[:, None].double()
            scaled = grad.double() * (weight.double() + centred)
            inner = scaled - normed * (scaled * normed).mean(-1, keepdim=True)
            if layer:
                inner = inner - scaled.mean(-1, keepdim=True)
            d_x = inner * deviation[:, None].double()
            if added is not None:
                d_x = d_x + added.double()
            found = [d_x.to(x.dtype), (grad.double() * normed).sum(0).to(weight.dtype)]
            if layer:
                found.append(grad.double().sum(0).to(weight.dtype))
            return found

        return bwd

    return {
        "rmsnorm_fwd": forward("rmsnorm_fwd", layer=False),
        "layernorm_fwd": forward("layernorm_fwd", layer=True),
        "rmsnorm_bwd": backward("rmsnorm_bwd", layer=False, adds=False),
        "rmsnorm_bwd_add": backward("rmsnorm_bwd_add", layer=False, adds=True),
        "layernorm_bwd": backward("layernorm_bwd", layer=True, adds=False),
    }


def _attention(fake: Fake) -> SimpleNamespace:
    """Of whole sequences and packed ones, by the equations."""

    def options(q: Tensor, starts: Tensor, longest: int, layout: str, mask: str, window: tuple[int, int], scale: float):
        assert starts.dtype == torch.int32
        assert window[1] == 0
        documents = None
        if layout == "thd_thd_thd":
            assert (q.dim(), mask) == (3, "padding_causal")
            assert int(starts[-1]) == q.shape[0]
            assert int(starts.diff().max()) <= longest
            lengths = starts.diff().to(torch.int64)
            number = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)[None]
            one = Documents(number, starts, len(lengths), longest)
            documents = BlockDocuments(one, one)
        else:
            assert (layout, q.dim(), mask) == ("bshd_bshd_bshd", 4, "causal")
            B, T = q.shape[:2]
            assert starts.tolist() == [T * row for row in range(B + 1)]
        width = None if window[0] == -1 else window[0] + 1
        return {"causal": True, "documents": documents, "window": width, "scoring": Scoring(scale)}

    def rows(packed: bool, *tensors: Tensor) -> list[Tensor]:
        for x in tensors:
            assert x.is_contiguous(), "strides are not looked at"
        return [x[None] if packed else x for x in tensors]

    def fused_attn_fwd(
        is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype,
        fused_attention_backend, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, attn_scale=None,
        qkv_layout="sbh3d", o_format="sbhd", attn_mask_type="padding", window_size=(-1, -1),
    ):  # fmt: skip
        fake.attentions.append(qkv_layout)
        packed = q.dim() == 3
        assert is_training
        assert o_format == qkv_layout.partition("_")[0]
        assert (cu_seqlens_q_padded is None) == (not packed)
        given = options(q, cu_seqlens_q, max_seqlen_q, qkv_layout, attn_mask_type, window_size, attn_scale)
        out, lse = reference_block.block_forward(*rows(packed, q, k, v), **given)
        if packed:
            return out[0], [lse[0].t().contiguous()[..., None].float(), torch.zeros(2, dtype=torch.int64)]
        return out.contiguous(), [lse[..., None].float(), torch.zeros(2, dtype=torch.int64)]

    def fused_attn_bwd(
        max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, aux_ctx_tensors,
        fused_attention_backend, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, attn_scale=None,
        qkv_layout="sbh3d", o_format="sbhd", do_format="sbhd", dqkv_layout="sbh3d", attn_mask_type="padding",
        window_size=(-1, -1), deterministic=False,
    ):  # fmt: skip
        packed = q.dim() == 3
        lse, state = aux_ctx_tensors
        assert (state.dtype, state.shape) == (torch.int64, (2,))
        assert dqkv_layout == qkv_layout
        assert do_format == o_format
        given = options(q, cu_seqlens_q, max_seqlen_q, qkv_layout, attn_mask_type, window_size, attn_scale)
        lse = lse[..., 0].t()[None] if packed else lse[..., 0]
        grads = reference_block.block_backward(*rows(packed, d_o, q, k, v, o), lse, **given)
        grads = [x[0].contiguous() if packed else x.contiguous() for x in grads]
        return *grads, None, None

    return SimpleNamespace(
        fused_attn_fwd=fused_attn_fwd,
        fused_attn_bwd=fused_attn_bwd,
        FusedAttnBackend=SimpleNamespace(F16_arbitrary_seqlen="f16"),
    )
