"""A mixture of experts against one token and one expert at a time, in fp64."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megaspec.nn.attention.module import SequenceContext
from megaspec.nn.dropout import Dropout
from megaspec.nn.linear import Linear, WeightGradientQueue, WeightGradientSums
from megaspec.nn.mlp.module import ACTIVATIONS, MLPS, FeedForward
from megaspec.nn.mlp.spec import GatedMlpSpec, MlpSpec, PlainMlpSpec
from megaspec.nn.moe.activation import weighted
from megaspec.nn.moe.module import Experts, GroupedLinear, Moe, loads_in_turn
from megaspec.nn.moe.router import Router
from megaspec.nn.moe.rows import sorted_rows
from megaspec.nn.moe.spec import BalanceLoss, MoeSpec, RouterSpec
from megaspec_kernels.registry import REGISTRY

B, T, D, F_EXPERT, F_SHARED = 2, 7, 12, 10, 6
SWIGLU = GatedMlpSpec()
AUX = (BalanceLoss(kind="aux", coefficient=0.3), BalanceLoss(kind="seq_aux", coefficient=0.1))


@dataclass(frozen=True)
class Case:
    name: str
    moe: MoeSpec
    mlp: MlpSpec = SWIGLU

    def __str__(self) -> str:
        return self.name


def case(name: str, *, router: RouterSpec | None = None, mlp: MlpSpec | None = None, **moe: object) -> Case:
    options = {"n_experts": 6, "top_k": 2, "router": router or RouterSpec()} | moe
    return Case(name, MoeSpec(**options), mlp or SWIGLU)


CASES = [
    case("softmax"),
    case("softmax first", router=RouterSpec(norm_top_k=False, z_loss=0.1, losses=AUX), top_k=3),
    case("sigmoid", router=RouterSpec(score="sigmoid", scale=2.5, expert_bias=True, n_groups=3, group_top_k=2)),
    case("softplus", router=RouterSpec(score="sqrt_softplus", norm_top_k=False), top_k=1),
    case("sinkhorn", router=RouterSpec(balancing="sinkhorn")),
    case("lowest dropped", capacity_factor=0.7),
    case("last dropped", capacity_factor=0.5, drop="position", top_k=3),
    case("padded", capacity_factor=0.7, pad_to_capacity=True),
    case("padded, much room", capacity_factor=4.0, pad_to_capacity=True, drop="position"),
    case("shared", d_shared=F_SHARED),
    case("shared with gate", d_shared=F_SHARED, shared_gate=True, capacity_factor=0.7, router=RouterSpec(losses=AUX)),
    case("many experts", n_experts=40),
    case("every expert", n_experts=3, top_k=3),
    case("bias", mlp=GatedMlpSpec(bias=True)),
    case("bias, some dropped", mlp=GatedMlpSpec(bias=True), capacity_factor=0.7),
    case("bias, padded", mlp=GatedMlpSpec(bias=True), capacity_factor=0.7, pad_to_capacity=True),
    case("plain", mlp=PlainMlpSpec(kind="plain", activation="relu_squared"), d_shared=F_SHARED),
    case("gated gelu", mlp=GatedMlpSpec(activation="gelu", bias=True)),
    case("weighted inputs", weights_on="inputs", router=RouterSpec(score="sigmoid", norm_top_k=False), top_k=1),
    case("weighted inputs, bias", weights_on="inputs", mlp=PlainMlpSpec(kind="plain", bias=True), capacity_factor=0.7),
    case(
        "weighted inputs, padded",
        weights_on="inputs",
        mlp=GatedMlpSpec(bias=True),
        capacity_factor=4.0,
        pad_to_capacity=True,
    ),
]


UNPERMUTE = REGISTRY["unpermute"]["reference"]


def feed_forward(width: int, mlp: MlpSpec) -> FeedForward:
    return MLPS[type(mlp)](D, width, mlp, out=Dropout(0.0, "inner"))


def build(moe: MoeSpec, mlp: MlpSpec = SWIGLU, *, seed: int = 1) -> Moe:
    torch.manual_seed(seed)
    form = feed_forward(F_EXPERT, mlp)
    module = Moe(
        Router(D, moe, site="router"),
        Experts(
            moe.n_experts,
            form,
            activation=weighted(mlp, form.activate),
            weights_on=moe.weights_on,
            kernel=REGISTRY["grouped"]["reference"],
            unpermute=UNPERMUTE,
        ),
        shared=feed_forward(moe.d_shared, mlp) if moe.d_shared else None,
        shared_gate=Linear(D, 1) if moe.shared_gate else None,
        pad=moe.pad_to_capacity,
        out=Dropout(0.0, "moe"),
    ).to(torch.float64)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return module


def context(*, weight: float | None = 1.5) -> SequenceContext:
    index = torch.arange(T)
    aux = None if weight is None else torch.tensor(weight, dtype=torch.float64)
    return SequenceContext(index, index=index, length=T, aux_weight=aux)


def one_expert(x_D: Tensor, mlp: MlpSpec, into: Linear, down: Linear, *, number: int = 0, count: int = 1) -> Tensor:
    """Expert `number` of `count`, by the equation."""
    hidden = into.weight.unflatten(0, (count, -1))[number] @ x_D
    if into.bias is not None:
        hidden = hidden + into.bias.unflatten(0, (count, -1))[number]
    if isinstance(mlp, GatedMlpSpec):
        gate, up = hidden.chunk(2)
        hidden = ACTIVATIONS[mlp.activation](gate) * up
    else:
        hidden = ACTIVATIONS[mlp.activation](hidden)
    y_D = down.weight.unflatten(0, (count, -1))[number] @ hidden
    if down.bias is not None:
        y_D = y_D + down.bias.unflatten(0, (count, -1))[number]
    return y_D


def into_of(module: Experts | FeedForward) -> Linear:
    return getattr(module, "w_gate_up", None) or module.w_up


def one_at_a_time(moe: Moe, x_BTD: Tensor, context: SequenceContext, mlp: MlpSpec = SWIGLU) -> Tensor:
    """The same by the equation, with the router's own choice."""
    E, routing = moe.experts.count, moe.router(x_BTD, context)
    products = (into_of(moe.experts), moe.experts.w_down)
    tokens = []
    for m, x_D in enumerate(x_BTD.flatten(0, 1)):
        y_D = torch.zeros_like(x_D)
        for j, e in enumerate(routing.experts[m].tolist()):
            kept = routing.keep is None or bool(routing.keep[m, j])
            weight = routing.weights[m, j]
            # a dropped choice still has its part in the graph: nothing
            if moe.router.moe.weights_on == "inputs":
                y_D = y_D + kept * one_expert(weight * x_D, mlp, *products, number=e, count=E)
            else:
                y_D = y_D + kept * weight * one_expert(x_D, mlp, *products, number=e, count=E)
        if moe.shared is not None:
            beside_D = one_expert(x_D, mlp, into_of(moe.shared), moe.shared.w_down)
            if moe.shared_gate is not None:
                beside_D = beside_D * (moe.shared_gate.weight[0] @ x_D).sigmoid()
            y_D = y_D + beside_D
        tokens.append(y_D)
    return torch.stack(tokens).view_as(x_BTD)


def gradients(y: Tensor, grad: Tensor, moe: Moe, x: Tensor) -> dict[str, Tensor]:
    leaves = {"x": x, **dict(moe.named_parameters())}
    return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), grad), strict=True))


def close(found: Tensor, expected: Tensor) -> bool:
    return (found - expected).abs().max() <= 1e-12 * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_one_token_at_a_time(case: Case) -> None:
    moe = build(case.moe, case.mlp)
    if moe.router.expert_bias is not None:
        moe.router.expert_bias.copy_(torch.linspace(-0.2, 0.2, case.moe.n_experts))
    x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(x)
    y, expected = moe(x, context()), one_at_a_time(moe, x, context(), case.mlp)
    assert close(y, expected)
    found, wanted = gradients(y, grad, moe, x), gradients(expected, grad, moe, x)
    for name in wanted:
        assert close(found[name], wanted[name]), name
    if case.moe.capacity_factor is not None and case.moe.capacity_factor < 1:
        assert not moe.router(x, context()).keep.all()


def test_experts_without_tokens() -> None:
    """All tokens take the same two experts; the others get zero gradients."""
    moe = build(MoeSpec(n_experts=6, top_k=2))
    x = torch.rand(B, T, D, dtype=torch.float64, requires_grad=True) + 0.1
    with torch.no_grad():
        moe.router.weight.copy_(torch.tensor([-1.0, 3, -1, -1, 2, -1], dtype=torch.float64)[:, None].expand(6, D))
    y = moe(x, context(weight=None))
    assert close(y, one_at_a_time(moe, x, context(weight=None)))
    y.sum().backward()
    touched = moe.experts.w_down.weight.grad.view(6, -1).abs().sum(1) > 0
    assert touched.tolist() == [False, True, False, False, True, False]


def test_weight_gradients_are_summed_in_their_totals() -> None:
    moe = build(MoeSpec(n_experts=6, top_k=2))
    x = torch.randn(B, T, D, dtype=torch.float64)
    moe(x, context()).sum().backward()
    expected = {n: p.grad for n, p in moe.named_parameters()}
    sums, arrived = WeightGradientSums(), []
    for name, module in moe.named_modules():
        if isinstance(module, Linear):
            buffer = torch.full_like(module.weight, float("nan"))
            sums.connect(module, buffer, lambda name=name: arrived.append(name))
    for _ in range(2):
        moe(x, context()).sum().backward()
    for name, module in moe.named_modules():
        if isinstance(module, GroupedLinear):
            assert close(module.main_grad.buffer, 2 * expected[f"{name}.weight"]), name
    assert sorted(arrived) == sorted(2 * ["router", "experts.w_gate_up", "experts.w_down"])


def test_weight_gradients_can_be_deferred() -> None:
    moe = build(MoeSpec(n_experts=6, top_k=2, capacity_factor=0.7))
    x = torch.randn(B, T, D, dtype=torch.float64)
    moe(x, context()).sum().backward()
    expected = {n: p.grad for n, p in moe.named_parameters()}
    linears = {f"{n}.weight": m for n, m in moe.named_modules() if isinstance(m, Linear)}
    sums = WeightGradientSums()
    for module in linears.values():
        sums.connect(module, torch.full_like(module.weight, float("nan")), lambda: None)
    queue = WeightGradientQueue()
    with sums.defer(queue):
        moe(x, context()).sum().backward()
    assert len(queue) == len(linears) == 3
    assert all(module.main_grad.buffer.isnan().all() for module in linears.values())
    queue.run()
    for name, module in linears.items():
        assert close(module.main_grad.buffer, expected[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("mlp", [GatedMlpSpec(), GatedMlpSpec(activation="gelu"), PlainMlpSpec(kind="plain")], ids=str)
def test_compiled_parts_compute_the_same(mlp: MlpSpec) -> None:
    """What lies between the experts' products, sums of rows, shared experts."""
    moe = build(MoeSpec(n_experts=6, top_k=2, d_shared=F_SHARED, capacity_factor=0.7), mlp)
    inputs = [torch.randn(B, T, D, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    expected = [gradients(moe(x, context()), torch.ones_like(x), moe, x) for x in inputs]
    moe.compile_parts()
    found = [gradients(moe(x, context()), torch.ones_like(x), moe, x) for x in inputs]
    for one, other in zip(found, expected, strict=True):
        for name in other:
            assert close(one[name], other[name]), name


def test_dropout_hits_routed_and_shared_experts_together() -> None:
    moe = build(MoeSpec(n_experts=6, top_k=2, d_shared=F_SHARED))
    x = torch.randn(B, T, D, dtype=torch.float64)
    whole = moe(x, context())
    moe.dropout.forward = lambda y, noise: torch.zeros_like(y)
    assert (moe(x, context()) == 0).all()
    assert (whole != 0).all()


def test_matrices_of_all_experts_are_told() -> None:
    layer = GroupedLinear(3, 8, 4, 4, kernel=REGISTRY["grouped"]["reference"])
    assert layer.parts == (4,) * 6
    assert layer.weight.shape == (24, 8)


@pytest.mark.parametrize("pad", [False, True])
def test_forced_balance(pad: bool) -> None:
    moe = build(MoeSpec(n_experts=4, top_k=3, capacity_factor=2.0 if pad else None, pad_to_capacity=pad))
    moe.force_balance()
    routing = moe.router(torch.randn(B, T, D, dtype=torch.float64), context())
    counts = torch.bincount(routing.experts.flatten(), minlength=4).tolist()
    assert counts == loads_in_turn(B * T, k=3, n_experts=4) == [11, 11, 10, 10]
    assert all(len(set(row)) == 3 for row in routing.experts.tolist())


def test_rows_go_there_and_back() -> None:
    """Spreading and collecting are transposes of each other, dropped and padded rows included."""
    experts = torch.tensor([[0, 2], [2, 3], [2, 0], [3, 2]])
    keep = torch.tensor([[True, True], [True, True], [True, True], [True, False]])
    x, y = torch.randn(4, 5, dtype=torch.float64), torch.randn(20, 5, dtype=torch.float64)
    for rows, count in (
        (sorted_rows(experts, keep, 5, unpermute=UNPERMUTE).first(7), 7),
        (sorted_rows(experts, None, 5, unpermute=UNPERMUTE), 8),
        (sorted_rows(experts, keep, 5, unpermute=UNPERMUTE).padded(4), 20),
    ):
        assert torch.allclose((rows.permute(x) * y[:count]).sum(), (rows.unpermute(y[:count]) * x).sum())
    assert sorted_rows(experts, keep, 5, unpermute=UNPERMUTE).ends.tolist() == [2, 2, 5, 7, 7]
    assert sorted_rows(experts, keep, 5, unpermute=UNPERMUTE).padded(4).ends.tolist() == [4, 8, 12, 16, 20]
    assert (
        sorted_rows(experts, torch.zeros_like(keep), 5, unpermute=UNPERMUTE).first(0).unpermute(y[:0]).tolist()
        == [[0.0] * 5] * 4
    )
