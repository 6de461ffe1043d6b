"""Every collective of a training step: what it carries, over which ranks, on which link.

Counted for one rank. `bytes` is the size of the whole tensor: what an all-reduce sums, what a gather puts together and
a reduce-scatter takes apart, what a rank gives away in an all-to-all or sends.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from megaspec.core.axes import DENSE_AXES, EXPERT_AXES, expert_degrees, world_size
from megaspec.estimate.formula import sharing_ranks
from megaspec.estimate.hardware import Hardware
from megaspec.estimate.hidden import hidden_parameters, working_width
from megaspec.estimate.parameters import (
    RankParameters,
    layer_parameters,
    partial_gradients,
    rank_parameters,
    table_parameters,
)
from megaspec.estimate.schedule import catch_ups, shape_of
from megaspec.estimate.share import share_of
from megaspec.estimate.work import recomputed_layers
from megaspec.model.gpt.spec import GptSpec
from megaspec.model.kinds import has_experts
from megaspec.optim.spec import MuonSpec
from megaspec.parallelism.passes import Shape, stage_number
from megaspec.parallelism.stages import Chunk, stages_of
from megaspec.recipe import Recipe

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]
Phase = Literal["forward", "backward", "step"]

LAYERS = "layers' gradients"
"""Reduced less often than the rest where weight gradients are deferred."""
HEAD = "output head's weights"
"""Gathered once where all forward passes come first."""
WHOLE, COPIES, TIED = "whole weights' gradients", "shared heads' gradients", "tied embedding"
"""What is added up of the gradients that a rank holds at the end of a step."""


@dataclass(frozen=True)
class Collective:
    """One kind of message, `times` of it in a step."""

    what: str
    kind: Kind
    group: str
    """The axes that it spans."""
    ranks: int
    bytes: int
    times: int
    within_node: bool
    per_node: int
    """Its ranks in one node."""
    hidden: bool
    """It can run beside arithmetic."""
    phase: Phase
    """What it runs in or beside; step: after the last micro batch."""
    last: bool = False
    """Of a layer, which keeps nothing of what comes after it: where plain operations run again, they end before it."""

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in a step."""
        share = {"all_reduce": 2 * (self.ranks - 1) / self.ranks, "p2p": 1.0}
        return share.get(self.kind, (self.ranks - 1) / self.ranks) * self.bytes * self.times


@dataclass(frozen=True)
class Topology:
    """Both grids over the ranks, and where node borders lie."""

    dense: dict[str, int]
    expert: dict[str, int]
    node: int

    @property
    def world(self) -> int:
        return world_size(self.dense)

    def within_node(self, spanned: tuple[str, ...]) -> bool:
        """Every group along these axes (of one grid) lies in one node."""
        axes, sizes = (DENSE_AXES, self.dense) if set(spanned) <= set(DENSE_AXES) else (EXPERT_AXES, self.expert)
        real = [axis for axis in spanned if sizes[axis] > 1]
        if not real or self.world <= self.node:
            return True
        block = prod(sizes[axis] for axis in axes[min(axes.index(axis) for axis in real) :])
        return self.node % block == 0

    def per_node(self, spanned: tuple[str, ...]) -> int:
        """Ranks of one group along these axes that share a node."""
        axes, sizes = (DENSE_AXES, self.dense) if set(spanned) <= set(DENSE_AXES) else (EXPERT_AXES, self.expert)
        stride, found = 1, 1
        for axis in reversed(axes):
            if axis in spanned:
                found *= min(sizes[axis], max(1, self.node // stride))
            stride *= sizes[axis]
        return found

    def make(
        self, what: str, kind: Kind, spanned: tuple[str, ...], size: float, times: int, *, hidden: bool, phase: Phase
    ) -> Iterator[Collective]:
        """The collective; none where the axes hold one rank or nothing is sent."""
        sizes = self.dense if set(spanned) <= set(DENSE_AXES) else self.expert
        ranks = prod(sizes[axis] for axis in spanned)
        if ranks > 1 and size > 0 and times > 0:
            group = "·".join(axis for axis in spanned if sizes[axis] > 1)
            within, per_node = self.within_node(spanned), self.per_node(spanned)
            yield Collective(what, kind, group, ranks, round(size), times, within, per_node, hidden, phase)


def topology_of(recipe: Recipe, hardware: Hardware | None) -> Topology:
    """The grids of a filled recipe. Without hardware all ranks lie in one node."""
    own = recipe.parallelism
    dense = own.degrees
    node = hardware.node_size if hardware else world_size(dense)
    return Topology(dense, expert_degrees(dense, ep=own.ep, etp=own.etp), node)


def collectives_of(recipe: Recipe, hardware: Hardware | None, rank: int | None = None) -> tuple[Collective, ...]:
    """All collectives of a step of one pipeline rank; None: of the one that sends most."""
    pp = recipe.parallelism.pp
    ranks = sorted({0, pp // 2, pp - 1}) if rank is None else [rank]
    return max((_of_rank(recipe, hardware, r) for r in ranks), key=lambda all_: sum(c.sent for c in all_))


def _of_rank(recipe: Recipe, hardware: Hardware | None, rank: int) -> tuple[Collective, ...]:
    topology, shape = topology_of(recipe, hardware), shape_of(recipe)
    chunks = stages_of(recipe.model.n_layers, recipe.parallelism)[rank]
    found: dict[Collective, int] = {}
    for chunk in chunks:
        for one in chunk_collectives(recipe, topology, chunk):
            key = replace(one, times=1)
            found[key] = found.get(key, 0) + one.times * shape.micro_batches
    for one in (
        *transfers(recipe, topology, shape, rank),
        *step_collectives(recipe, topology, rank, rank_parameters(recipe, rank)),
    ):
        key = replace(one, times=1)
        found[key] = found.get(key, 0) + one.times
    return tuple(replace(one, times=times) for one, times in found.items())


def chunk_collectives(recipe: Recipe, topology: Topology, chunk: Chunk) -> Iterator[Collective]:
    """Of one micro batch through one chunk."""
    own, experts = recipe.parallelism.recompute, has_experts(recipe.model)
    again = chunk.layers[: recomputed_layers(recipe, len(chunk.layers))]
    together = 1 if own.method == "block" else own.layers or 1
    # of layers that run again together, the last one ends with the last tensor that is missing
    ends = (*again[together - 1 :: together], *(again[-1:] if len(again) % together else ()))
    for with_experts in (False, True):
        layers, repeated, early = (
            sum(experts[layer] == with_experts for layer in some) for some in (chunk.layers, again, ends)
        )
        if not layers:
            continue
        for one in layer_collectives(recipe, topology, with_experts=with_experts):
            yield replace(one, times=one.times * layers, last=False)
            times = one.times * (repeated - one.last * early)
            if one.phase == "forward" and times:
                yield replace(one, times=times, phase="backward", last=False)
    yield from end_collectives(recipe, topology, embedding=chunk.embedding, head=chunk.head)


def layer_collectives(recipe: Recipe, topology: Topology, *, with_experts: bool) -> Iterator[Collective]:
    """Of one micro batch through one layer."""
    again, own, drops_out = share_of(recipe).recomputed_parts, recipe.parallelism, recipe.model.dropout > 0
    # a compiled block runs again as a whole, and dropout behind it keeps its mask
    ends = not drops_out and recipe.kernels.compile != "block"
    yield from _tensor(recipe, topology, "attention")
    for one in _context(recipe, topology):
        yield one
        if one.phase == "forward" and "core_attention" in again:
            yield replace(one, phase="backward")
    if not with_experts:
        yield from _tensor(recipe, topology, "feed-forward", again="mlp" in again, output_again=drops_out, last=ends)
        return
    moe, whole = recipe.model.moe, "moe" in again
    for one in _routing(recipe, topology):
        yield one
        if whole:
            yield replace(one, phase="backward")
    # shared experts come before the way back where they run beside the way there
    shared_last = bool(moe.d_shared) and (not own.overlap.shared_experts or own.ep * own.etp == 1)
    yield from _dispatch(recipe, topology, again=whole, last=not (drops_out or shared_last))
    if moe.d_shared:
        # the gate keeps their output
        last = shared_last and ends and not moe.shared_gate
        output_again = drops_out or (whole and not last)
        run_again = whole or "shared_experts" in again
        yield from _tensor(recipe, topology, "shared experts", again=run_again, output_again=output_again, last=last)


def _tensor(
    recipe: Recipe,
    topology: Topology,
    what: str,
    *,
    again: bool = False,
    output_again: bool = False,
    last: bool = False,
) -> Iterator[Collective]:
    """Around a pair of matrix products that split columns, then rows. The backward pass gathers the input of the first
    once more for its weight gradient, unless a compiled block keeps it; it reduces the gradient of that input beside
    the weight gradient. `again`: the pair runs again, and `output_again` with the sum of its output; `last`: see
    Collective."""
    share, beside = share_of(recipe), recipe.parallelism.overlap.tp
    size = share.tokens * recipe.model.d_model * share.width
    sums_again = int(again and output_again)

    def make(kind: Kind, times: int, phase: Phase, *, hidden: bool = False) -> Iterator[Collective]:
        return topology.make(what, kind, ("tp",), size, times, hidden=hidden, phase=phase)

    if not recipe.parallelism.sequence_parallel:
        yield from _marked(make("all_reduce", 1, "forward"), last=last)
        yield from make("all_reduce", sums_again, "backward")
        yield from make("all_reduce", 1, "backward", hidden=beside)
        return
    yield from make("all_gather", 1, "forward")
    yield from _marked(make("reduce_scatter", 1, "forward"), last=last)
    yield from make("all_gather", (1 if recipe.kernels.compile == "block" else 2) + again, "backward")
    yield from make("reduce_scatter", sums_again, "backward")
    yield from make("reduce_scatter", 1, "backward", hidden=beside)


def _marked(found: Iterator[Collective], *, last: bool) -> Iterator[Collective]:
    return (replace(one, last=last) for one in found)


def _context(recipe: Recipe, topology: Topology) -> Iterator[Collective]:
    """Keys and values, or heads against tokens, among the ranks that share a sequence."""
    own, share = recipe.parallelism, share_of(recipe)
    kv = share.tokens * share.kv_size * share.width
    # their gradients are summed in at least fp32
    grad_kv = share.tokens * share.kv_size * max(4, share.width)
    outward = share.tokens * (share.q_size + share.v_size) * share.width
    what = "context"
    if own.cp == 1:
        return
    if own.context.kind == "all_gather":
        yield from topology.make(what, "all_gather", ("cp",), kv * own.cp, 1, hidden=False, phase="forward")
        yield from topology.make(what, "all_gather", ("cp",), kv * own.cp, 1, hidden=False, phase="backward")
        yield from topology.make(what, "reduce_scatter", ("cp",), grad_kv * own.cp, 1, hidden=False, phase="backward")
        return
    swapped, ring = {"ring": (1, own.cp), "all_to_all": (own.cp, 1)}.get(
        own.context.kind, own.context.factors or (1, 1)
    )
    if swapped > 1:
        # q, k and v to whole sequences of fewer heads, the output back; the gradients the other way
        for phase in ("forward", "backward"):
            for one in topology.make(what, "all_to_all", ("cp",), (kv + outward) / 2, 2, hidden=False, phase=phase):
                yield replace(one, ranks=swapped)
    if ring > 1:
        # keys and values go round; in the backward pass their gradients with them
        for phase, size in (("forward", kv), ("backward", kv + grad_kv)):
            yield from topology.make(what, "p2p", ("cp",), size, ring - 1, hidden=True, phase=phase)


def _dispatch(recipe: Recipe, topology: Topology, *, again: bool, last: bool) -> Iterator[Collective]:
    """Tokens to their experts and back: the way there, and its gradients' way, beside the shared experts. With them
    go the weights that they have for their experts, with a gather the experts' numbers. `again`: all of it runs again,
    but for a way back that is the `last` (see Collective)."""
    share, own, moe = share_of(recipe), recipe.parallelism, recipe.model.moe
    row, weight = recipe.model.d_model * share.width, max(4, share.width)
    beside = bool(moe.d_shared) and own.overlap.shared_experts
    back_again = int(again and not last)

    def make(kind: Kind, size: float, times: int, phase: Phase, *, hidden: bool = False) -> Iterator[Collective]:
        return topology.make("experts' tokens", kind, ("ep", "etp"), size, times, hidden=hidden, phase=phase)

    if own.dispatch == "all_gather":
        tokens = share.split_tokens * own.ep * own.etp
        for phase, count in (("forward", 1), ("backward", int(again))):
            yield from make("all_gather", tokens * row, count, phase, hidden=beside)
            yield from make("all_gather", tokens * moe.top_k * (weight + 8), count, phase)
        yield from _marked(make("reduce_scatter", tokens * row, 1, "forward"), last=last)
        yield from make("reduce_scatter", tokens * row, back_again, "backward")
        yield from make("all_gather", tokens * row, 1, "backward")
        yield from make("reduce_scatter", tokens * row, 1, "backward", hidden=beside)
        yield from make("reduce_scatter", tokens * moe.top_k * weight, 1, "backward")
        return
    for phase, there, back in (("forward", 1, 1), ("backward", 1 + again, 1 + back_again)):
        yield from make("all_to_all", share.expert_tokens * row, there, phase, hidden=beside)
        yield from _marked(make("all_to_all", share.expert_tokens * row, back, phase), last=last and phase == "forward")
        yield from make("all_to_all", share.expert_tokens * weight, there, phase)


def _routing(recipe: Recipe, topology: Topology) -> Iterator[Collective]:
    """What routers tell each other where sequences are split: all scores under sinkhorn, how often each expert was
    chosen for a balancing loss, and who chose it with what weight where experts drop tokens."""
    moe, train = recipe.model.moe, recipe.train
    tokens, wide = train.micro_batch * recipe.data.seq_len, share_of(recipe).wide

    def make(what: str, kind: Kind, size: int) -> Iterator[Collective]:
        return topology.make(what, kind, ("cp", "tp"), size, 1, hidden=False, phase="forward")

    if moe.router.balancing == "sinkhorn":
        yield from make("experts' scores", "all_gather", tokens * moe.n_experts * wide)
    if moe.capacity_factor is not None:
        yield from make("experts' choices", "all_gather", tokens * moe.top_k * 8)
        yield from make("experts' choices", "all_gather", tokens * moe.top_k * wide * (moe.drop == "probs"))
    if {"aux", "seq_aux"} & {loss.kind for loss in moe.router.losses}:
        yield from make("experts' loads", "all_reduce", train.micro_batch * moe.n_experts * 8)


def end_collectives(recipe: Recipe, topology: Topology, *, embedding: bool, head: bool) -> Iterator[Collective]:
    """The embedding and the head, whose vocabulary is split over tp."""
    share = share_of(recipe)
    size = share.tokens * recipe.model.d_model * share.width
    splits = recipe.parallelism.sequence_parallel
    if embedding:
        kind = "reduce_scatter" if splits else "all_reduce"
        yield from topology.make("embedding", kind, ("tp",), size, 1, hidden=False, phase="forward")
        if splits:
            yield from topology.make("embedding", "all_gather", ("tp",), size, 1, hidden=False, phase="backward")
    if head:
        if splits:
            yield from topology.make("output head", "all_gather", ("tp",), size, 1, hidden=False, phase="forward")
        kind = "reduce_scatter" if splits else "all_reduce"
        yield from topology.make("output head", kind, ("tp",), size, 1, hidden=False, phase="backward")
        # the largest logit, the sum of exponentials and the target's logit of each token
        wide = max(4, share.width)
        yield from topology.make("loss", "all_reduce", ("tp",), wide * share.tokens, 3, hidden=False, phase="forward")


def transfers(recipe: Recipe, topology: Topology, shape: Shape, rank: int) -> Iterator[Collective]:
    """Activations and their gradients to the neighbouring stages."""
    share, pp = share_of(recipe), shape.pp
    last = pp * shape.virtual - 1
    place = {stage_number(r, c, pp=pp, is_v=shape.is_v): r for r in range(pp) for c in range(shape.virtual)}
    own = [stage_number(rank, c, pp=pp, is_v=shape.is_v) for c in range(shape.virtual)]
    size = share.split_tokens * recipe.model.d_model * share.width
    hidden = shape.virtual > 1 and recipe.parallelism.overlap.p2p
    for phase, step in (("forward", 1), ("backward", -1)):
        sends = sum(0 <= s + step <= last and place[s + step] != rank for s in own)
        yield from topology.make(
            "stages", "p2p", ("pp",), size, sends * shape.micro_batches, hidden=hidden, phase=phase
        )


def transfer_of(recipe: Recipe, topology: Topology) -> Collective | None:
    """One micro batch from a stage to the next; None with one stage."""
    share = share_of(recipe)
    size = share.split_tokens * recipe.model.d_model * share.width
    return next(topology.make("stages", "p2p", ("pp",), size, 1, hidden=False, phase="forward"), None)


def step_collectives(recipe: Recipe, topology: Topology, rank: int, count: RankParameters) -> Iterator[Collective]:
    """Gradients and weights among data-parallel ranks, and the small sums of a step. `count`: what the rank holds."""
    own, model = recipe.parallelism, recipe.model
    replicas = ("dp_replicate",) if own.dp_replicate > 1 else ()
    once, dense = _gathered_once(recipe, rank), ("dp_shard", "cp")
    parts = _reduced(recipe, rank, count)
    at_head = _at_head(recipe, rank)
    yield from _shared_out(
        recipe, topology, "gradients", parts[False], dense, replicas, gathered_once=once, gathered_at_head=at_head
    )
    # shares of experts lie inside a replica, as all others do; what is not shared out is summed over all of edp at once
    shares = own.dp_strategy != "replicate"
    inside = replace(topology, expert=topology.expert | {"edp": sharing_ranks(own)[1]}) if shares else topology
    across = replicas if shares else ()
    yield from _shared_out(recipe, inside, "experts' gradients", parts[True], ("edp",), across)
    # sums are at least fp32 on a rank, whatever is sent between those that share them out
    wide = share_of(recipe).wide
    partial = partial_gradients(recipe, rank)
    # each rank adds up what it updates: some more, some less, this much on average
    among = sharing_ranks(own)[0] if shares else 1
    for what, parameters, ranks in (
        (WHOLE, partial.over_tp, own.tp),
        (COPIES, partial.over_copies, own.tp // model.n_kv_heads),
    ):
        size = wide * parameters / among
        for one in topology.make(what, "all_reduce", ("tp",), size, 1, hidden=False, phase="step"):
            yield replace(one, ranks=ranks, per_node=min(one.per_node, ranks))
    if model.tied_embeddings and own.pp > 1 and rank in (0, own.pp - 1) and own.pipeline.schedule != "zb_v":
        table = share_of(recipe).vocab * model.d_model * wide
        for one in topology.make(TIED, "all_reduce", ("pp",), table / among, 1, hidden=False, phase="step"):
            yield replace(one, ranks=2)
    if isinstance(recipe.optim, MuonSpec):
        yield from _whole_matrices(recipe, topology, rank)
    yield from _router_statistics(recipe, topology, rank)
    every = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    # tensor-parallel ranks have the same loss; tokens are counted beside the ranks that want to stop
    for axes, size in ((every, 8), (every[:-1], share_of(recipe).wide), (every, 16)):
        yield from topology.make("norm, loss, tokens", "all_reduce", axes, size, 1, hidden=False, phase="step")


def _router_statistics(recipe: Recipe, topology: Topology, rank: int) -> Iterator[Collective]:
    """nn/router.py's StepSums of every layer with experts."""
    experts = has_experts(recipe.model)
    chunks = stages_of(recipe.model.n_layers, recipe.parallelism)[rank]
    layers = sum(experts[i] for chunk in chunks for i in chunk.layers)
    if layers:
        among, size = ("dp_replicate", "dp_shard", "cp", "tp"), 8 * (3 * recipe.model.moe.n_experts + 6) * layers
        yield from topology.make("experts' statistics", "all_reduce", among, size, 1, hidden=False, phase="step")


def _whole_matrices(recipe: Recipe, topology: Topology, rank: int) -> Iterator[Collective]:
    """Parts of the momentum to each matrix's owner, and parts of its step to everyone who holds some of the matrix.

    As if owners were drawn by lot: the runtime gives a matrix rather to a rank that holds much of it.
    """
    own, axes = recipe.parallelism, ("dp_replicate", "dp_shard", "cp", "tp")
    held = hidden_parameters(recipe, stages_of(recipe.model.n_layers, own)[rank])
    ranks = prod(topology.dense[axis] for axis in axes)
    shards = sharing_ranks(own) if own.dp_strategy != "replicate" else (1, 1)
    momentum = steps = 0.0
    for weights, split, shared in ((held.dense, own.tp, shards[0]), (held.expert, own.ep * own.etp, shards[1])):
        # an element comes from one of the ranks that hold it, unless the owner is one of them
        momentum += weights * split / max(1, ranks - 1) * (1 - 1 / (split * shared))
        steps += weights / shared
    for what, size in (("momentum", momentum), ("matrices' steps", steps)):
        yield from topology.make(what, "all_to_all", axes, working_width(recipe) * size, 1, hidden=False, phase="step")


@dataclass(frozen=True)
class _Part:
    """Weights of a rank whose gradients are reduced together."""

    what: str
    parameters: int
    times: int
    """How often in a step, by zero2 and fsdp."""
    is_again: bool = False
    """They are counted in another part, too."""


def _reduced(recipe: Recipe, rank: int, count: RankParameters) -> dict[bool, list[_Part]]:
    """Parts of a rank's weights, dense ones and those of experts. Gradients of a layer wait while others of it are put
    off; a tied table whose ends are two chunks of a rank is reduced for each."""
    model, own, shape = recipe.model, recipe.parallelism, shape_of(recipe)
    chunks, m = stages_of(model.n_layers, own)[rank], shape.micro_batches
    found = {False: [_Part("gradients", count.dense, m)], True: [_Part("experts' gradients", count.expert, m)]}
    if own.dp_strategy not in ("zero2", "fsdp", "hsdp") or not shape.splits_backward:
        return found
    experts, layers = has_experts(model), {False: [], True: []}
    for chunk, times in zip(chunks, catch_ups(shape, rank), strict=True):
        held = [
            layer_parameters(model, with_experts=experts[layer], tp=own.tp, ep=own.ep, etp=own.etp)
            for layer in chunk.layers
        ]
        layers[False].append(_Part(LAYERS, sum(one.dense for one in held), times))
        layers[True].append(_Part("experts' gradients", sum(one.experts for one in held), times))
    ends = count.dense - sum(part.parameters for part in layers[False])
    layers[False].append(_Part("gradients", ends, m))
    if model.tied_embeddings and shape.pp > 1 and any(c.embedding for c in chunks) and any(c.head for c in chunks):
        layers[False].append(_Part("gradients", table_parameters(model, tp=own.tp), m, is_again=True))
    return layers


def _shared_out(
    recipe: Recipe,
    topology: Topology,
    what: str,
    parts: list[_Part],
    shards: tuple[str, ...],
    replicas: tuple[str, ...],
    *,
    gathered_once: int = 0,
    gathered_at_head: int = 0,
) -> Iterator[Collective]:
    """What a strategy sends for parts of a rank's parameters. zero2 and fsdp hold no whole gradient between micro
    batches, and fsdp no whole weight, but of `gathered_once` from the forward to the backward pass, `gathered_at_head`
    among them."""
    strategy, wide, micro_batches = (
        recipe.parallelism.dp_strategy,
        gradient_width(recipe),
        shape_of(recipe).micro_batches,
    )
    weights, overlap = what.replace("gradients", "weights"), recipe.parallelism.overlap
    parameters = sum(part.parameters for part in parts if not part.is_again)

    def make(
        name: str, kind: Kind, axes: tuple[str, ...], size: float, times: int, phase: Phase
    ) -> Iterator[Collective]:
        hidden = overlap.param_gather if kind == "all_gather" else overlap.grad_reduce
        return topology.make(name, kind, axes, size, times, hidden=hidden, phase=phase)

    if strategy == "replicate":
        yield from make(what, "all_reduce", (*replicas, *shards), wide * parameters, 1, "backward")
        return
    in_shards = max(1, prod((topology.dense | topology.expert)[axis] for axis in shards))
    for part in parts:
        often = 1 if strategy == "zero1" else part.times
        yield from make(part.what, "reduce_scatter", shards, wide * part.parameters, often, "backward")
    yield from make(what, "all_reduce", replicas, wide * parameters / in_shards, 1, "backward")
    narrow = 1 if getattr(recipe.precision, "gather_fp8", False) else share_of(recipe).width
    gathers = micro_batches if strategy in ("fsdp", "hsdp") else 1
    # all forward passes come before the first backward pass, which lets the output head's go
    once = gathered_at_head if gathers > 1 and recipe.parallelism.pipeline.schedule == "gpipe" else 0
    yield from make(weights, "all_gather", shards, narrow * (parameters - once), gathers, "forward")
    yield from make(HEAD, "all_gather", shards, narrow * once, 1, "forward")
    if strategy in ("fsdp", "hsdp"):
        again = parameters - gathered_once
        yield from make(weights, "all_gather", shards, narrow * again, gathers, "backward")


def _at_head(recipe: Recipe, rank: int) -> int:
    """Weights of the output head and the norm before it."""
    model = recipe.model
    if not any(chunk.head for chunk in stages_of(model.n_layers, recipe.parallelism)[rank]):
        return 0
    norm = model.d_model * (2 if isinstance(model, GptSpec) else 1)
    return table_parameters(model, tp=recipe.parallelism.tp) + norm


def _gathered_once(recipe: Recipe, rank: int) -> int:
    """Weights of a rank that the backward pass does not gather again: the embedding's, which it does not read, and the
    head's and the last norm's, which it takes first."""
    model, chunks = recipe.model, stages_of(recipe.model.n_layers, recipe.parallelism)[rank]
    has_positions, table = isinstance(model, GptSpec), table_parameters(model, tp=recipe.parallelism.tp)
    embedding, head = any(c.embedding for c in chunks), any(c.head for c in chunks)
    # a tied table is gathered for either end, both in the forward pass: as often as one that is gathered again
    tables = 0 if model.tied_embeddings and embedding and head else (embedding + head) * table
    positions = model.max_seq_len * model.d_model if has_positions and embedding else 0
    return tables + positions + (head * model.d_model * (2 if has_positions else 1))


def gradient_width(recipe: Recipe) -> int:
    if recipe.precision.kind == "fp64":
        return 8
    return 2 if recipe.parallelism.grad_reduce == "bf16" else 4
