"""What a mixture of experts says of itself. An expert is a feed-forward layer, and says what model.mlp says of one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from megaspec.core.part_facts import (
    Exchange,
    Execution,
    Kept,
    Linear,
    Moved,
    PartFacts,
    Routing,
    Vector,
    Width,
    features,
)
from megaspec.nn.mlp.facts import FeedForwardPlace, activation_moves
from megaspec.nn.mlp.spec import MlpSpec
from megaspec.nn.moe.spec import MoeSpec

GATHERED = "experts' rows"
"""What writes fp8 for experts besides a gate: rows are quantised while they are gathered, on the way there and back."""


@dataclass(frozen=True)
class ExpertsPlace:
    """Where experts stand."""

    d_model: int
    input_kept: str
    """What they take, by the name of the kept tensor: `norm2.out`."""
    dense_name: str
    """Module of the feed-forward layer that other layers have in their place."""
    dropout: bool = False
    """Their output has a site of it that drops."""


def moe_facts(spec: MoeSpec, mlp: MlpSpec, place: ExpertsPlace) -> PartFacts:
    """Router and routed experts. Module names: moe.router, moe.experts with the names of a feed-forward layer's
    products, moe.shared_gate, moe.dropout."""
    d_model = features(place.d_model)
    into, out = _experts(spec, mlp, place)
    inner = out.inputs
    gates = len(into.outputs)
    router = Linear(
        "moe.router",
        d_model,
        (features(spec.n_experts),),
        "router",
        tokens="stream",
        bias=spec.router.logit_bias,
        recomputed_with="router",
        in_fp32=True,
        in_flops=False,
        is_hidden=False,
        input_kept=place.input_kept,
    )
    linears = [router, into, out]
    if spec.shared_gate:
        gate = Linear(
            "moe.shared_gate",
            d_model,
            (features(1),),
            "shared_experts",
            tokens="stream",
            in_flops=False,
            in_time=False,
            input_kept=place.input_kept,
        )
        linears.append(gate)
    bias = ()
    if spec.router.expert_bias:
        bias = (Vector("moe.router.expert_bias", spec.n_experts, 0.0, "router", is_trained=False),)
    # rows are sorted by expert and put back in order, each time read and written
    permuted = Moved("moe", ((4, d_model),), ((4, d_model),), tokens="routed", is_fused=True)
    moved = [permuted, activation_moves(gates, inner, tokens="routed")]
    if spec.weights_on == "inputs":
        # reads rows and writes them weighted; backward, reads both and the gradient's, and writes that of the rows
        moved.append(Moved("moe", ((2, d_model),), ((3, d_model),), tokens="routed", is_fused=True))
    return PartFacts(
        linears=tuple(linears),
        vectors=bias,
        sites=("moe.dropout",),
        routing=_routing(spec, place.d_model, inner),
        kept=partial(_kept, spec, into, out, place),
        moved=tuple(moved),
        gradient=into.outputs,
    )


def _experts(spec: MoeSpec, mlp: MlpSpec, place: ExpertsPlace) -> tuple[Linear, Linear]:
    """Both products of all experts: those of one feed-forward layer, as many times as there are experts."""
    where = FeedForwardPlace("moe.experts", "dispatched", "experts", ("moe",))
    one = mlp.facts(d_model=place.d_model, d_ffn=spec.d_expert, place=where)
    assert len(one.linears) == 2, f"experts of two products are needed, {type(mlp).__name__} has {len(one.linears)}"
    into, out = (_routed(linear, spec, where.name, place.dense_name) for linear in one.linears)
    gate = one.moved[0].operation
    # with a bias, whose gradient is made of the output's, a product quantises that
    has_bias = into.bias
    into = replace(into, input_by=GATHERED, gradient_by="" if has_bias else gate)
    if spec.weights_on == "inputs":
        into = replace(into, input_kept="weighted", input_by="")
    by_unpermute = "" if has_bias or spec.weights_on == "inputs" else GATHERED
    return into, replace(out, input_kept="experts.out", input_by=gate, gradient_by=by_unpermute)


def _routed(linear: Linear, spec: MoeSpec, name: str, dense_name: str) -> Linear:
    """A feed-forward layer's product as one of all experts, shared out over etp where that one is over tp. `name`: of
    the experts' module; `dense_name`: of the feed-forward layer's elsewhere."""
    return replace(
        linear,
        inputs=_over_etp(linear.inputs),
        outputs=tuple(_over_etp(width) for width in linear.outputs),
        tokens="routed",
        n_experts=spec.n_experts,
        active_experts=spec.top_k,
        dense_name=dense_name + linear.name.removeprefix(name),
    )


def _over_etp(width: Width) -> Width:
    if width.over == "none":
        return width
    return replace(width, over="etp")


def shared_facts(spec: MoeSpec, mlp: MlpSpec, place: ExpertsPlace) -> PartFacts | None:
    """Experts that every token takes, as one feed-forward layer; None: there are none. Module name: moe.shared."""
    if spec.d_shared is None:
        return None
    # they run while tokens travel, so that what makes the others again makes them again
    freed_by = ("shared_experts", "moe")
    shared = FeedForwardPlace("moe.shared", place.input_kept, "shared_experts", freed_by)
    return mlp.facts(d_model=place.d_model, d_ffn=spec.d_shared, place=shared)


def _routing(spec: MoeSpec, d_model: int, inner: Width) -> Routing:
    exchanges: set[Exchange] = set()
    if spec.router.balancing == "sinkhorn":
        exchanges.add("scores")
    if spec.capacity_factor is not None:
        exchanges.add("choices")
        if spec.drop == "probs":
            exchanges.add("choice weights")
    if {"aux", "seq_aux"} & {loss.kind for loss in spec.router.losses}:
        exchanges.add("loads")
    return Routing(
        n_experts=spec.n_experts,
        top_k=spec.top_k,
        d_model=d_model,
        rows=lambda tokens, micro_batch: spec.rows(tokens, micro_batch=micro_batch),
        exchanges=frozenset(exchanges),
        has_shared=spec.d_shared is not None,
        gates_shared=spec.shared_gate,
        expert_width=inner,
    )


def _kept(spec: MoeSpec, into: Linear, out: Linear, place: ExpertsPlace, execution: Execution) -> Iterator[Kept]:
    """Scores, choices, the rows that arrive, and what the experts' activation takes and gives."""
    by_moe = ("moe",)
    # scores before and after the softmax
    yield Kept("router.scores", (features(spec.n_experts),), "stream", "wide", by_moe, times=2)
    yield Kept("router.weights", (features(spec.top_k),), "stream", "wide", by_moe)
    yield Kept("router.choices", (features(spec.top_k),), "stream", "index", by_moe)
    # weights on the inputs are multiplied with them
    for_weights = spec.weights_on != "inputs"
    yield Kept(
        "dispatched", (features(place.d_model),), "routed", "product", by_moe, is_routed=True, for_weights=for_weights
    )
    if spec.weights_on == "inputs":
        yield Kept("weighted", (features(place.d_model),), "routed", "product", by_moe, for_weights=True)
    # their activation is one operation, which keeps what goes in alone
    yield Kept("experts.in", into.outputs, "routed", freed_by=by_moe)
    yield Kept("experts.out", (out.inputs,), "routed", "product", ("activation", *by_moe), for_weights=True)
    if spec.shared_gate:
        # the gate of each token, and what it multiplies
        yield Kept("shared_gate", (features(1), features(place.d_model)), "stream", freed_by=by_moe)
    if place.dropout:
        yield Kept("moe.dropout", (features(place.d_model),), "stream", "byte", by_moe)
