"""Plain operations in the place of kernels that write fp8: in fp64 but for the grid. tests/kernels holds the kernels
to the same numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megaspec.parallelism.fp8 import Fp8
from megaspec_kernels.fp8_cast import reference as fp8_cast
from megaspec_kernels.fp8_cast import reference_groups
from megaspec_kernels.fp8_cast.formats import Known
from megaspec_kernels.fp8_cast.groups import Groups
from megaspec_kernels.fp8_cast.tile import Written
from megaspec_kernels.gated import reference as gated_reference
from megaspec_kernels.gated.form import GatedForm
from megaspec_kernels.gated.form import decoded as decoded_gate
from megaspec_kernels.norm import reference as norm_reference
from megaspec_kernels.norm.form import NormForm, decoded
from megaspec_kernels.norm.triton import NormGradients, NormInFp8
from megaspec_kernels.registry import (
    REGISTRY,
    GatedKernel,
    GatedProducer,
    NormKernel,
    NormProducer,
    RopeKernel,
    RopeProducer,
    WeightedGatedKernel,
)
from megaspec_kernels.rope import reference as rope_reference
from megaspec_kernels.rope.form import Heads
from tests.parity import tasks
from tests.parity.cases import Case, Empty

OPERATIONS = ("norm", "gated", "rope")


def normed(x: Tensor, weight: Tensor | None, bias: Tensor | None, code: str) -> Tensor:
    form = decoded(code)
    return norm_reference.norm(x, weight, bias, form=NormForm(form.kind, form.gain, form.eps))


def norm_forward(
    x: Tensor, term: Tensor | None, weight: Tensor | None, bias: Tensor | None, code: str
) -> tuple[Tensor, Tensor, Tensor]:
    total = x.new_empty(0)
    summed = x
    if term is not None:
        total = x + decoded(code).scale * term
        summed = total
    # of each row, as kernels keep it; nobody reads it
    statistics = x.new_empty(1, x.numel() // x.shape[-1], dtype=torch.promote_types(x.dtype, torch.float32))
    return total, normed(summed, weight, bias, code).clone(), statistics


def written(x: Tensor, known: Known, *, columns: bool = True) -> Written:
    scale = known.scale.clone().view(1, 1)
    rows, by_columns = fp8_cast.cast(
        x.flatten(0, -2),
        scale,
        block=(None, None),
        dtype=known.dtype,
        columns=columns,
        seen=known.seen,
        saturated=known.saturated,
    )
    if by_columns is None:
        by_columns = rows.new_empty(0)
    return Written(rows, by_columns, scale)


def norm_in_fp8(*inputs: Any, known: Known, columns: bool) -> NormInFp8:
    calls["norm"] += 1
    total, y, statistics = norm_forward(*inputs)
    return NormInFp8(total, written(y, known, columns=columns), statistics)


def norm_gradients(
    grad: Tensor,
    grad_stream: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    code: str,
    *,
    has_term: bool,
    needs: tuple[bool, bool],
) -> NormGradients:
    # the compiler traces no autograd within autograd
    of_norm = norm_gradients_by_equation if torch.compiler.is_compiling() else norm_gradients_by_autograd
    grad_x, grad_weight = of_norm(grad, x, weight, code)
    if grad_stream is not None:
        grad_x = grad_x + grad_stream
    return NormGradients(grad_x, decoded(code).scale * grad_x, grad_weight if needs[0] else None, None)


@torch.enable_grad()
def norm_gradients_by_autograd(grad: Tensor, x: Tensor, weight: Tensor, code: str) -> tuple[Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    vector = weight.detach().requires_grad_()
    return torch.autograd.grad(normed(leaf, vector, None, code), (leaf, vector), grad)


def norm_gradients_by_equation(grad: Tensor, x: Tensor, weight: Tensor, code: str) -> tuple[Tensor, Tensor]:
    form = decoded(code)
    assert (form.kind, form.gain) == ("rms", "scale"), code
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + form.eps)
    of_normed = grad * weight
    along = (of_normed * x * rstd).mean(-1, keepdim=True)
    return rstd * (of_normed - x * rstd * along), (grad * x * rstd).flatten(0, -2).sum(0)


def gate_of(code: str) -> GatedForm:
    form = decoded_gate(code)
    return GatedForm(form.activation, form.limit if form.has_limit else None, form.alpha)


def gated_forward(gate_up: Tensor, code: str) -> Tensor:
    return gated_reference.gated(gate_up, form=gate_of(code))


def gated_in_fp8(gate_up: Tensor, code: str, *, known: Known) -> Written:
    calls["gate"] += 1
    return written(gated_forward(gate_up, code), known)


def gated_backward(grad: Tensor, gate_up: Tensor, code: str) -> Tensor:
    """Written out: inside of an operation autograd records nothing. silu alone without a limit."""
    form = gate_of(code)
    gate, up = gate_up.chunk(2, dim=-1)
    alpha = 1.0
    inside_gate = inside_up = torch.ones_like(gate)
    if form.limit is not None:
        inside_gate = (gate <= form.limit).to(gate.dtype)
        inside_up = (up.abs() <= form.limit).to(gate.dtype)
        gate = gate.clamp(max=form.limit)
        up = up.clamp(-form.limit, form.limit) + 1
        alpha = form.alpha
    share = torch.sigmoid(alpha * gate)
    slope = share * (1 + alpha * gate * (1 - share))
    return torch.cat((grad * up * slope * inside_gate, grad * gate * share * inside_up), dim=-1)


def gated_backward_in_fp8(grad: Tensor, gate_up: Tensor, code: str, *, known: Known) -> Written:
    calls["gradient"] += 1
    return written(gated_backward(grad, gate_up, code), known)


def weighted_forward(gate_up: Tensor, weights: Tensor, *, form: GatedForm) -> Tensor:
    wide = torch.promote_types(gate_up.dtype, weights.dtype)
    out = gated_forward(gate_up.to(wide), form.code) * weights[:, None]
    return out.to(gate_up.dtype)


def weighted_gradients(grad: Tensor, gate_up: Tensor, weights: Tensor, *, form: GatedForm) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(gate_up.dtype, weights.dtype)
    grad_weights = (grad.to(wide) * gated_forward(gate_up.to(wide), form.code)).sum(-1)
    made = gated_backward(grad.to(wide) * weights[:, None], gate_up.to(wide), form.code)
    return made.to(gate_up.dtype), grad_weights


def written_groups(x: Tensor, groups: Groups, known: Known) -> Written:
    scale = known.scale.clone().view(1, 1)
    rows, columns = reference_groups.group_cast(
        x, scale, groups, dtype=known.dtype, columns=True, seen=known.seen, saturated=known.saturated
    )
    return Written(rows, columns, scale)


def weighted_in_fp8(gate_up: Tensor, weights: Tensor, groups: Groups, *, form: GatedForm, known: Known) -> Written:
    calls["experts' gate"] = calls.get("experts' gate", 0) + 1
    return written_groups(weighted_forward(gate_up, weights, form=form), groups, known)


def weighted_gradients_in_fp8(
    grad: Tensor, gate_up: Tensor, weights: Tensor, groups: Groups, *, form: GatedForm, known: Known
) -> tuple[Written, Tensor]:
    calls["experts' gradient"] = calls.get("experts' gradient", 0) + 1
    made, grad_weights = weighted_gradients(grad, gate_up, weights, form=form)
    return written_groups(made, groups, known), grad_weights


@torch.library.custom_op("megaspec_tests::rope_forward", mutates_args=())
def rope_forward(qkv: Tensor, cos: Tensor, sin: Tensor, queries: int, keys: int, size: int) -> tuple[Tensor, Tensor]:
    """One operation to the compiler, as the kernel is: torch 2.11 traces plain operations in its place as if queries
    and keys had no gradient."""
    turned = rope_reference.rope(qkv, cos, sin, heads=Heads(queries, keys, size))
    return turned.q_BTNH.clone(), turned.k_BTKH.clone()


@rope_forward.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor, queries: int, keys: int, size: int) -> tuple[Tensor, Tensor]:
    B, T, _ = qkv.shape
    return qkv.new_empty(B, T, queries, size), qkv.new_empty(B, T, keys, size)


def rope_backward(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """By the angles the other way round."""
    parts = (rope_reference.rotate(grad_q, cos, -sin), rope_reference.rotate(grad_k, cos, -sin), grad_v)
    return torch.cat([part.flatten(-2) for part in parts], dim=-1)


def rope_backward_in_fp8(*inputs: Tensor, known: Known) -> Written:
    calls["rope"] += 1
    return written(rope_backward(*inputs), known)


calls: dict[str, int] = {}

_NORMS = (norm_reference.norm, norm_reference.norm_of_stream, norm_reference.norm_of_sum)
_PLAIN = {
    "norm": NormKernel(*_NORMS, NormProducer("triton", norm_forward, norm_in_fp8, norm_gradients)),
    "gated": GatedKernel(
        gated_reference.gated,
        GatedProducer("triton", gated_forward, gated_in_fp8, gated_backward, gated_backward_in_fp8),
        WeightedGatedKernel(weighted_forward, weighted_gradients, weighted_in_fp8, weighted_gradients_in_fp8),
    ),
    "rope": RopeKernel(rope_reference.rope, RopeProducer("triton", rope_forward, rope_backward, rope_backward_in_fp8)),
}


@contextmanager
def plain_producers() -> Iterator[dict[str, int]]:
    """In here they stand for `triton`. -> how often each has written fp8."""
    held = {}
    for operation, plain in _PLAIN.items():
        held[operation] = REGISTRY[operation]["triton"]
        REGISTRY[operation]["triton"] = plain
    # those of experts as they come
    calls.clear()
    calls.update(norm=0, gate=0, gradient=0, rope=0)
    try:
        yield calls
    finally:
        for operation, fast in held.items():
            REGISTRY[operation]["triton"] = fast


class Remembered(NamedTuple):
    """What a step leaves behind for delayed scales."""

    saturated: int
    """Elements, over all ranks."""
    largest: bytes
    """Elements of this rank's layers in the steps so far."""


@contextmanager
def remembering(*, shrinks: float) -> Iterator[list[Remembered]]:
    """In here each step tells what it remembers. `shrinks`: what is remembered is so much smaller than what was there,
    so that elements of the next step saturate."""
    finish = Fp8.finish_step
    found: list[Remembered] = []

    def finish_and_tell(fp8: Fp8, *, skip: Tensor) -> Tensor | None:
        saturated = finish(fp8, skip=skip)
        found.append(Remembered(int(saturated), fp8.largest.cpu().numpy().tobytes()))
        fp8.largest /= shrinks
        fp8._set_scales()
        return saturated

    Fp8.finish_step = finish_and_tell
    try:
        yield found
    finally:
        Fp8.finish_step = finish


def train(
    rank: int, case: Case, empty: Empty, steps: int, *, shrinks: float = 1.0, device: str = "cpu"
) -> dict[str, Any]:
    """tasks.train with them. -> the trajectory, from rank 0, the calls, and what this rank remembers."""
    with plain_producers() as calls, remembering(shrinks=shrinks) as remembered:
        trajectory = tasks.train(rank, case, empty, steps, device=device)
        return {"trajectory": trajectory, "calls": dict(calls), "remembered": remembered}
