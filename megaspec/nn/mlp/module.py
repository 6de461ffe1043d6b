"""Feed-forward layers."""

# B sequences, T tokens, D model, F width between both products

from torch import Tensor, nn

from megaspec.nn.dropout import Dropout, Noise
from megaspec.nn.fp8 import Fp8Input
from megaspec.nn.fp8_producers import gated
from megaspec.nn.linear import Linear
from megaspec.nn.mlp.spec import ClampedMlpSpec, GatedMlpSpec, PlainMlpSpec
from megaspec_kernels.gated.form import GatedForm
from megaspec_kernels.gated.reference import ACTIVATIONS
from megaspec_kernels.registry import REGISTRY, GatedKernel


class FeedForward(nn.Module):
    """A layer that looks at each token alone, [B, T, D] -> [B, T, D]: w_down(activate(into(x))), then dropout."""

    recompute_parts = frozenset({"mlp", "activation"})
    w_down: Linear
    dropout: Dropout

    def into(self, x_BTD: Tensor) -> Tensor:
        """The first product, [B, T, D] -> what `activate` takes."""
        raise NotImplementedError

    def activate(self, x: Tensor) -> Tensor:
        """-> [..., F]"""
        raise NotImplementedError

    @property
    def entry(self) -> Linear | None:
        """The one layer that takes the input, and nothing else does; None: it can't be said."""
        return None

    def forward(self, x_BTD: Tensor | Fp8Input, noise: Noise | None) -> Tensor:
        return self.dropout(self.w_down(self.activate(self.into(x_BTD))), noise)


class Gated(FeedForward):
    """A layer of two products and a gate between them."""

    kernel: GatedKernel = REGISTRY["gated"]["reference"]
    """The slot of its implementation."""
    fp8_producer = ""
    """The implementation that writes what w_down takes, and the gradient of w_gate_up, in fp8; none: they do."""

    def __init__(self, d_model: int, d_ffn: int, form: GatedForm, *, bias: bool, out: Dropout):
        super().__init__()
        self.w_gate_up = Linear(d_model, d_ffn, d_ffn, bias=bias)
        self.w_down = Linear(d_ffn, d_model, bias=bias, residual=True)
        self.form = form
        self.dropout = out

    @property
    def entry(self) -> Linear | None:
        is_ours = type(self).forward is Gated.forward and type(self).into is Gated.into
        return self.w_gate_up if is_ours else None

    @property
    def is_by_kernel(self) -> bool:
        """What comes before the last product is what the kernel computes: no plug-in that derives from it has
        another."""
        return type(self).into is Gated.into and type(self).activate is Gated.activate

    def into(self, x_BTD: Tensor | Fp8Input) -> Tensor:
        """[B, T, D] -> [B, T, 2 F]"""
        return self.w_gate_up(x_BTD)

    def activate(self, gate_up: Tensor) -> Tensor:
        """[..., 2 F] -> [..., F]"""
        return self.kernel.gated(gate_up, form=self.form)

    def forward(self, x_BTD: Tensor | Fp8Input, noise: Noise | None) -> Tensor:
        if not self.fp8_producer:
            return super().forward(x_BTD, noise)
        gate_up, slots = self.w_gate_up.with_slots(x_BTD)
        between = gated(
            gate_up,
            slots,
            form=self.form,
            implementation=self.fp8_producer,
            before=self.w_gate_up,
            behind=self.w_down,
        )
        return self.dropout(self.w_down(between), noise)


class GatedMlp(Gated):
    """down(activation(gate(x)) · up(x)) (Shazeer 2020), [B, T, D] -> [B, T, D]."""

    def __init__(self, d_model: int, d_ffn: int, spec: GatedMlpSpec, *, out: Dropout):
        super().__init__(d_model, d_ffn, GatedForm(spec.activation), bias=spec.bias, out=out)


class ClampedMlp(Gated):
    """down((up + 1) · gate · sigmoid(alpha · gate)) with a bounded gate and up, [B, T, D] -> [B, T, D]."""

    def __init__(self, d_model: int, d_ffn: int, spec: ClampedMlpSpec, *, out: Dropout):
        form = GatedForm(limit=spec.limit, alpha=spec.alpha)
        super().__init__(d_model, d_ffn, form, bias=spec.bias, out=out)


class PlainMlp(FeedForward):
    """down(activation(up(x))), [B, T, D] -> [B, T, D]."""

    def __init__(self, d_model: int, d_ffn: int, spec: PlainMlpSpec, *, out: Dropout):
        super().__init__()
        self.w_up = Linear(d_model, d_ffn, bias=spec.bias)
        self.w_down = Linear(d_ffn, d_model, bias=spec.bias, residual=True)
        self.activation = ACTIVATIONS[spec.activation]
        self.dropout = out

    @property
    def entry(self) -> Linear | None:
        is_ours = type(self).forward is FeedForward.forward and type(self).into is PlainMlp.into
        return self.w_up if is_ours else None

    def into(self, x_BTD: Tensor | Fp8Input) -> Tensor:
        """[B, T, D] -> [B, T, F]"""
        return self.w_up(x_BTD)

    def activate(self, up: Tensor) -> Tensor:
        """[..., F] -> [..., F]"""
        return self.activation(up)


# Built by (width of the model, width between the products, spec, out=dropout).
MLPS: dict[type, type[FeedForward]] = {GatedMlpSpec: GatedMlp, PlainMlpSpec: PlainMlp, ClampedMlpSpec: ClampedMlp}
