"""An input and a gradient that a producer wrote in fp8 itself: the numbers of layers that quantise them."""

import pytest
import torch
from torch import Tensor

from megaspec.nn.fp8 import REMEMBERED, Fp8Input, Fp8Linear, Fp8Slots, carrier_of, layer_of
from megaspec.nn.fp8_layouts import Role
from megaspec.nn.linear import COMPILED, Linear, WeightGradientQueue, WeightGradientSums
from megaspec_kernels.registry import REGISTRY
from tests.nn.test_fp8 import N_IN, N_OUT, layer_in

WIDTH = 208
TOKENS = 48


def written(x: Tensor, layer: Fp8Linear, role: Role) -> tuple[Tensor, Tensor, Tensor]:
    """What a producer's own kernel does: by the scale that is known, in both layouts."""
    x_MK = x.flatten(0, -2)
    known = layer.known(role)
    if known is None:
        pair = layer.quantise(x_MK, role)
        return pair.rows.values, pair.columns.values, pair.rows.scale
    scale = known.scale.clone().view(1, 1)
    rows, columns = REGISTRY["fp8_cast"]["reference"].cast(
        x_MK,
        scale,
        block=(None, None),
        dtype=known.dtype,
        columns=True,
        seen=known.seen,
        saturated=known.saturated,
    )
    return rows, columns, scale


@torch.library.custom_op("megaspec_tests::sine_forward", mutates_args=())
def sine_forward(x: Tensor, ticket: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return written(x.sin(), layer_of(ticket), "input")


@sine_forward.register_fake
def _(x: Tensor, ticket: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return empty_pair(x, torch.float8_e4m3fn)


@torch.library.custom_op("megaspec_tests::sine_backward", mutates_args=())
def sine_backward(grad: Tensor, x: Tensor, ticket: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return written(grad * x.cos(), layer_of(ticket), "gradient")


@sine_backward.register_fake
def _(grad: Tensor, x: Tensor, ticket: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return empty_pair(x, torch.float8_e5m2)


def empty_pair(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    M = x.numel() // x.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    return (
        x.new_empty(M, x.shape[-1], dtype=dtype),
        x.new_empty(x.shape[-1], M, dtype=dtype),
        x.new_empty(1, 1, dtype=wide),
    )


class Sine(torch.autograd.Function):
    """Between two layers: takes the output of one, is the input of the other; both matrices only in fp8."""

    @staticmethod
    def forward(ctx, x, slots_rows, slots_columns, slots_scale, below, above):
        ctx.save_for_backward(x)
        ctx.below = below
        rows, columns, scale = sine_forward(x, above)
        ctx.mark_non_differentiable(rows, columns, scale)
        return carrier_of(x, *x.shape), rows, columns, scale

    @staticmethod
    def backward(ctx, grad, *_):
        (x,) = ctx.saved_tensors
        return None, *sine_backward(grad, x, ctx.below), None, None


class Pair(torch.nn.Module):
    """above(sin(below(x)))"""

    def __init__(self, *, fused: bool, dtype: torch.dtype):
        super().__init__()
        self.fused = fused
        self.below, self.fp8_below = layer_in("delayed", dtype=dtype)
        self.above, self.fp8_above = layer_in("delayed", dtype=dtype)
        draw = torch.Generator().manual_seed(4)
        self.below.weight = torch.nn.Parameter(torch.randn(N_OUT, N_IN, generator=draw).to(dtype))
        self.above.weight = torch.nn.Parameter(torch.randn(WIDTH, N_OUT, generator=draw).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        if not self.fused:
            return self.above(self.below(x).sin())
        y, slots = self.below.with_slots(x)
        return self.above(sine(y, slots, self.below, self.above))

    def layers(self) -> tuple[Fp8Linear, Fp8Linear]:
        return self.fp8_below, self.fp8_above

    def set_scales(self, *scales: float) -> None:
        """A step that comes after others."""
        for layer in self.layers():
            layer.memory.fresh = frozenset()
            layer.shared.is_recording = True
            layer.memory.scales.copy_(torch.tensor(scales))


def sine(y: Tensor, slots: Fp8Slots, below: Linear, above: Linear) -> Fp8Input:
    return Fp8Input(*Sine.apply(y, *slots, below.fp8.ticket, above.fp8.ticket))


def numbers(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(2, TOKENS, N_IN, generator=draw).to(dtype)
    return x, torch.randn(2, TOKENS, WIDTH, generator=draw).to(dtype)


def run_of(pair: Pair, dtype: torch.dtype, *, compiled: bool = False) -> list[Tensor]:
    x, grad = numbers(dtype)
    x.requires_grad_()
    call = torch.compile(pair, options=COMPILED, fullgraph=True) if compiled else pair
    y = call(x)
    y.backward(grad)
    found = [y.detach(), x.grad]
    for layer in (pair.below, pair.above):
        found.append(layer.weight.grad)
    for layer in pair.layers():
        found += [layer.memory.seen, layer.memory.saturated]
    return found


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scales", [None, (2.0**-9, 2.0**-15)], ids=["the first step", "later"])
def test_what_producers_write_is_what_layers_quantise(scales, compiled: bool) -> None:
    torch._dynamo.reset()
    found = []
    for fused in (False, True):
        pair = Pair(fused=fused, dtype=torch.float64)
        if scales is not None:
            pair.set_scales(*scales)
        found.append(run_of(pair, torch.float64, compiled=compiled and fused))
    for plain, fused in zip(*found, strict=True):
        assert torch.equal(plain, fused)
    if scales is not None:
        seen, saturated = found[0][-2:]
        assert (seen > 0).all()
        assert saturated > 0


def test_no_copy_in_the_models_format_is_kept() -> None:
    pair = Pair(fused=True, dtype=torch.bfloat16)
    pair.set_scales(1.0, 1.0)
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x, _ = numbers(torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        pair(x.requires_grad_())
    weights = {layer.weight.data_ptr() for layer in (pair.below, pair.above)}
    sizes = []
    for at, tensor in kept.items():
        if at not in weights:
            sizes.append(tensor.untyped_storage().nbytes())
    M = 2 * TOKENS
    # both inputs in columns with their scales, and what the sine's own backward pass takes
    assert sorted(sizes) == sorted([M * N_IN, 4, M * N_OUT, 4, 2 * M * N_OUT])


def test_weight_gradients_are_deferred() -> None:
    plain = Pair(fused=False, dtype=torch.float64)
    run_of(plain, torch.float64)
    pair = Pair(fused=True, dtype=torch.float64)
    sums = WeightGradientSums()
    buffers = []
    held = []
    for layer in (pair.below, pair.above):
        buffers.append(torch.full_like(layer.weight, float("nan")).detach())
        held.append(sums.connect(layer, buffers[-1], lambda: None))
        held[-1].start()
    queue = WeightGradientQueue()
    x, grad = numbers(torch.float64)
    with sums.defer(queue):
        pair(x.requires_grad_()).backward(grad)
    assert len(queue) == 2
    queue.run()
    for buffer, layer in zip(buffers, (plain.below, plain.above), strict=True):
        assert torch.equal(buffer, layer.weight.grad)


def test_a_frozen_layer_keeps_no_input() -> None:
    pair = Pair(fused=True, dtype=torch.float64)
    pair.below.weight.requires_grad_(False)
    x, grad = numbers(torch.float64)
    pair(x.requires_grad_()).backward(grad)
    assert pair.below.weight.grad is None
    assert x.grad is not None


def test_scales_are_known_for_what_is_remembered() -> None:
    pair = Pair(fused=True, dtype=torch.float64)
    layer = pair.fp8_above
    assert layer.known("input") is None
    pair.set_scales(2.0, 4.0)
    assert [layer.known(role).scale.item() for role in REMEMBERED] == [2.0, 4.0]
    assert layer.known("weight") is None
    layer.shared.is_recording = False
    assert layer.known("input").seen is None
    other, held = layer_in("tensorwise")
    assert other.fp8 is not None
    assert held.known("input") is None


def test_a_gradient_beside_the_slots_is_refused() -> None:
    pair = Pair(fused=True, dtype=torch.float64)
    x, _ = numbers(torch.float64)
    y, _ = pair.below.with_slots(x)
    with pytest.raises(AssertionError, match="arrives in the slots"):
        y.sum().backward()
