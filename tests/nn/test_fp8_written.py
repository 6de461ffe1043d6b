"""Norms and gates that write fp8 themselves train what layers that quantise what they take train, in fp64 but for the
grid. Here plain operations stand for their kernels, which tests/kernels holds to the same numbers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megaspec.model.part_builders import PARTS
from megaspec.nn.attention.module import Attention, AttentionSetting, SequenceContext, grouped_query
from megaspec.nn.attention.spec import GroupedQuerySpec
from megaspec.nn.mlp.module import MLPS, GatedMlp
from megaspec.nn.mlp.spec import GatedMlpSpec
from megaspec.nn.norm.module import NORMS, RmsNorm
from megaspec.nn.norm.spec import RmsNormSpec
from megaspec.parallelism.fp8 import Fp8
from megaspec.runtime.build import mesh_of
from megaspec.verify.parity import TOLERANCES, Trajectory, compare, run_steps
from megaspec_kernels.fp8_cast import reference as fp8_cast
from megaspec_kernels.fp8_cast.formats import Known
from megaspec_kernels.fp8_cast.tile import Written
from megaspec_kernels.gated import reference as gated_reference
from megaspec_kernels.gated.form import GatedForm
from megaspec_kernels.gated.form import decoded as decoded_gate
from megaspec_kernels.norm import reference as norm_reference
from megaspec_kernels.norm.form import NormForm, decoded
from megaspec_kernels.norm.triton import NormGradients, NormInFp8
from megaspec_kernels.registry import REGISTRY, GatedKernel, GatedProducer, NormKernel, NormProducer
from tests.parity.cases import Case, batches_of, spec_of

STEPS = 3


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
    return total, normed(summed, weight, bias, code).clone(), x.new_empty(0)


def written(x: Tensor, known: Known) -> Written:
    scale = known.scale.clone().view(1, 1)
    rows, columns = fp8_cast.cast(
        x.flatten(0, -2),
        scale,
        block=(None, None),
        dtype=known.dtype,
        columns=True,
        seen=known.seen,
        saturated=known.saturated,
    )
    return Written(rows, columns, scale)


def norm_in_fp8(*inputs: Any, known: Known) -> NormInFp8:
    calls["norm"] += 1
    total, y, statistics = norm_forward(*inputs)
    return NormInFp8(total, written(y, known), statistics)


@torch.enable_grad()
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
    leaf = x.detach().requires_grad_()
    vector = weight.detach().requires_grad_()
    grad_x, grad_weight = torch.autograd.grad(normed(leaf, vector, None, code), (leaf, vector), grad)
    if grad_stream is not None:
        grad_x = grad_x + grad_stream
    return NormGradients(grad_x, decoded(code).scale * grad_x, grad_weight if needs[0] else None, None)


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


calls: dict[str, int] = {}


@pytest.fixture(autouse=True)
def plain_producers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.update(norm=0, gate=0, gradient=0)
    norms = NormProducer("triton", norm_forward, norm_in_fp8, norm_gradients)
    gates = GatedProducer("triton", gated_forward, gated_in_fp8, gated_backward, gated_backward_in_fp8)
    functions = (norm_reference.norm, norm_reference.norm_of_stream, norm_reference.norm_of_sum)
    monkeypatch.setitem(REGISTRY["norm"], "triton", NormKernel(*functions, norms))
    monkeypatch.setitem(REGISTRY["gated"], "triton", GatedKernel(gated_reference.gated, gates))


_CASE = Case(precision="fp8 delayed", accumulate=2, mask="uneven")
CASES = {
    "llama": _CASE,
    "scaled": replace(_CASE, also=(("model.residual_scale", 0.7),)),
    "sandwich": replace(_CASE, also=(("model.layer", {"kind": "sequential", "norms": "sandwich"}),)),
    "clamped": replace(_CASE, also=(("model.mlp", {"kind": "clamped", "limit": 0.5}),)),
    "recomputed": replace(_CASE, also=(("parallelism.recompute", {"kind": "full"}),)),
    "partly frozen": replace(_CASE, n_layers=4, trainable="upper"),
}


def trained(case: Case, kernel: str) -> Trajectory:
    spec = spec_of(replace(case, also=(*case.also, ("kernels.norm", kernel), ("kernels.gated", kernel))))
    mesh = mesh_of(spec, rank=0, device=torch.device("cpu"))
    return run_steps(spec, mesh=mesh, batches=batches_of(case, [], STEPS))


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_layers_that_quantise(name: str) -> None:
    plain = trained(CASES[name], "reference")
    assert not any(calls.values())
    found = trained(CASES[name], "triton")
    findings = compare(found, plain, TOLERANCES["fp64"])
    assert all(finding.passed for finding in findings), [str(one) for one in findings if not one.passed]
    assert all(calls.values()), calls


@pytest.mark.parametrize(
    ("parts", "writers"),
    [
        (None, {"norm", "gate", "gradient"}),
        (["core_attention"], {"norm", "gate", "gradient"}),
        (["shared_experts", "moe"], {"norm", "gate", "gradient"}),
        (["norm"], {"gate", "gradient"}),
        (["activation"], {"norm"}),
        (["mlp"], {"norm"}),
        (["core_attention", "norm", "mlp"], set()),
    ],
    ids=str,
)
def test_who_is_computed_again_by_itself_writes_none(parts: list[str] | None, writers: set[str]) -> None:
    """And all others do."""
    case = replace(_CASE, also=(("parallelism.recompute", {"kind": "selective", "parts": parts}),))
    plain = trained(case, "reference")
    found = trained(case, "triton")
    findings = compare(found, plain, TOLERANCES["fp64"])
    assert all(finding.passed for finding in findings), [str(one) for one in findings if not one.passed]
    assert {name for name, times in calls.items() if times} == writers


class TwiceNorm(RmsNorm):
    def forward(self, x: Tensor, mean_square: Tensor | None = None) -> Tensor:
        return 2 * super().forward(x, mean_square)


class SquaredGate(GatedMlp):
    def activate(self, gate_up: Tensor) -> Tensor:
        return super().activate(gate_up) ** 2


class CutGate(GatedMlp):
    def into(self, x_BTD: Tensor) -> Tensor:
        return super().into(x_BTD.clamp(max=0.1))


class CutAttention(Attention):
    def forward(self, x_BTD: Tensor, context: SequenceContext) -> Tensor:
        return super().forward(x_BTD.clamp(max=0.1), context)


@pytest.mark.parametrize(
    ("norm", "gate", "attention", "writers"),
    [
        (TwiceNorm, GatedMlp, Attention, {"gate", "gradient"}),
        (RmsNorm, SquaredGate, Attention, {"norm"}),
        (RmsNorm, CutGate, Attention, {"norm"}),
        (RmsNorm, CutGate, CutAttention, set()),
    ],
)
def test_what_derives_from_ours_and_computes_something_else_writes_none(
    norm: type[RmsNorm],
    gate: type[GatedMlp],
    attention: type[Attention],
    writers: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a plug-in: what it computes is taken."""
    monkeypatch.setitem(NORMS, RmsNormSpec, norm)
    monkeypatch.setitem(MLPS, GatedMlpSpec, gate)

    def attends(spec: GroupedQuerySpec, setting: AttentionSetting) -> Attention:
        built = grouped_query(spec, setting)
        built.__class__ = attention
        return built

    monkeypatch.setitem(PARTS.attentions, GroupedQuerySpec, attends)
    plain = trained(_CASE, "reference")
    found = trained(_CASE, "triton")
    findings = compare(found, plain, TOLERANCES["fp64"])
    assert all(finding.passed for finding in findings), [str(one) for one in findings if not one.passed]
    assert {name for name, times in calls.items() if times} == writers
    monkeypatch.undo()
    findings = compare(trained(_CASE, "reference"), plain, TOLERANCES["fp64"])
    assert not all(finding.passed for finding in findings), "nothing else was computed"


@pytest.mark.parametrize(
    ("change", "writers"),
    [
        (("model.layer", {"kind": "parallel"}), {"gate", "gradient"}),
        (("model.layer", {"kind": "sequential", "norms": "post"}), {"gate", "gradient"}),
        (("precision.recipe", "tensorwise"), set()),
    ],
    ids=str,
)
def test_who_quantises_where_nobody_can_before(change: tuple[str, Any], writers: set[str]) -> None:
    """What has two takers, or scales that are not known."""
    found = trained(replace(_CASE, also=(change,)), "triton")
    plain = trained(replace(_CASE, also=(change,)), "reference")
    findings = compare(found, plain, TOLERANCES["fp64"])
    assert all(finding.passed for finding in findings), [str(one) for one in findings if not one.passed]
    assert {name for name, times in calls.items() if times} == writers


RECOMPUTED = [
    {"kind": "full"},
    {"kind": "full", "method": "block", "layers": 1},
    {"kind": "selective", "parts": ["mlp", "moe"]},
    {"kind": "selective", "parts": ["norm", "activation", "core_attention"]},
]


@pytest.mark.parametrize("kernel", ["reference", "triton"])
@pytest.mark.parametrize("router", [None, "softmax"])
def test_what_saturates_is_counted_once(router: str | None, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of what the backward pass computes again."""
    counted: list[int] = []
    finish = Fp8.finish_step

    def finish_with_small_scales(fp8: Fp8) -> Tensor | None:
        saturated = finish(fp8)
        counted.append(int(saturated))
        fp8.largest /= 16
        return saturated

    monkeypatch.setattr(Fp8, "finish_step", finish_with_small_scales)
    case = _CASE
    if router is not None:
        case = replace(case, router=router)
    trained(case, kernel)
    kept = counted.copy()
    assert kept[0] == 0, "a first step has scales of its own"
    assert min(kept[1:]) > 100
    for recompute in RECOMPUTED:
        counted.clear()
        trained(replace(case, also=(("parallelism.recompute", recompute),)), kernel)
        assert counted == kept, recompute
