"""Norms, gates and rotations that write fp8 themselves train what layers that quantise what they take train, in fp64
but for the grid. Here plain operations stand for their kernels, which tests/kernels holds to the same numbers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaspec.estimate.trained import facts_of
from megaspec.estimate.work import operations_writing_for_experts, writing_operations
from megaspec.model.part_builders import PARTS
from megaspec.nn.attention.module import Attention, AttentionSetting, SequenceContext, grouped_query
from megaspec.nn.attention.spec import GroupedQuerySpec
from megaspec.nn.fp8 import Fp8Pair
from megaspec.nn.linear import Linear
from megaspec.nn.mlp.module import MLPS, Gated, GatedMlp
from megaspec.nn.mlp.spec import GatedMlpSpec
from megaspec.nn.moe.facts import GATHERED
from megaspec.nn.moe.fp8 import Fp8Experts
from megaspec.nn.moe.module import Experts, Moe
from megaspec.nn.norm.module import NORMS, KernelNorm, RmsNorm
from megaspec.nn.norm.spec import RmsNormSpec
from megaspec.parallelism.fp8 import Fp8
from megaspec.runtime.build import build, initialise, mesh_of
from megaspec.spec import Spec
from megaspec.verify.parity import TOLERANCES, Trajectory, compare, run_steps
from megaspec.verify.trace import fake_world
from tests.nn.plain_producers import OPERATIONS, plain_producers
from tests.parity.cases import Case, batches_of, spec_of

STEPS = 3


@pytest.fixture(autouse=True)
def calls() -> Any:
    with plain_producers() as found:
        yield found


_CASE = Case(precision="fp8 delayed", accumulate=2, mask="uneven")
CASES = {
    "llama": _CASE,
    "scaled": replace(_CASE, also=(("model.residual_scale", 0.7),)),
    "sandwich": replace(_CASE, also=(("model.layer", {"kind": "sequential", "norms": "sandwich"}),)),
    "clamped": replace(_CASE, also=(("model.mlp", {"kind": "clamped", "limit": 0.5}),)),
    "recomputed": replace(_CASE, also=(("parallelism.recompute", {"kind": "full"}),)),
    "a part of each head turns": replace(_CASE, also=(("model.positions", {"kind": "rotary", "fraction": 0.5}),)),
    "heads normed behind their positions": replace(_CASE, also=(("model.attention.qk_norm", "l2"),)),
    "documents": replace(_CASE, documents=True, kv_heads=1),
    "partly frozen": replace(_CASE, n_layers=4, trainable="upper"),
}


def trained(case: Case, kernel: str) -> Trajectory:
    spec = spec_of(replace(case, also=(*case.also, *((f"kernels.{operation}", kernel) for operation in OPERATIONS))))
    mesh = mesh_of(spec, rank=0, device=torch.device("cpu"))
    return run_steps(spec, mesh=mesh, batches=batches_of(case, [], STEPS))


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_layers_that_quantise(name: str, calls: dict[str, int]) -> None:
    plain = trained(CASES[name], "reference")
    assert not any(calls.values())
    found = trained(CASES[name], "triton")
    findings = compare(found, plain, TOLERANCES["fp64"])
    assert all(finding.passed for finding in findings), [str(one) for one in findings if not one.passed]
    assert all(calls.values()), calls


@pytest.mark.parametrize(
    ("parts", "writers"),
    [
        (None, ("norm", "gate", "gradient", "rope")),
        (["core_attention"], ("norm", "gate", "gradient", "rope")),
        (["shared_experts", "moe"], ("norm", "gate", "gradient", "rope")),
        (["norm"], ("gate", "gradient", "rope")),
        (["activation"], ("norm", "rope")),
        (["mlp"], ("norm", "rope")),
        (["core_attention", "norm", "mlp"], ("rope",)),
    ],
    ids=str,
)
def test_who_is_computed_again_by_itself_writes_none(
    parts: list[str] | None, writers: tuple[str, ...], calls: dict[str, int]
) -> None:
    """And all others do."""
    case = replace(_CASE, also=(("parallelism.recompute", {"kind": "selective", "parts": parts}),))
    plain = trained(case, "reference")
    found = trained(case, "triton")
    findings = compare(found, plain, TOLERANCES["fp64"])
    assert all(finding.passed for finding in findings), [str(one) for one in findings if not one.passed]
    assert {name for name, times in calls.items() if times} == set(writers)


_EXPERTS = replace(_CASE, router="softmax")
GATE = {"experts' gate", "experts' gradient"}
# who writes of a mixture, and whether rows are quantised while they are gathered
OF_EXPERTS = {
    "plain": (_EXPERTS, GATE, True),
    "best two of a group, some dropped": (replace(_EXPERTS, router="sigmoid", drop="probs"), GATE, True),
    "padded": (replace(_EXPERTS, drop="padded"), GATE, True),
    "bounds and biases": (replace(_EXPERTS, experts="clamped"), {"experts' gate"}, True),
    "no gate": (replace(_EXPERTS, experts="plain"), set(), True),
    "weights on inputs": (replace(_EXPERTS, experts="inputs"), GATE, False),
    "beside a shared one": (replace(_EXPERTS, shared="gate"), GATE, True),
    "frozen": (replace(_EXPERTS, trainable="router"), GATE, True),
    "one product frozen": (replace(_EXPERTS, trainable="down"), GATE, True),
    "tensorwise": (replace(_EXPERTS, precision="fp8 tensorwise"), set(), True),
    "rowwise": (replace(_EXPERTS, precision="fp8 rowwise"), set(), False),
    "recomputed": (replace(_EXPERTS, also=(("parallelism.recompute", {"kind": "full"}),)), GATE, True),
    "recomputed by itself": (
        replace(_EXPERTS, also=(("parallelism.recompute", {"kind": "selective", "parts": ["moe"]}),)),
        set(),
        False,
    ),
    "an activation of its own": (
        replace(_EXPERTS, also=(("parallelism.recompute", {"kind": "selective", "parts": ["activation"]}),)),
        set(),
        True,
    ),
}


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_experts_take_what_is_written_as_what_they_quantise(
    name: str, calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, writers, moves = OF_EXPERTS[name]
    gathered = []
    cast = Fp8Experts.quantise_rows

    def watched(*inputs: Any, index_R: Tensor | None = None, **more: Any) -> Fp8Pair:
        gathered.append(index_R is not None)
        return cast(*inputs, index_R=index_R, **more)

    monkeypatch.setattr(Fp8Experts, "quantise_rows", watched)
    found = trained(case, "triton")
    assert {who for who in calls if calls[who] and "experts" in who} == writers
    assert any(gathered) == moves
    # nobody writes anything: products quantise rows that are there in the model's format
    monkeypatch.setattr("megaspec.parallelism.fp8._have_experts_write", lambda *_: None)
    gathered.clear()
    calls.clear()
    plain = trained(case, "reference")
    assert not any(gathered)
    assert not calls
    findings = compare(found, plain, TOLERANCES["fp64"])
    assert all(finding.passed for finding in findings), [str(one) for one in findings if not one.passed]


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
        (TwiceNorm, GatedMlp, Attention, ("gate", "gradient", "rope")),
        (RmsNorm, SquaredGate, Attention, ("norm", "rope")),
        (RmsNorm, CutGate, Attention, ("norm", "rope")),
        (RmsNorm, CutGate, CutAttention, ("rope",)),
    ],
)
def test_what_derives_from_ours_and_computes_something_else_writes_none(
    norm: type[RmsNorm],
    gate: type[GatedMlp],
    attention: type[Attention],
    writers: tuple[str, ...],
    calls: dict[str, int],
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
    assert {name for name, times in calls.items() if times} == set(writers)
    monkeypatch.undo()
    findings = compare(trained(_CASE, "reference"), plain, TOLERANCES["fp64"])
    assert not all(finding.passed for finding in findings), "nothing else was computed"


@pytest.mark.parametrize(
    ("change", "writers"),
    [
        (("model.layer", {"kind": "parallel"}), ("gate", "gradient", "rope")),
        (("model.layer", {"kind": "sequential", "norms": "post"}), ("gate", "gradient", "rope")),
        (("precision.recipe", "tensorwise"), ()),
    ],
    ids=str,
)
def test_who_quantises_where_nobody_can_before(
    change: tuple[str, Any], writers: tuple[str, ...], calls: dict[str, int]
) -> None:
    """What has two takers, or scales that are not known."""
    found = trained(replace(_CASE, also=(change,)), "triton")
    plain = trained(replace(_CASE, also=(change,)), "reference")
    findings = compare(found, plain, TOLERANCES["fp64"])
    assert all(finding.passed for finding in findings), [str(one) for one in findings if not one.passed]
    assert {name for name, times in calls.items() if times} == set(writers)


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

    def finish_with_small_scales(fp8: Fp8, *, skip: Tensor) -> Tensor | None:
        saturated = finish(fp8, skip=skip)
        counted.append(int(saturated))
        fp8.largest /= 16
        fp8._set_scales()
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


@pytest.mark.parametrize(
    "change",
    [
        ("model.attention.qk_norm", "per_head"),
        ("model.attention.clip_qkv", 0.8),
        ("model.attention.output_gate", True),
        ("model.attention.qkv_bias", True),
        ("model.positions", {"kind": "none"}),
    ],
    ids=str,
)
def test_what_stands_before_positions_is_no_rotations(change: tuple[str, Any], calls: dict[str, int]) -> None:
    found = trained(replace(_CASE, also=(change,)), "triton")
    plain = trained(replace(_CASE, also=(change,)), "reference")
    findings = compare(found, plain, TOLERANCES["fp64"])
    assert all(finding.passed for finding in findings), [str(one) for one in findings if not one.passed]
    assert not calls["rope"]
    assert calls["gradient"]


def test_compiled_layers(calls: dict[str, int]) -> None:
    """Their graphs hold what the kernels write, in one piece."""
    plain = trained(_CASE, "reference")
    counters = torch._dynamo.utils.counters
    counters.clear()
    found = trained(replace(_CASE, compile="block"), "triton")
    assert not counters["graph_break"]
    findings = compare(found, plain, TOLERANCES["fp64"])
    assert all(finding.passed for finding in findings), [str(one) for one in findings if not one.passed]
    assert all(calls.values()), calls


def who_writes(spec: Spec) -> set[tuple[str, str, str]]:
    """Of a built model: names of linears, what arrives there in fp8, and the operation that wrote it."""
    with fake_world(0, spec.world_size):
        built = build(spec, mesh=mesh_of(spec, rank=0, device=torch.device("cpu")))
        initialise(built)
    found = set()
    for number, layer in built.model.layers.items():
        names = {}
        for name, module in layer.named_modules():
            if isinstance(module, Linear) and module.fp8 is not None:
                names[int(module.fp8.ticket)] = f"{number}.{name}"
            if isinstance(module, Gated) and module.fp8_producer:
                found.add((f"{number}.{name}.w_gate_up", "gradient", "gated"))
                found.add((f"{number}.{name}.w_down", "input", "gated"))
            # other scales are found in a pass before, for which what is cast has to be there
            is_known = isinstance(module, Experts) and module.entry.fp8 is not None
            is_known = is_known and module.entry.fp8.recipe == "delayed"
            if is_known and module.writes_fp8:
                found.add((f"{number}.{name}.w_down", "input", "gated"))
                if module.entry.bias is None:
                    found.add((f"{number}.{name}.w_gate_up", "gradient", "gated"))
            if is_known and module.moves_fp8:
                found.add((f"{number}.{name}.{module.into_name}", "input", GATHERED))
                if module.w_down.bias is None:
                    found.add((f"{number}.{name}.w_down", "gradient", GATHERED))
            if isinstance(module, Attention) and module.fp8_producer:
                found.add((f"{number}.{name}.wqkv", "gradient", "rope"))
        for module in layer.modules():
            if isinstance(module, KernelNorm) and module.fp8 is not None:
                found.add((names[int(module.fp8.ticket)], "input", "norm"))
    return found


def planned_to_write(spec: Spec) -> set[tuple[str, str, str]]:
    """The same of the facts."""
    planned = set()
    for number, layer in enumerate(facts_of(spec).layers):
        for linear in layer.linears:
            writing = writing_operations(spec)
            if linear.tokens == "routed":
                writing = operations_writing_for_experts(spec)
            if not linear.takes_fp8:
                continue
            if linear.input_by in writing:
                planned.add((f"{number}.{linear.name}", "input", linear.input_by))
            if linear.gradient_by in writing:
                planned.add((f"{number}.{linear.name}", "gradient", linear.gradient_by))
    return planned


def with_kernels(case: Case) -> Spec:
    kernels = [(f"kernels.{operation}", "triton") for operation in OPERATIONS]
    return spec_of(replace(case, also=(*case.also, *kernels, ("kernels.fp8_cast", "triton"))))


_OF_RANKS = replace(_CASE, tp=2, sequence=True, router="softmax", accumulate=1)


@pytest.mark.parametrize(
    "case",
    [
        *CASES.values(),
        replace(_CASE, family="gpt"),
        replace(_CASE, qk_norm=True),
        replace(_CASE, options="whole"),
        replace(_CASE, router="softmax", shared="plain", n_layers=4, every=2),
        replace(_CASE, router="softmax", experts="bias"),
        replace(_CASE, router="softmax", experts="clamped"),
        replace(_CASE, router="softmax", experts="plain"),
        replace(_CASE, router="softmax", experts="inputs"),
        replace(
            _CASE, router="softmax", also=(("parallelism.recompute", {"kind": "selective", "parts": ["activation"]}),)
        ),
        replace(_CASE, also=(("model.layer", {"kind": "parallel"}),)),
        replace(_CASE, also=(("model.layer", {"kind": "sequential", "norms": "post"}),)),
        replace(_CASE, also=(("precision.recipe", "tensorwise"),)),
        replace(_CASE, also=(("parallelism.recompute", {"kind": "selective", "parts": ["norm"]}),)),
        replace(_CASE, tp=2),
        replace(_CASE, tp=2, sequence=True),
        replace(_CASE, tp=2, sequence=True, family="gpt"),
        replace(_CASE, tp=2, sequence=True, router="softmax", n_layers=4, every=2),
        replace(_OF_RANKS, ep=2),
        replace(_OF_RANKS, ep=2, dispatch="all_gather"),
        replace(_OF_RANKS, etp=2, experts="bias"),
    ],
    ids=str,
)
def test_the_plan_knows_who_writes(case: Case) -> None:
    spec = with_kernels(case)
    assert planned_to_write(spec) == who_writes(spec)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Layers of any kind, with experts on ranks of any kind."""
    recipe = draw(st.sampled_from(["delayed", "delayed", "tensorwise"]))
    parts = st.sets(st.sampled_from(["norm", "activation", "mlp", "moe", "core_attention"]), min_size=1)
    recompute: dict[str, Any] = {"kind": draw(st.sampled_from(["none", "full", "selective"]))}
    if recompute["kind"] == "selective":
        recompute["parts"] = sorted(draw(parts))
    ranks: dict[str, Any] = draw(
        st.sampled_from(
            [
                {},
                {"tp": 2, "sequence": True},
                {"tp": 2, "sequence": True, "ep": 2},
                {"tp": 2, "sequence": True, "ep": 2, "dispatch": "all_gather"},
                {"tp": 2, "sequence": True, "etp": 2},
                {"dp": 2, "ep": 2, "strategy": "zero1"},
                {"dp": 2, "ep": 2, "strategy": "zero1", "dispatch": "all_gather"},
            ]
        )
    )
    router = draw(st.sampled_from(["softmax", "sigmoid"]))
    is_of_experts = draw(st.booleans()) or "ep" in ranks or "etp" in ranks
    of_experts: dict[str, Any] = {}
    if is_of_experts:
        of_experts = {
            "router": router,
            "experts": draw(st.sampled_from(["", "bias", "clamped", "plain", "inputs"])),
            "shared": draw(st.sampled_from(["none", "plain", "gate"])),
            "every": draw(st.sampled_from([1, 2])),
        }
    return replace(
        _CASE,
        precision=f"fp8 {recipe}",
        accumulate=1,
        n_layers=2 * of_experts.get("every", 1),
        family=draw(st.sampled_from(["llama", "llama", "gpt"])),
        qk_norm=draw(st.booleans()),
        also=(("parallelism.recompute", recompute),),
        **ranks,
        **of_experts,
    )


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_the_plan_knows_who_writes_in_any_layout(case: Case) -> None:
    spec = with_kernels(case)
    assert planned_to_write(spec) == who_writes(spec)


@pytest.mark.parametrize(("dispatch", "moves"), [("all_to_all", False), ("all_gather", True)])
def test_rows_that_other_ranks_send_are_not_gathered_in_fp8(
    dispatch: str, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what runs: tokens are quantised by their rows where experts get tokens, and nowhere else."""
    gathered = []
    cast = Fp8Experts.quantise_rows

    def watched(*inputs: Any, index_R: Tensor | None = None, **more: Any) -> Fp8Pair:
        gathered.append(index_R is not None)
        return cast(*inputs, index_R=index_R, **more)

    monkeypatch.setattr(Fp8Experts, "quantise_rows", watched)
    case = replace(_CASE, dp=2, ep=2, strategy="zero1", router="softmax", dispatch=dispatch, accumulate=1)
    spec = spec_of(case)
    with fake_world(0, spec.world_size):
        built = build(spec, mesh=mesh_of(spec, rank=0, device=torch.device("cpu")))
        initialise(built)
        for module in built.model.modules():
            if isinstance(module, Moe):
                # the loads of a world that is not there are no numbers
                module.force_balance()
        ids = torch.zeros(spec.train.micro_batch, spec.data.seq_len, dtype=torch.int64)
        built.model.loss(ids, ids, torch.ones_like(ids, dtype=torch.float64)).backward()
    assert gathered
    assert any(gathered) is moves
    flags = [module.moves_fp8 for module in built.model.modules() if isinstance(module, Experts)]
    assert set(flags) == {moves}
