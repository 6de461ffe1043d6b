"""The router against Megatron-core's values, written-out formulas in fp64, slow loops, and itself with tokens split."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Thread

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megaspec.compose.compose import compose
from megaspec.nn.attention.module import SequenceContext
from megaspec.nn.dropout import Noise
from megaspec.nn.linear import WeightGradientQueue, WeightGradientSums
from megaspec.nn.moe.balance import sinkhorn, within_capacity
from megaspec.nn.moe.router import LOSSES, Router, Routing, Tokens
from megaspec.nn.moe.spec import BalanceLoss, MoeSpec, RouterSpec

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "moe_router.json").read_text())
FP32 = torch.tensor(torch.finfo(torch.float32).eps)
SCORES = {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrt_softplus"}


def golden_logits() -> Tensor:
    """[12, 8], as the file's formula says."""
    t, e = torch.arange(12, dtype=torch.float64)[:, None], torch.arange(8, dtype=torch.float64)
    return (torch.sin(1.7 * t + 0.9 * e) + 0.1 * torch.cos(3.1 * t * e)).to(torch.float32)


def context(
    T: int, *, ids: tuple[int, ...] = (0,), weight: float | None = 1.0, noisy: bool = False, dtype=torch.float32
) -> SequenceContext:
    index = torch.arange(T)
    noise = Noise(1, torch.tensor(ids), index) if noisy else None
    aux_weight = None if weight is None else torch.tensor(weight, dtype=dtype)
    return SequenceContext(index, noise=noise, index=index, length=T, aux_weight=aux_weight)


def identity(moe: MoeSpec, *, dtype: torch.dtype = torch.float32) -> Router:
    """A router whose logits are its inputs."""
    router = Router(moe.n_experts, moe, site="here").to(dtype)
    router.weight.data.copy_(torch.eye(moe.n_experts))
    return router


def random_router(moe: MoeSpec, d: int = 6, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Router:
    router = Router(d, moe, site="here").to(dtype)
    generator = torch.Generator().manual_seed(seed)
    router.weight.data.copy_(torch.randn(moe.n_experts, d, generator=generator, dtype=torch.float64))
    if router.bias is not None:
        router.bias.data.copy_(torch.randn(moe.n_experts, generator=generator, dtype=torch.float64))
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.randn(moe.n_experts, generator=generator, dtype=torch.float64) / 3)
    if router.shares is not None:
        router.shares.copy_(torch.rand(moe.n_experts, generator=generator, dtype=torch.float64))
    return router


def tokens_of(*shape: int, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def dense(routing: Routing, n_experts: int) -> Tensor:
    """[M, E]: weights of what is kept, zero elsewhere."""
    weights = routing.weights if routing.keep is None else routing.weights * routing.keep
    return torch.zeros(len(weights), n_experts, dtype=weights.dtype).scatter(1, routing.experts, weights)


def golden_moe(args: dict, **more: object) -> MoeSpec:
    """Megatron-core's arguments in our words."""
    words = {
        "score": SCORES[args.get("score_function", "softmax")],
        "norm_top_k": not args.get("use_pre_softmax", False) and args["topk"] > 1,
        "scale": args.get("scaling_factor") or 1.0,
        "n_groups": args.get("num_groups"),
        "group_top_k": args.get("group_topk"),
        "expert_bias": bool(args.get("expert_bias")),
    }
    return MoeSpec(n_experts=8, top_k=args["topk"], d_expert=4, router=RouterSpec(**words), **more)


@pytest.mark.parametrize("entry", GOLDEN["routing"], ids=lambda entry: entry["name"])
def test_golden_routing(entry: dict) -> None:
    moe = golden_moe(entry["args"])
    router = identity(moe)
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.tensor(entry["args"]["expert_bias"]))
    found = dense(router(golden_logits()[None], context(12)), 8)
    assert torch.equal(found != 0, torch.tensor(entry["map"], dtype=torch.bool))
    torch.testing.assert_close(found, torch.tensor(entry["probs"]), rtol=4 * float(FP32), atol=0)


@pytest.mark.parametrize("entry", GOLDEN["aux"], ids=lambda entry: entry["score"])
def test_golden_aux_loss(entry: dict) -> None:
    losses = (BalanceLoss(kind="aux", coefficient=entry["coeff"]),)
    spec = RouterSpec(score=SCORES[entry["score"]], losses=losses)
    router = identity(MoeSpec(n_experts=8, top_k=entry["topk"], d_expert=4, router=spec))
    router(golden_logits()[None], context(12)).weights.sum().backward()
    seen = router.read(router.sums)
    assert seen.tokens.tolist() == seen.plain.tolist() == entry["tokens_per_expert"]
    assert float(seen.losses[0]) == pytest.approx(entry["aux_loss"], rel=1e-6)


def test_golden_z_loss() -> None:
    router = identity(MoeSpec(n_experts=8, d_expert=4, router=RouterSpec(z_loss=1e-3)))
    router(golden_logits()[None], context(12)).weights.sum().backward()
    assert float(router.read(router.sums).losses[3]) == pytest.approx(GOLDEN["z_loss_coeff_1e-3"], rel=1e-6)


def test_golden_sinkhorn() -> None:
    torch.testing.assert_close(sinkhorn(golden_logits()), torch.tensor(GOLDEN["sinkhorn"]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("entry", GOLDEN["drop"], ids=lambda entry: f"{entry['policy']}-{entry['pad']}")
def test_golden_drops(entry: dict) -> None:
    moe = golden_moe({"topk": 2}, capacity_factor=entry["capacity_factor"], drop=entry["policy"])
    router = identity(moe)
    assert router.moe.capacity(12) == entry["capacity"]
    found = dense(router(golden_logits()[None], context(12)), 8)
    torch.testing.assert_close(found, torch.tensor(entry["probs"]), rtol=4 * float(FP32), atol=0)
    if not entry["pad"]:
        assert torch.equal(found != 0, torch.tensor(entry["map"], dtype=torch.bool))


GROUPS = {"n_groups": 4, "group_top_k": 2}
KINDS = {
    "softmax": RouterSpec(),
    "among_all": RouterSpec(norm_top_k=False, scale=1.5),
    "softmax_groups": RouterSpec(**GROUPS),
    "sigmoid": RouterSpec(score="sigmoid", expert_bias=True, scale=2.5),
    "sigmoid_among_all": RouterSpec(score="sigmoid", norm_top_k=False),
    "sigmoid_groups": RouterSpec(score="sigmoid", expert_bias=True, **GROUPS),
    "best_of_group": RouterSpec(norm_top_k=False, group_score="best", **GROUPS),
    "best_two_of_group": RouterSpec(score="sigmoid", expert_bias=True, group_score="best_two", **GROUPS),
    "logit_bias": RouterSpec(logit_bias=True),
    "sqrt_softplus": RouterSpec(score="sqrt_softplus", expert_bias=True),
    "sinkhorn": RouterSpec(balancing="sinkhorn", scale=2.0),
}


def slow_routing(logits: Tensor, spec: RouterSpec, k: int, bias: Tensor | None) -> tuple[list[int], Tensor]:
    """One token, word by word: the experts that it takes and their weights, in any order."""
    E = len(logits)
    scores = {
        "softmax": lambda: torch.exp(logits) / torch.exp(logits).sum(),
        "sigmoid": lambda: 1 / (1 + torch.exp(-logits)),
        "sqrt_softplus": lambda: torch.sqrt(torch.log1p(torch.exp(logits))),
    }[spec.score]()
    late = spec.score == "softmax" and spec.norm_top_k
    by = ((logits if late else scores) + (0 if bias is None else bias)).tolist()
    allowed = list(range(E))
    if spec.n_groups:
        size = E // spec.n_groups
        groups = [range(g * size, (g + 1) * size) for g in range(spec.n_groups)]
        count = {"share": k // spec.group_top_k, "best": 1, "best_two": 2}[spec.group_score]
        groups.sort(key=lambda group: -sum(sorted((by[e] for e in group), reverse=True)[:count]))
        allowed = [e for group in groups[: spec.group_top_k] for e in group]
    experts = sorted(allowed, key=lambda e: -by[e])[:k]
    weights = scores[experts]
    if late or (spec.score != "softmax" and spec.norm_top_k):
        weights = weights / weights.sum()
    return experts, weights * spec.scale


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sinkhorn"])
def test_choice_and_weights_are_those_of_a_slow_loop(kind: str, k: int) -> None:
    spec = KINDS[kind]
    if spec.n_groups and k == 1:
        spec = spec.model_copy(update={"group_top_k": 1})
    moe = MoeSpec(n_experts=8, top_k=k, d_expert=4, router=spec)
    router, x = random_router(moe), tokens_of(2, 5, 6)
    routing = router(x, context(5, ids=(0, 1), dtype=torch.float64))
    upstream = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    inputs = (x, *router.parameters())
    grads = torch.autograd.grad((dense(routing, 8) * upstream).sum(), inputs)
    logits = x.flatten(0, 1) @ router.weight.t()
    if router.bias is not None:
        logits = logits + router.bias
    total = torch.zeros((), dtype=torch.float64)
    for token, row in enumerate(logits):
        experts, weights = slow_routing(row, spec, k, router.expert_bias)
        assert sorted(routing.experts[token].tolist()) == sorted(experts)
        torch.testing.assert_close(dense(routing, 8)[token, experts], weights, rtol=1e-13, atol=0)
        total = total + (weights * upstream[experts]).sum()
    for found, wanted in zip(grads, torch.autograd.grad(total, inputs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("k", [1, 2])
def test_sinkhorn_chooses_by_balanced_scores_and_weighs_by_its_own(k: int) -> None:
    router = random_router(MoeSpec(n_experts=4, top_k=k, d_expert=4, router=KINDS["sinkhorn"]))
    x = tokens_of(2, 8, 6)
    logits = (x @ router.weight.t()).flatten(0, 1)
    scores = logits.sigmoid() if k == 1 else logits.softmax(-1)
    for weight, ranking in ((1.0, sinkhorn(logits)), (None, logits)):
        routing = router(x, context(8, ids=(0, 1), weight=weight))
        assert torch.equal(routing.experts, ranking.topk(k).indices)
        torch.testing.assert_close(routing.weights, 2.0 * scores.gather(1, routing.experts))


def test_sinkhorn_ends_where_the_columns_stand_still() -> None:
    """Its sums are even, also where logits would overflow; where no scaling evens them it ends all the same."""
    x = tokens_of(50, 8).detach().to(torch.float32)
    for logits in (x, 3 * x + 800):
        torch.testing.assert_close(sinkhorn(logits).sum(0), torch.full((8,), 1 / 8))
        torch.testing.assert_close(sinkhorn(logits).sum(1), torch.full((50,), 1 / 50), rtol=1e-2, atol=0)
    assert sinkhorn(100 * x).isfinite().all()
    assert sinkhorn(tokens_of(50, 8)).dtype == torch.float64


@pytest.mark.parametrize("capacity", [0, 1, 3, 100])
@pytest.mark.parametrize("drop", ["probs", "position"])
def test_drops_are_those_of_a_slow_loop(drop: str, capacity: int) -> None:
    """With many equal weights, of which the earlier token's stays."""
    N, k, E = 40, 3, 6
    generator = torch.Generator().manual_seed(5)
    experts = torch.stack([torch.randperm(E - 1, generator=generator)[:k] for _ in range(N)])
    weights = torch.randint(4, (N, k), generator=generator) / 4
    found = within_capacity(experts, weights if drop == "probs" else None, n_experts=E, capacity=capacity)
    for expert in range(E):
        places = [(t, i) for t in range(N) for i in range(k) if experts[t, i] == expert]
        if drop == "probs":
            places.sort(key=lambda place: -float(weights[place]))
        assert [bool(found[place]) for place in places] == [n < capacity for n in range(len(places))]


@pytest.mark.parametrize("noise", [0.0, 1e-16, -1e-16])
def test_rounding_does_not_say_which_of_equal_tokens_is_dropped(noise: float) -> None:
    """As the first tokens of packed documents that begin alike are equal."""
    weights = torch.full((6, 1), 0.3, dtype=torch.float64)
    weights[::2] += noise
    weights[5] = 0.4
    kept = within_capacity(torch.zeros(6, 1, dtype=torch.int64), weights, n_experts=1, capacity=3)
    assert kept.flatten().tolist() == [True, True, False, False, False, True]


def test_capacity() -> None:
    assert MoeSpec(n_experts=8, top_k=2, capacity_factor=1.0).capacity(12) == 3
    assert MoeSpec(n_experts=8, top_k=2, capacity_factor=1.0).capacity(13) == 4
    assert MoeSpec(n_experts=64, top_k=8, capacity_factor=1.25).capacity(4096) == 640
    assert MoeSpec(n_experts=64, top_k=1, capacity_factor=0.5).capacity(1) == 1


def all_losses(score: str = "sigmoid", **more: object) -> MoeSpec:
    kinds = ("aux", "seq_aux", "global_aux")
    losses = tuple(BalanceLoss(kind=kind, coefficient=0.1 * (n + 1)) for n, kind in enumerate(kinds))
    spec = RouterSpec(score=score, expert_bias=score != "softmax", bias_rate=0.01, losses=losses, z_loss=0.7, **GROUPS)
    return MoeSpec(n_experts=8, top_k=2, d_expert=4, router=spec, **more)


def written_losses(x: Tensor, router: Router) -> dict[str, Tensor]:
    """Every auxiliary loss of whole sequences [B, T, D] as it stands in the papers."""
    B = len(x)
    E, k = router.moe.n_experts, router.moe.top_k
    logits = x @ router.weight.t()
    scores = {
        "softmax": lambda: logits.softmax(-1),
        "sigmoid": lambda: logits.sigmoid(),
        "sqrt_softplus": lambda: torch.log1p(logits.exp()).sqrt(),
    }[router.spec.score]()
    p = scores / scores.sum(-1, keepdim=True)
    chosen = torch.zeros_like(p).scatter(-1, logits.topk(k).indices, 1.0)
    sequences = [E * (chosen[b].mean(0) / k * p[b].mean(0)).sum() for b in range(B)]
    return {
        "aux": 0.1 * E * (chosen.mean((0, 1)) / k * p.mean((0, 1))).sum(),
        "seq_aux": 0.2 * sum(sequences) / B,
        "global_aux": 0.3 * E * (router.shares * p.mean((0, 1))).sum(),
        "z": 0.7 * logits.logsumexp(-1).square().mean(),
    }


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
def test_gradients_of_the_losses_are_those_of_the_written_formulas(score: str) -> None:
    router, x = random_router(all_losses(score)), tokens_of(3, 10, 6)
    routing = router(x, context(10, ids=(0, 1, 2), weight=1.7, dtype=torch.float64))
    found = torch.autograd.grad(0.0 * routing.weights.sum(), (x, router.weight))
    losses = written_losses(x, router)
    wanted = torch.autograd.grad(1.7 * sum(losses.values()), (x, router.weight))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-14)
        assert b.abs().max() > 1e-3
    for value, kind in zip(router.read(router.sums).losses, LOSSES, strict=True):
        torch.testing.assert_close(value, losses[kind].detach(), rtol=1e-13, atol=0)


def test_each_loss_alone_has_its_gradient() -> None:
    x = tokens_of(2, 6, 6)
    for kind in LOSSES:
        whole = random_router(all_losses())
        kept = tuple(loss for loss in whole.spec.losses if loss.kind == kind)
        spec = whole.spec.model_copy(update={"losses": kept, "z_loss": 0.7 if kind == "z" else 0.0})
        router = random_router(whole.moe.model_copy(update={"router": spec}))
        assert (router.shares is None) == (kind != "global_aux")
        if router.shares is not None:
            router.shares.copy_(whole.shares)
        routing = router(x, context(6, ids=(0, 1), dtype=torch.float64))
        (found,) = torch.autograd.grad(0.0 * routing.weights.sum(), x)
        (wanted,) = torch.autograd.grad(written_losses(x, whole)[kind], x)
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-14)


def published_loss(layers: list[Tensor], k: int) -> Tensor:
    """The balancing loss of published configurations, whose weight is router_aux_loss_coef, from logits [M, E] of each
    layer: E · Σ f_i P_i with f the chosen experts of a token, and P the softmax, both averaged over the tokens of all
    layers at once (transformers, load_balancing_loss_func of Mixtral and Qwen3-MoE)."""
    logits = torch.cat(layers)
    p = logits.softmax(-1)
    chosen = torch.zeros_like(p).scatter(-1, p.topk(k).indices, 1.0)
    return p.shape[1] * (chosen.mean(0) * p.mean(0)).sum()


def layers_losses(layers: list[Tensor], k: int, coefficient: float) -> tuple[float, list[Tensor]]:
    """The layers' balancing losses added up, and their gradients in the logits."""
    losses = (BalanceLoss(kind="aux", coefficient=coefficient),)
    E, total, gradients = layers[0].shape[1], 0.0, []
    for logits in layers:
        moe = MoeSpec(n_experts=E, top_k=k, d_expert=4, router=RouterSpec(losses=losses))
        router = identity(moe, dtype=torch.float64)
        x = logits.detach()[None].requires_grad_()
        routing = router(x, context(len(logits), dtype=torch.float64))
        (gradient,) = torch.autograd.grad(0.0 * routing.weights.sum(), x)
        total += float(router.read(router.sums).losses[0])
        gradients.append(gradient[0])
    return total, gradients


def share_and_probability(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """f [E], the share of choices, and P [E] of a layer."""
    counts = logits.topk(k).indices.flatten().bincount(minlength=logits.shape[1]).to(logits.dtype)
    return counts / counts.sum(), logits.softmax(-1).mean(0)


@pytest.mark.parametrize("n_layers", [1, 5])
def test_a_published_coefficient_times_top_k_over_the_layers_is_the_same_loss(n_layers: int) -> None:
    """Where layers have the same load: there the published loss and ours, and their gradients, are equal."""
    k, published = 3, 0.02
    layers = [tokens_of(40, 8)] * n_layers
    wanted = published * published_loss(layers, k)
    (one_layer,) = torch.autograd.grad(wanted, layers[:1])  # of the logits that all layers have
    total, gradients = layers_losses(layers, k, published * k / n_layers)
    assert total == pytest.approx(wanted.item(), rel=1e-13)
    torch.testing.assert_close(sum(gradients), one_layer, rtol=1e-11, atol=1e-16)


def test_the_published_loss_of_uneven_layers_lacks_what_they_even_out() -> None:
    """Pooled, it is ours without the covariance of f and P over layers; its gradient has the layers' mean f."""
    k, E, published = 2, 8, 0.02
    layers = [tokens_of(40, E, seed=seed) for seed in range(4)]
    wanted = published * published_loss(layers, k)
    wanted_gradients = torch.autograd.grad(wanted, layers)
    total, _ = layers_losses(layers, k, published * k / len(layers))
    f, P = (torch.stack(each) for each in zip(*(share_and_probability(x.detach(), k) for x in layers), strict=True))
    covariance = (f * P).mean(0) - f.mean(0) * P.mean(0)
    assert total - wanted.item() == pytest.approx(published * k * E * float(covariance.sum()), rel=1e-9)
    assert total > 1.01 * wanted.item()
    for logits, found in zip(layers, wanted_gradients, strict=True):
        ours = published * k / len(layers) * E * (f.mean(0) * logits.softmax(-1).mean(0)).sum()
        torch.testing.assert_close(torch.autograd.grad(ours, logits)[0], found, rtol=1e-11, atol=1e-16)


@pytest.mark.parametrize(("name", "published"), [("mixtral_8x7b", 0.02), ("qwen3_30b_a3b", 1e-3)])
def test_shipped_models_have_the_published_weight_of_the_balancing_loss(name: str, published: float) -> None:
    model = compose(name).recipe.model
    (loss,) = model.moe.router.losses
    layers = sum(model.moe.in_layers(model.n_layers))
    assert loss.coefficient * layers / model.moe.top_k == pytest.approx(published, rel=1e-7)


def test_statistics_are_summed_over_micro_batches_and_a_step_ends_with_them() -> None:
    router = random_router(all_losses("sigmoid", capacity_factor=0.75))
    start = router.expert_bias.clone()
    tokens, plain, drops, entropy = torch.zeros(8), torch.zeros(8), torch.zeros(8), 0.0
    for micro in range(3):
        x = tokens_of(2, 6, 6, seed=micro)
        routing = router(x, context(6, ids=(0, 1), dtype=torch.float64))
        routing.weights.sum().backward()
        logits = x.detach() @ router.weight.detach().t()
        p = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
        entropy -= float((p * p.log()).sum())
        tokens += routing.experts.flatten().bincount(minlength=8)
        plain += logits.topk(2).indices.flatten().bincount(minlength=8)
        drops += routing.experts[~routing.keep].bincount(minlength=8)
    seen = router.read(router.sums)
    assert seen.tokens.tolist() == tokens.tolist()
    assert seen.plain.tolist() == plain.tolist()
    assert seen.drops.tolist() == drops.tolist()
    assert drops.sum() > 0
    assert float(seen.entropy) == pytest.approx(entropy, rel=1e-12)
    assert float(seen.micro_batches) == 3
    before, sums = (router.expert_bias.clone(), router.shares.clone()), router.sums.clone()
    router.finish_step(sums, skip=torch.ones(()))
    assert torch.equal(router.expert_bias, before[0])
    assert torch.equal(router.shares, before[1])
    assert router.sums.eq(0).all()
    router.sums.fill_(1)
    router.finish_step(sums, skip=torch.zeros(()))
    torch.testing.assert_close(router.expert_bias, start + 0.01 * (9 - tokens).sign().to(torch.float64))
    torch.testing.assert_close(router.shares, plain.to(torch.float64) / 72)
    assert router.sums.eq(0).all()


def test_a_step_starts_from_an_even_load_and_without_bias() -> None:
    router = Router(6, all_losses(), site="here")
    assert router.expert_bias.eq(0).all()
    assert router.shares.eq(1 / 8).all()
    assert router.sums.eq(0).all()
    with torch.device("meta"):
        router = Router(6, all_losses(), site="here")
    assert {p.device.type for p in (router.weight, router.expert_bias, router.sums)} == {"meta"}
    router.to_empty(device="cpu").fill_buffers()
    assert router.expert_bias.eq(0).all()
    assert router.shares.eq(1 / 8).all()
    assert router.sums.eq(0).all()
    assert router.sums.device.type == "cpu"
    assert [name for name, _ in router.named_parameters()] == ["weight"]
    plain = Router(6, MoeSpec(n_experts=8, d_expert=4), site="here")
    assert plain.bias is None
    assert plain.shares is None
    plain.finish_step(plain.sums, skip=torch.zeros(()))


@pytest.mark.parametrize("reentrant_run", [False, True])
def test_recomputation_counts_once_and_changes_no_gradient(reentrant_run: bool) -> None:
    moe = all_losses("sigmoid", capacity_factor=1.0)
    found = []
    for recompute in (False, True):
        router, x = random_router(moe), tokens_of(2, 6, 6)
        where = context(6, ids=(0, 1), dtype=torch.float64)

        def weigh(x: Tensor, router: Router = router, where: SequenceContext = where) -> Tensor:
            routing = router(x, where)
            return (routing.weights * routing.keep).square().sum()

        for _ in range(2 if reentrant_run else 1):
            loss = checkpoint(weigh, x, use_reentrant=False) if recompute else weigh(x)
            loss.backward()
        found.append((router.sums, x.grad, router.weight.grad))
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)


def test_evaluation_leaves_no_trace() -> None:
    router, x = random_router(all_losses()), tokens_of(2, 6, 6)
    routing = router(x, context(6, ids=(0, 1), weight=None))
    routing.weights.sum().backward()
    assert router.sums.eq(0).all()
    counted = router(x, context(6, ids=(0, 1), dtype=torch.float64))
    assert torch.equal(routing.experts, counted.experts)
    assert torch.equal(routing.weights, counted.weights)


class Meeting:
    """What threads that play ranks exchange."""

    def __init__(self, indices: list[Tensor]):
        self.indices, self.barrier, self.slots = indices, Barrier(len(indices)), [None] * len(indices)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.slots[rank] = x.detach().clone()
        self.barrier.wait(20)
        found = list(self.slots)
        self.barrier.wait(20)
        return found


class PartOfTokens(Tokens):
    def __init__(self, meeting: Meeting, rank: int):
        self.meeting, self.rank = meeting, rank

    def gather(self, x_BT: Tensor) -> Tensor:
        parts = torch.cat(self.meeting.exchange(self.rank, x_BT), dim=1)
        return parts[:, torch.cat(self.meeting.indices).argsort()]

    def take(self, x_BS: Tensor) -> Tensor:
        return x_BS[:, self.meeting.indices[self.rank]]

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x)).sum(0)


def on_threads(count: int, work: Callable[[int], None]) -> None:
    failures = []

    def run(rank: int) -> None:
        try:
            work(rank)
        except Exception as error:
            failures.append(error)

    threads = [Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


SPLITS = {
    "halves": [list(range(8)), list(range(8, 16))],
    "zig_zag": [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]],
    "four": [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]],
}


@pytest.mark.parametrize(
    "moe",
    [
        all_losses("sigmoid", capacity_factor=0.75),
        all_losses("softmax", capacity_factor=0.75, drop="position"),
        MoeSpec(n_experts=8, top_k=2, d_expert=4, router=KINDS["sinkhorn"]),
        MoeSpec(n_experts=8, top_k=2, d_expert=4, router=RouterSpec(jitter=0.3, z_loss=0.1)),
    ],
    ids=["sigmoid", "softmax", "sinkhorn", "jitter"],
)
@pytest.mark.parametrize("split", SPLITS)
def test_split_tokens_are_routed_as_whole_ones(moe: MoeSpec, split: str) -> None:
    indices = [torch.tensor(part) for part in SPLITS[split]]
    whole, x = random_router(moe), tokens_of(2, 16, 6)
    where = context(16, ids=(4, 9), noisy=True, weight=1.7, dtype=torch.float64)
    expected = whole(x, where)
    upstream = tokens_of(2, 16, 2).detach()
    (expected.weights * upstream.flatten(0, 1)).sum().backward()
    assert expected.keep is None or not expected.keep.all()
    meeting, routers = Meeting(indices), [random_router(moe) for _ in indices]
    grads = torch.full_like(x, float("nan"))

    def work(rank: int) -> None:
        index, router = indices[rank], routers[rank]
        router.tokens = PartOfTokens(meeting, rank)
        mine = x.detach()[:, index].requires_grad_()
        routing = router(mine, replace(where, index=index, noise=replace(where.noise, index=index)))
        for name in ("experts", "keep"):
            found, wanted = getattr(routing, name), getattr(expected, name)
            assert (found is None) == (wanted is None), name
            assert found is None or torch.equal(found, wanted.view(2, 16, 2)[:, index].flatten(0, 1)), name
        (routing.weights * upstream[:, index].flatten(0, 1)).sum().backward()
        grads[:, index] = mine.grad

    on_threads(len(indices), work)
    torch.testing.assert_close(grads, x.grad, rtol=1e-12, atol=1e-14)
    weight_grad = torch.stack([router.weight.grad for router in routers]).sum(0)
    torch.testing.assert_close(weight_grad, whole.weight.grad, rtol=1e-12, atol=1e-13)
    sums = torch.stack([router.sums for router in routers]).sum(0)
    torch.testing.assert_close(sums, whole.sums, rtol=1e-12, atol=1e-14)


def test_jitter_is_uniform_and_off_in_evaluation() -> None:
    spec = RouterSpec(score="sigmoid", jitter=0.25)
    router = identity(MoeSpec(n_experts=64, top_k=64, d_expert=4, router=spec), dtype=torch.float64)
    x = torch.ones(4, 32, 64, dtype=torch.float64)

    def factors(**more: object) -> Tensor:
        logits = []
        router.choose = lambda ranking, _: logits.append(ranking) or ranking.topk(64).indices
        router(x, context(32, ids=(0, 1, 2, 3), **more))
        return torch.logit(logits[0])

    drawn = factors(noisy=True)
    assert drawn.min() >= 0.75 - 1e-9
    assert drawn.max() <= 1.25
    assert drawn.unique().numel() > 0.99 * drawn.numel()
    assert abs(float(drawn.mean()) - 1) < 5 * 0.25 / (3 * drawn.numel()) ** 0.5
    assert float(drawn.std()) == pytest.approx(0.25 / 3**0.5, rel=0.02)
    torch.testing.assert_close(factors(noisy=False), x)
    again = factors(noisy=True)
    assert torch.equal(drawn, again)


def test_jitter_of_a_part_of_the_sequence_under_sequence_parallel() -> None:
    """The context's noise has the tokens of all parts: the part says which are here."""
    moe = MoeSpec(n_experts=8, d_expert=4, router=RouterSpec(jitter=0.3))
    where, x = context(16, ids=(4, 9), noisy=True, dtype=torch.float64), tokens_of(2, 16, 6)
    whole = random_router(moe)(x, where)
    for part in range(4):
        router = random_router(moe)
        router.part = (part, 4)
        routing = router(x[:, 4 * part : 4 * part + 4], where)
        wanted = whole.weights.view(2, 16, 2)[:, 4 * part : 4 * part + 4].flatten(0, 1)
        torch.testing.assert_close(routing.weights, wanted, rtol=1e-14, atol=0)


def test_a_narrow_model_is_routed_in_fp32() -> None:
    """Logits are those of an fp32 product of the same bf16 numbers; gradients come in bf16, or add up in fp32."""
    moe = MoeSpec(n_experts=8, d_expert=4, router=RouterSpec(z_loss=0.1))
    router = Router(64, moe, site="here")
    router.weight.data = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    wide = Router(64, moe, site="here")
    wide.weight.data = router.weight.data.to(torch.float32)
    x = tokens_of(2, 6, 64).detach().to(torch.bfloat16)
    a, b = x.clone().requires_grad_(), x.to(torch.float32).requires_grad_()
    where = context(6, ids=(0, 1))
    routing, wanted = router(a, where), wide(b, where)
    assert routing.weights.dtype == torch.float32
    assert torch.equal(routing.weights, wanted.weights)
    assert torch.equal(routing.experts, wanted.experts)
    routing.weights.square().sum().backward()
    wanted.weights.square().sum().backward()
    assert torch.equal(a.grad, b.grad.to(torch.bfloat16))
    assert torch.equal(router.weight.grad, wide.weight.grad.to(torch.bfloat16))

    total = torch.zeros(8, 64)
    sums, queue = WeightGradientSums(), WeightGradientQueue()
    sums.connect(router, total, lambda: None)
    router.weight.grad = None
    with sums.defer(queue):
        router(x, where).weights.square().sum().backward()
    assert total.eq(0).all()
    assert len(queue) == 1
    queue.run()
    assert router.weight.grad is None
    assert torch.equal(total, wide.weight.grad)


def test_scores_that_vanish_have_gradients() -> None:
    for score in ("softmax", "sigmoid", "sqrt_softplus"):
        router = identity(MoeSpec(n_experts=4, top_k=2, d_expert=4, router=RouterSpec(score=score)))
        x = torch.tensor([[[-300.0, -200.0, -400.0, -250.0], [300.0, -300.0, 0.0, 1.0]]]).requires_grad_()
        routing = router(x, context(2))
        routing.weights.sum().backward()
        for values in (routing.weights, x.grad, router.sums):
            assert values.isfinite().all(), score


@pytest.mark.gpu
def test_on_a_gpu_nothing_is_read_back_and_routing_is_the_same() -> None:
    moe = [all_losses("sigmoid", capacity_factor=0.75), all_losses("softmax", capacity_factor=0.75, drop="position")]
    moe += [MoeSpec(n_experts=8, top_k=2, d_expert=4, router=KINDS["sinkhorn"].model_copy(update={"jitter": 0.1}))]
    for spec in moe:
        router, x = random_router(spec), tokens_of(2, 16, 6)
        where = context(16, ids=(4, 9), noisy=True, dtype=torch.float64)
        expected = router(x, where)
        expected.weights.square().sum().backward()
        there, y = random_router(spec).to("cuda"), x.detach().to("cuda").requires_grad_()
        there.sums = there.sums.to("cuda")
        index = where.index.to("cuda")
        far = SequenceContext(
            index,
            noise=Noise(1, where.noise.ids.to("cuda"), index),
            index=index,
            length=16,
            aux_weight=where.aux_weight.to("cuda"),
        )
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            routing = there(y, far)
            routing.weights.square().sum().backward()
            seen = there.sums.clone()
            there.finish_step(seen, skip=torch.zeros((), device="cuda"))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(routing.experts.cpu(), expected.experts)
        assert routing.keep is None or torch.equal(routing.keep.cpu(), expected.keep)
        torch.testing.assert_close(y.grad.cpu(), x.grad, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(seen.cpu(), router.sums, rtol=1e-10, atol=1e-12)


def test_a_frozen_router_counts_a_pass_once() -> None:
    """Nothing up to the choice is trained, so that no backward pass counts; the forward pass is made again for what is
    trained behind it."""
    moe = MoeSpec(n_experts=4, top_k=2, d_expert=4)
    router = Router(6, moe, site="here").requires_grad_(False)
    torch.nn.init.normal_(router.weight)
    router.sums.zero_()
    x_BTD = torch.randn(2, 5, 6)
    first = context(5)
    with torch.no_grad():
        router(x_BTD, first)
    router(x_BTD, first)
    assert router.read(router.sums).tokens.sum() == 2 * 5 * 2
    router(x_BTD, context(5))
    assert router.read(router.sums).tokens.sum() == 2 * 2 * 5 * 2
