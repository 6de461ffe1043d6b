"""What ranks send once the micro batches of a step are done, or beside their last passes: gradients and weights among
data-parallel ranks, sums of what each rank knows in part, Muon's matrices, and numbers of the step.

Sizes are bytes of the whole tensor (see Collective.bytes):
    P       weights of one rank, with what pads the buffers that they lie in
    e       bytes of a number in the model's format     LayerRun.width
    g       bytes of a gradient on its way              gradient_width
    w       bytes of a number in at least fp32          LayerRun.wide
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from megaspec.core.axes import DENSE_AXES
from megaspec.core.part_facts import Linear
from megaspec.estimate.buckets import Buckets, StageBuckets, stage_buckets
from megaspec.estimate.formula import sharing_ranks
from megaspec.estimate.layer_run import layer_run
from megaspec.estimate.muon_matrices import hidden_parameters, working_width
from megaspec.estimate.parameters import holds_embedding, holds_head, partial_gradients
from megaspec.estimate.schedule import catch_ups, shape_of
from megaspec.estimate.topology import Collective, CollectiveKind, Phase, Topology
from megaspec.estimate.trained import facts_of, gathers_fp8
from megaspec.optim.spec import MuonSpec
from megaspec.parallelism.stages import Chunk, stages_of
from megaspec.precision.spec import fp8_recipe, model_format
from megaspec.recipe import Recipe

LAYERS = "layers' gradients"
"""Reduced less often than the rest where weight gradients are deferred."""
HEAD = "output head's weights"
"""Gathered once where all forward passes come first."""
WHOLE = "whole weights' gradients"
COPIES = "shared heads' gradients"
TIED = "tied embedding"
"""WHOLE, COPIES and TIED are what is added up of the gradients that a rank holds at the end of a step."""
_DENSE = "gradients"
_EXPERT = "experts' gradients"

# Ranks of one pipeline stage, and of them those that see other tokens.
_STAGE_AXES = ("dp_replicate", "dp_shard", "cp", "tp")
# Bytes of a number in fp64, and of the step's flags and counts: int64.
_FP64 = 8
_INDEX = 8


def step_collectives(recipe: Recipe, topology: Topology, rank: int) -> Iterator[Collective]:
    """Gradients and weights among data-parallel ranks, and the small sums of a step."""
    yield from _data_parallel(recipe, topology, rank)
    yield from _partial_sums(recipe, topology, rank)
    yield from _tied_table(recipe, topology, rank)
    if isinstance(recipe.optim, MuonSpec):
        yield from _muon_matrices(recipe, topology, rank)
    yield from _router_statistics(recipe, topology, rank)
    yield from _largest_weights(recipe, topology, rank)
    yield from _largest_of_the_step(recipe, topology, rank)
    yield from _numbers_of_the_step(recipe, topology)


def gradient_width(recipe: Recipe) -> int:
    """Bytes of a gradient on its way between data-parallel ranks."""
    if model_format(recipe.precision) == "fp64":
        return 8
    if recipe.parallelism.grad_reduce == "bf16":
        return 2
    return 4


@dataclass(frozen=True)
class _ReducedWeights:
    """Weights of a rank whose gradients are reduced together."""

    what: str
    parameters: int
    times: int
    """How often in a step, by zero2 and fsdp."""
    is_again: bool = False
    """They are counted elsewhere, too."""


@dataclass
class _RankReductions:
    """All weights of a rank: experts are reduced over other ranks than the rest."""

    dense: list[_ReducedWeights] = field(default_factory=list)
    expert: list[_ReducedWeights] = field(default_factory=list)


@dataclass(frozen=True)
class _GatheredLess:
    """Weights of a rank that fsdp does not gather for every pass of every micro batch."""

    once: int = 0
    """That the backward pass does not gather again."""
    at_head: int = 0
    """Of `once`, those of the output head and the norm before it."""


@dataclass(frozen=True)
class _SharedWeights:
    """Weights of a rank, of the dense grid or of the experts'."""

    trained: int
    trained_share: int
    """Of them, those that this rank updates."""
    held: int
    passed_over: int
    """In layers to which no backward pass comes."""
    in_fp8: int
    """Of `held`, those that are gathered in fp8."""
    in_fp8_backward: int
    """Of them, those in layers to which a backward pass comes."""
    gathered_less: _GatheredLess


def _data_parallel(recipe: Recipe, topology: Topology, rank: int) -> Iterator[Collective]:
    """Gradients [P] of dense weights and of experts, and the weights themselves where they are shared out:
    data-parallel ranks see different sequences and update the same weights."""
    parallelism = recipe.parallelism
    chunks = stages_of(recipe.model.n_layers, parallelism)[rank]
    buckets = stage_buckets(recipe, chunks)
    trained = buckets.all.trained
    reductions = _reductions(recipe, rank, chunks, buckets)
    passed_over = _never_backward(buckets)
    narrow = buckets.all.in_fp8.whole
    again = buckets.all.in_fp8.without(passed_over).whole
    dense = _SharedWeights(
        trained=trained.whole.dense,
        trained_share=trained.shards.dense,
        held=buckets.all.whole.dense,
        passed_over=passed_over.whole.dense,
        in_fp8=narrow.dense,
        in_fp8_backward=again.dense,
        gathered_less=_GatheredLess(buckets.of_one_end.whole.dense, buckets.head.whole.dense),
    )
    expert = _SharedWeights(
        trained=trained.whole.expert,
        trained_share=trained.shards.expert,
        held=buckets.all.whole.expert,
        passed_over=passed_over.whole.expert,
        in_fp8=narrow.expert,
        in_fp8_backward=again.expert,
        gathered_less=_GatheredLess(),
    )
    replicas = ()
    if parallelism.dp_replicate > 1:
        replicas = ("dp_replicate",)
    yield from _reduced_and_gathered(recipe, topology, _DENSE, reductions.dense, ("dp_shard", "cp"), replicas, dense)
    if parallelism.dp_strategy == "replicate":
        # what is not shared out is summed over all of edp at once
        yield from _reduced_and_gathered(recipe, topology, _EXPERT, reductions.expert, ("edp",), (), expert)
        return
    # shares of experts lie inside a replica, as all others do
    inside = replace(topology, expert=topology.expert | {"edp": sharing_ranks(parallelism).expert})
    yield from _reduced_and_gathered(recipe, inside, _EXPERT, reductions.expert, ("edp",), replicas, expert)


def _reductions(recipe: Recipe, rank: int, chunks: tuple[Chunk, ...], buckets: StageBuckets) -> _RankReductions:
    """Of a rank's weights. Gradients of a layer wait while others of it are deferred; a tied table whose ends are two
    chunks of a rank is reduced for each."""
    parallelism = recipe.parallelism
    shape = shape_of(recipe)
    micro_batches = shape.micro_batches
    count = buckets.all.trained.whole
    if parallelism.dp_strategy not in ("zero2", "fsdp", "hsdp") or not shape.splits_backward:
        return _RankReductions(
            dense=[_ReducedWeights(_DENSE, count.dense, micro_batches)],
            expert=[_ReducedWeights(_EXPERT, count.expert, micro_batches)],
        )
    found = _RankReductions()
    # what is left are the weights of the model's ends
    ends = count.dense
    for chunk, times in zip(buckets.chunks, catch_ups(shape, rank), strict=True):
        layers = chunk.trained.whole
        found.dense.append(_ReducedWeights(LAYERS, layers.dense, times))
        found.expert.append(_ReducedWeights(_EXPERT, layers.expert, times))
        ends -= layers.dense
    found.dense.append(_ReducedWeights(_DENSE, ends, micro_batches))
    if shape.pp > 1 and holds_embedding(chunks) and holds_head(chunks):
        # a tied table
        of_both = buckets.of_both_ends.trained.whole.dense
        found.dense.append(_ReducedWeights(_DENSE, of_both, micro_batches, is_again=True))
    return found


def _reduced_and_gathered(
    recipe: Recipe,
    topology: Topology,
    what: str,
    reductions: list[_ReducedWeights],
    shards: tuple[str, ...],
    replicas: tuple[str, ...],
    shared: _SharedWeights,
) -> Iterator[Collective]:
    """What a strategy sends of gradients [P] and weights [P]. zero2 and fsdp hold no whole gradient between micro
    batches, and fsdp no whole weight, but of `gathered_less.once` from the forward to the backward pass. What
    is frozen has no gradient, and is gathered by fsdp alone, which shares it out too."""
    strategy = recipe.parallelism.dp_strategy
    overlap = recipe.parallelism.overlap
    # the bytes of a gradient, g
    wide = gradient_width(recipe)
    parameters = shared.trained

    # the bytes of a weight, e
    width = layer_run(recipe).width

    def reduce(name: str, kind: CollectiveKind, axes: tuple[str, ...], size: float, times: int) -> Iterator[Collective]:
        return topology.make(name, kind, axes, size, times, phase="backward", overlapped=overlap.grad_reduce)

    def gather(name: str, weights: int, times: int, phase: Phase, *, in_fp8: int = 0) -> Iterator[Collective]:
        size = width * (weights - in_fp8) + in_fp8
        return topology.make(name, "all_gather", shards, size, times, phase=phase, overlapped=overlap.param_gather)

    if strategy == "replicate":
        yield from reduce(what, "all_reduce", (*replicas, *shards), wide * parameters, 1)
        return
    for part in reductions:
        # zero1 adds up whole gradients over micro batches first
        times = 1
        if strategy != "zero1":
            times = part.times
        yield from reduce(part.what, "reduce_scatter", shards, wide * part.parameters, times)
    # replicas of a shard add up theirs
    yield from reduce(what, "all_reduce", replicas, wide * shared.trained_share, 1)

    weights = what.replace("gradients", "weights")
    if strategy not in ("fsdp", "hsdp"):
        # updated weights, for the next step
        yield from gather(weights, parameters, 1, "forward")
        return
    micro_batches = shape_of(recipe).micro_batches
    # all forward passes come before the first backward pass, which lets the output head's go
    once = 0
    if micro_batches > 1 and recipe.parallelism.pipeline.schedule == "gpipe":
        once = shared.gathered_less.at_head
    yield from gather(weights, shared.held - once, micro_batches, "forward", in_fp8=shared.in_fp8)
    yield from gather(HEAD, once, 1, "forward")
    again = shared.held - shared.gathered_less.once - shared.passed_over
    yield from gather(weights, again, micro_batches, "backward", in_fp8=shared.in_fp8_backward)


def _never_backward(buckets: StageBuckets) -> Buckets:
    """Those of layers to which no backward pass comes, since nothing is trained in them and before them."""
    found = set()
    for layers, of_unit in buckets.units.items():
        if not any(layer.runs_backward for layer in layers):
            found |= of_unit.counts.keys()
    return buckets.all.within(found)


def _update_shards(recipe: Recipe) -> int:
    """Ranks among which the update of dense weights is shared out."""
    if recipe.parallelism.dp_strategy == "replicate":
        return 1
    return sharing_ranks(recipe.parallelism).dense


def _partial_sums(recipe: Recipe, topology: Topology, rank: int) -> Iterator[Collective]:
    """Gradients over tp of weights that several tensor-parallel ranks hold, each of which has seen a part of the tokens
    or heads: norms, and key and value heads with copies."""
    parallelism = recipe.parallelism
    partial = partial_gradients(recipe, rank)
    copies = parallelism.tp // _fewest_kv_heads(recipe)
    for what, parameters, ranks in ((WHOLE, partial.over_tp, parallelism.tp), (COPIES, partial.over_copies, copies)):
        # Sums are at least fp32 on a rank, whatever is sent between those that share them out. Each rank adds up what
        # it updates: some more, some less, this much on average.
        size = layer_run(recipe).wide * parameters / _update_shards(recipe)
        for one in topology.make(what, "all_reduce", ("tp",), size, 1, phase="step"):
            yield replace(one, ranks=ranks, per_node=min(one.per_node, ranks))


def _fewest_kv_heads(recipe: Recipe) -> int:
    """Key and value heads of the layer that has fewest."""
    found = [kind.attention.n_kv_heads for kind in facts_of(recipe).kinds if kind.attention is not None]
    return min(found, default=recipe.parallelism.tp)


def _tied_table(recipe: Recipe, topology: Topology, rank: int) -> Iterator[Collective]:
    """The gradient of the table [vocabulary / tp, D] between the first and the last stage, which both hold it: the
    embedding's and the output head's parts are one weight's."""
    facts = facts_of(recipe)
    parallelism = recipe.parallelism
    # a V has both ends on one rank
    ends_apart = parallelism.pp > 1 and parallelism.pipeline.schedule != "zb_v"
    if not facts.is_tied or facts.embedding_table.is_frozen or not ends_apart or rank not in (0, parallelism.pp - 1):
        return
    size = facts.table_on(tp=parallelism.tp) * layer_run(recipe).wide / _update_shards(recipe)
    for one in topology.make(TIED, "all_reduce", ("pp",), size, 1, phase="step"):
        yield replace(one, ranks=2)


def _muon_matrices(recipe: Recipe, topology: Topology, rank: int) -> Iterator[Collective]:
    """Parts of the momentum to each hidden matrix's owner, which needs it whole to orthogonalise it, and parts of its
    step to everyone who holds some of the matrix.

    As if owners were drawn by lot: the runtime gives a matrix rather to a rank that holds much of it.
    """
    parallelism = recipe.parallelism
    held = hidden_parameters(recipe, stages_of(recipe.model.n_layers, parallelism)[rank])
    ranks = topology.grid_of(_STAGE_AXES).ranks(_STAGE_AXES)
    dense_shards = 1
    expert_shards = 1
    if parallelism.dp_strategy != "replicate":
        sharing = sharing_ranks(parallelism)
        dense_shards = sharing.dense
        expert_shards = sharing.expert
    # numbers of a rank
    momentum = 0.0
    steps = 0.0
    for weights, split, shards in (
        (held.dense, parallelism.tp, dense_shards),
        (held.expert, parallelism.ep * parallelism.etp, expert_shards),
    ):
        # an element comes from one of the split · shards ranks that hold it, unless the owner is one of them
        momentum += weights * split / max(1, ranks - 1) * (1 - 1 / (split * shards))
        steps += weights / shards
    width = working_width(recipe)
    yield from topology.make("momentum", "all_to_all", _STAGE_AXES, width * momentum, 1, phase="step")
    yield from topology.make("matrices' steps", "all_to_all", _STAGE_AXES, width * steps, 1, phase="step")


def _router_statistics(recipe: Recipe, topology: Topology, rank: int) -> Iterator[Collective]:
    """nn/moe/router.py's StepSums of every layer with experts, which each rank has of its own tokens: three numbers of
    each expert and six of the layer, in fp64."""
    facts = facts_of(recipe)
    numbers = 0
    for chunk in stages_of(recipe.model.n_layers, recipe.parallelism)[rank]:
        for layer in chunk.layers:
            routing = facts.layers[layer].routing
            if routing is not None:
                numbers += 3 * routing.n_experts + 6
    yield from topology.make("experts' statistics", "all_reduce", _STAGE_AXES, _FP64 * numbers, 1, phase="step")


def _largest_weights(recipe: Recipe, topology: Topology, rank: int) -> Iterator[Collective]:
    """The largest element of each weight that is gathered in fp8, of experts one for each."""
    if not gathers_fp8(recipe):
        return
    numbers = sum(linear.n_experts for linear in _linears_in_fp8(recipe, rank))
    size = layer_run(recipe).wide * numbers
    yield from topology.make("largest weights", "all_reduce", _STAGE_AXES, size, 1, phase="step")


def _largest_of_the_step(recipe: Recipe, topology: Topology, rank: int) -> Iterator[Collective]:
    """What delayed scales are made of: the largest input and the largest gradient of each layer; and how many elements
    saturated, which Transformer Engine does not count."""
    if fp8_recipe(recipe.precision) != "delayed":
        return
    what = "largest elements"
    numbers = 2 * len(_linears_in_fp8(recipe, rank))
    yield from topology.make(what, "all_reduce", _STAGE_AXES, layer_run(recipe).wide * numbers, 1, phase="step")
    if recipe.kernels.linear != "te":
        yield from topology.make(what, "all_reduce", DENSE_AXES, _INDEX, 1, phase="step")


def _linears_in_fp8(recipe: Recipe, rank: int) -> list[Linear]:
    """Those of a pipeline rank."""
    found = []
    for chunk in stages_of(recipe.model.n_layers, recipe.parallelism)[rank]:
        for number in chunk.layers:
            layer = facts_of(recipe).layers[number]
            if layer.in_fp8:
                found += [linear for linear in layer.linears if linear.takes_fp8]
    return found


def _numbers_of_the_step(recipe: Recipe, topology: Topology) -> Iterator[Collective]:
    """Scalars that each rank knows in part: the gradient's norm with what ranks agree on beside it, the loss, tokens
    and the ranks that want to stop."""
    what = "norm, loss, tokens"
    # tensor-parallel ranks have the same loss
    loss_axes = tuple(axis for axis in DENSE_AXES if axis != "tp")
    # whether its loss is finite and within its limit, whether its memory and computation are in order (runtime/step.py)
    beside_norm = 4
    yield from topology.make(what, "all_reduce", DENSE_AXES, (1 + beside_norm) * _FP64, 1, phase="step")
    yield from topology.make(what, "all_reduce", loss_axes, layer_run(recipe).wide, 1, phase="step")
    yield from topology.make(what, "all_reduce", DENSE_AXES, 3 * _INDEX, 1, phase="step")
