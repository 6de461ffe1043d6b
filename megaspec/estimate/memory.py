"""The most memory that a rank takes in a step, by what it is for.

The peak lies in the last forward pass before a backward pass, at the output head, or in that backward pass, in its
first layer or at the embedding: everything that is kept is there at once. The optimizer's update needs less. Sizes are
counted tensor by tensor; `reserve` holds what no tensor accounts for, as measured.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from math import ceil
from typing import NamedTuple

from megaspec.core.part_facts import Execution
from megaspec.estimate.activations import LayerBytes, layer_bytes
from megaspec.estimate.buckets import StageBuckets, stage_buckets
from megaspec.estimate.exchange_memory import ExchangeMemory, StageContents
from megaspec.estimate.formula import sharing_ranks
from megaspec.estimate.layer_run import LayerRun, layer_run
from megaspec.estimate.muon_matrices import hidden_of_layer
from megaspec.estimate.parameters import holds_embedding, holds_head
from megaspec.estimate.schedule import (
    Moment,
    Moments,
    held_by_chunk,
    held_later,
    in_flight,
    messages_held,
    shape_of,
)
from megaspec.estimate.tables import tables_in_place
from megaspec.estimate.trained import facts_of
from megaspec.nn.layer.facts import LayerFacts
from megaspec.nn.model_facts import ModelFacts
from megaspec.optim.spec import AdamWSpec, MuonSpec, OptimSpec
from megaspec.parallelism.group_memory import outside_torch
from megaspec.parallelism.passes import Shape
from megaspec.parallelism.spec import ParallelismSpec, PipelineSpec, RecomputeSpec
from megaspec.parallelism.stages import stages_of
from megaspec.recipe import Recipe
from megaspec_kernels.catalog import logits_piece

# Bytes, measured on H200 with torch 2.11 and CUDA 13.
_WORKSPACE = 64 * 2**20
"""Scratch of the matrix products' library; torch counts it as allocated."""
_SLACK = 0.03
"""What the allocator holds and can't use, as a share of what is allocated; _MOST_SLACK bytes at most."""
_MOST_SLACK = 1.2e9
_INPUT = 17
"""Bytes of a token of a batch: number and label of 8, mask of 1."""
_FORMAT = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of a number of the optimizer's state."""
_ANGLE = 4
"""Bytes of a cosine or sine: fp32."""
_STRATEGY_LEVEL = {"replicate": 0, "zero1": 1, "zero2": 2, "fsdp": 3, "hsdp": 3}
"""What a strategy shares out: 1 the optimizer's states, 2 gradients too, 3 weights too."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes on a rank of one pipeline stage."""

    weights: int
    """In the model's format, copies in fp8 and tables of angles included."""
    gradients: int
    """Sums over micro batches."""
    optimizer: int
    """Master weights and moments."""
    activations: int
    """Kept for the backward pass, over all micro batches in flight, and what a layer's backward pass works with."""
    logits: int
    """What the last norm, the output head and the loss need at once."""
    expert_buffers: int
    """Tokens that experts receive and return."""
    communication: int
    """Gathered weights, gradients on their way, blocks of keys and values, what stages send."""
    reserve: int
    """Context, libraries, communicators, and what the allocator can't use. Not counted by torch."""

    @property
    def total(self) -> int:
        """What has to fit in the device."""
        return sum(getattr(self, f.name) for f in _FIELDS)

    @property
    def allocated(self) -> int:
        """What torch counts as allocated at the peak."""
        return self.total - self.reserve


_FIELDS = fields(StageMemory)


def memory_of(recipe: Recipe, *, device: str = "cuda") -> tuple[StageMemory, ...]:
    """The peak of a rank of each pipeline stage, from a filled recipe. `device`: cuda, cpu, or meta for what a GPU's
    tensors take without what its libraries do.
    """
    return tuple(_by_stage(recipe, device))


def fullest_within(recipe: Recipe, room: int) -> StageMemory | None:
    """The stage that needs most of a GPU; None once one needs more bytes than `room`: no other is weighed then."""
    found = fullest_until(recipe, room)
    return found if found.total <= room else None


def fullest_until(recipe: Recipe, room: int) -> StageMemory:
    """The stage that needs most of a GPU, or the first that needs more bytes than `room`: no other is weighed then."""
    stages = []
    for stage in _by_stage(recipe, "cuda"):
        if stage.total > room:
            return stage
        stages.append(stage)
    return fullest(stages)


def _by_stage(recipe: Recipe, device: str) -> Iterator[StageMemory]:
    """See memory_of; each is weighed when it is asked for."""
    parallelism = recipe.parallelism
    common = _CommonSizes(recipe, layer_run(recipe), facts_of(recipe), device)
    in_flight_of_stages = in_flight(recipe)
    # stages in the middle hold the same and differ in the micro batches in flight
    held_always: dict[tuple[StageContents, int], _HeldAlways] = {}
    stages = stages_of(recipe.model.n_layers, parallelism)
    for stage, contents in enumerate(_contents_of_stages(common.facts, parallelism.pp, parallelism.pipeline)):
        messages = messages_held(common.shape, stage, overlap=parallelism.overlap.p2p)
        key = (contents, messages)
        if key not in held_always:
            held_always[key] = _held_always(common, contents, messages, stage_buckets(recipe, stages[stage]))
        yield _of_stage(common, stage, in_flight_of_stages[stage], held_always[key])


class _HeldAlways(NamedTuple):
    """What does not depend on the micro batches in flight."""

    exchanges: ExchangeMemory
    weights: int
    gradients: int
    optimizer: int
    logits: int
    rounded: int
    """A bucket as it is sent, not counted by torch."""


@dataclass(frozen=True)
class _CommonSizes:
    """What all stages of a run have in common."""

    recipe: Recipe
    run: LayerRun
    facts: ModelFacts
    device: str

    @property
    def is_cuda(self) -> bool:
        """There are libraries beside torch."""
        return self.device == "cuda"

    @property
    def adds_inside(self) -> bool:
        """Matrix products add to sums in a wider format without a tensor of their own."""
        return self.device != "cpu"

    @cached_property
    def shape(self) -> Shape:
        return shape_of(self.recipe)

    @cached_property
    def table(self) -> int:
        """Weights of the embedding's table, or of the output head's, on one rank."""
        return self.facts.table_on(tp=self.run.degrees.tp)

    @property
    def trains_table(self) -> bool:
        """The embedding's table has a gradient."""
        return not self.facts.embedding_table.is_frozen

    @cached_property
    def batch_and_scratch(self) -> int:
        """Bytes of the tokens of a rank's micro batches, and of the matrix products' library."""
        tokens = self.run.tokens
        micro_batches = self.recipe.train.global_batch // _data_ranks(self.recipe) // tokens.sequences
        batch = micro_batches * tokens.sequences * tokens.seq_len // tokens.cp * _INPUT
        if self.is_cuda:
            return batch + _WORKSPACE
        return batch

    @cached_property
    def outside(self) -> int:
        """Bytes that torch does not count, whatever it allocates."""
        if not self.is_cuda:
            return 0
        return outside_torch(self.recipe.parallelism)


def _of_stage(common: _CommonSizes, stage: int, held: float, always: _HeldAlways) -> StageMemory:
    """The peak of a stage, `held` micro batches being in flight.

    What is there always and what micro batches keep is there at both moments that are compared: while the output head
    runs, with its logits, and while layers or the embedding run backward. The larger of what comes on top counts.
    """
    shape = common.shape
    exchanges = always.exchanges
    contents = exchanges.contents
    are_alike = len(set(contents.chunks)) == 1
    peak = _activations(common, contents, held_by_chunk(shape, stage, alike=are_alike))
    # bytes of gradients of the micro batch before that are still on their way
    before = exchanges.before
    gone = peak.gone
    if not shape.splits_backward:
        later = held_later(shape, stage)
        # with the backward pass before went what was kept for it
        kept = peak.kept + peak.routed
        before = max(0, before - int(kept * (held - later.behind) / held))
        gone = int(kept * (held - later.at_embedding) / held)
    at_head = exchanges.at_head()
    at_layer = exchanges.at_layer(before)
    all_forward_first = shape.schedule == "gpipe"
    if not all_forward_first:
        at_head += before
    # the head is done before the first layer runs backward
    more = max(0, peak.elsewhere + peak.in_backward + at_layer - always.logits - at_head)
    if contents.has_embedding and common.trains_table:
        # what its micro batch kept is gone, and what left before it, but for what weight gradients need that were
        # deferred
        at_table = exchanges.at_table() + _table_gradient(common) - gone
        more = max(more, peak.elsewhere + at_table - always.logits - at_head)
    # of what comes on top, messages are told apart from activations
    moving = min(more, max(0, at_layer - at_head))
    activations = peak.kept + more - moving + common.batch_and_scratch
    if all_forward_first and contents.has_head:
        activations += int((held - 1) * _head_waits(common.recipe, common.run, common.facts))
    communication = at_head + moving
    reserve = 0
    if common.is_cuda:
        allocated = always.weights + always.gradients + always.optimizer + always.logits
        allocated += activations + peak.routed + communication
        reserve = common.outside + always.rounded + int(min(_SLACK * allocated, _MOST_SLACK))
    return StageMemory(
        weights=always.weights,
        gradients=always.gradients,
        optimizer=always.optimizer,
        activations=activations,
        logits=always.logits,
        expert_buffers=peak.routed,
        communication=communication,
        reserve=reserve,
    )


def _table_gradient(common: _CommonSizes) -> int:
    """The gradient that the embedding makes of its table: whole, or where it is summed in place the rows that are added
    to the sum, in the sum's format."""
    run = common.run
    if not tables_in_place(common.recipe).embedding:
        return run.width * common.table
    if run.width == run.wide:
        return 0
    return run.wide * run.tokens.all * common.facts.d_model


def fullest(stages: Sequence[StageMemory]) -> StageMemory:
    """The stage that needs most."""
    return max(stages, key=lambda one: one.total)


@lru_cache(maxsize=4096)
def _contents_of_stages(facts: ModelFacts, pp: int, pipeline: PipelineSpec) -> tuple[StageContents, ...]:
    """Of each pipeline rank."""
    found = []
    for chunks in stages_of(len(facts.layers), ParallelismSpec(pp=pp, pipeline=pipeline)):
        layers = []
        for chunk in chunks:
            layers.append(tuple(facts.layers[number] for number in chunk.layers))
        contents = StageContents(
            chunks=tuple(layers),
            has_embedding=holds_embedding(chunks),
            has_head=holds_head(chunks),
        )
        found.append(contents)
    return tuple(found)


def _held_always(common: _CommonSizes, contents: StageContents, messages: int, buckets: StageBuckets) -> _HeldAlways:
    """`messages`: that the stage holds at once."""
    recipe = common.recipe
    run = common.run
    logits = 0
    if contents.has_head:
        logits = _head(recipe, run, common.facts, adds_inside=common.adds_inside)
    return _HeldAlways(
        exchanges=ExchangeMemory(recipe, run, common.facts, contents, messages, buckets),
        weights=_weights(recipe, run, contents, buckets),
        gradients=_sums(recipe, buckets) * run.wide,
        optimizer=_states(recipe, run, contents, buckets),
        logits=logits,
        rounded=_rounded(recipe, buckets),
    )


class _Activations(NamedTuple):
    """Bytes of a stage at the moments of its peak."""

    kept: int
    """By micro batches in flight at the head, tokens of experts left out."""
    routed: int
    """Tokens of experts."""
    elsewhere: int
    """What is kept besides when layers run backward."""
    in_backward: int
    """What a layer's backward pass adds, layers that come back from the CPU included."""
    gone: int
    """Of a split backward pass: what its first chunk has let go at its end."""


class _ChunkActivations(NamedTuple):
    """Bytes of one chunk and one micro batch."""

    kept: int
    """For its backward pass, tokens of experts left out."""
    routed: int
    """Tokens of experts."""
    deferred: int
    """For its weight gradients, where they are deferred."""
    moving: int
    """What layers that come back from the CPU take more than those that stay, when these are gone."""
    again: int
    """What is computed again at once before a backward pass."""


class _Waiting(NamedTuple):
    """Bytes that wait at a moment of a step, over all micro batches in flight."""

    kept: int
    routed: int


def _activations(common: _CommonSizes, contents: StageContents, moments: Moments) -> _Activations:
    """Of `moments` those count that take most."""
    chunks = [_chunk_activations(common, chunk) for chunk in contents.chunks]
    at_layers = max((_waiting_at(moment, chunks) for moment in moments.at_layers), key=sum)
    at_head = at_layers
    if contents.has_head:
        at_head = max((_waiting_at(moment, chunks) for moment in moments.at_head), key=sum)
    first = chunks[0]
    return _Activations(
        kept=at_head.kept,
        routed=at_head.routed,
        elsewhere=sum(at_layers) - sum(at_head),
        in_backward=_in_backward(common, contents, chunks),
        gone=first.kept + first.routed - first.deferred,
    )


def _waiting_at(moment: Moment, chunks: Sequence[_ChunkActivations]) -> _Waiting:
    """Each chunk's activations, as often as micro batches wait for its backward pass or for its weight gradients."""
    kept = 0.0
    routed = 0.0
    for waiting, chunk in zip(moment, chunks, strict=True):
        kept += waiting.for_backward * chunk.kept + waiting.for_weights * chunk.deferred
        routed += waiting.for_backward * chunk.routed
    return _Waiting(int(kept), int(routed))


def _chunk_activations(common: _CommonSizes, chunk: tuple[LayerFacts, ...]) -> _ChunkActivations:
    run = common.run
    parallelism = common.recipe.parallelism
    sizes = {kind: layer_bytes(run, kind) for kind in dict.fromkeys(chunk)}
    layers = kept_by_layer(parallelism.recompute, [sizes[layer] for layer in chunk])
    offloaded = layers[: parallelism.offload.layers]
    stays = layers[parallelism.offload.layers :]
    kept = 0
    routed = 0
    for one in stays:
        kept += one.kept
        routed += one.routed
    # a layer runs backward while the one before it comes back; what stays is gone by then
    coming_back = sum(one.total for one in offloaded[-2:])
    return _ChunkActivations(
        kept=_angles(common.facts, run.tokens.all // run.tokens.sequences) + kept,
        routed=routed,
        deferred=sum(sizes[layer].deferred for layer in chunk),
        moving=coming_back - kept - routed,
        again=_computed_again(parallelism.recompute, list(sizes.values()), len(chunk)),
    )


def _computed_again(recompute: RecomputeSpec, kinds: Sequence[LayerBytes], layers: int) -> int:
    """What a chunk of so many layers, of these `kinds`, computes again at once before a backward pass."""
    if recompute.kind != "full":
        return max((one.again for one in kinds), default=0)
    # layers that are computed again together are there at once, but for the inputs between them
    group = 1
    if recompute.method != "block":
        group = min(recompute.layers or 1, max(1, layers))
    largest = 0
    between = 0
    for one in kinds:
        largest = max(largest, _without_input(one))
        between = max(between, one.input)
    return group * largest + (group - 1) * between


def _in_backward(common: _CommonSizes, contents: StageContents, chunks: Sequence[_ChunkActivations]) -> int:
    """What the backward pass of a layer adds to all that is kept."""
    # the most of each, over the chunks and over the layers
    again = 0
    moving = 0
    for_weights = 0
    for chunk in chunks:
        again = max(again, chunk.again)
        moving = max(moving, chunk.moving)
        for_weights = max(for_weights, chunk.deferred - chunk.kept - chunk.routed)
    in_layer = 0
    sent = 0
    for kind in contents.kinds:
        one = layer_bytes(common.run, kind)
        in_layer = max(in_layer, one.input + one.backward)
        sent = max(sent, one.sent)
    # tokens on their way to experts, and layers on their way back from the CPU, are there beside a layer's gradients
    total = again + in_layer + sent + moving
    is_tied_here = contents.has_head and contents.has_embedding and common.facts.is_tied
    if is_tied_here and common.trains_table and not tables_in_place(common.recipe).head:
        # the gradient of a tied table waits for the embedding's part of it
        total += common.run.width * common.table
    if not common.shape.splits_backward:
        return total
    # while a chunk's last layer runs backward, all that the others' weight gradients need is there; then its own
    layers = max(map(len, contents.chunks))
    return max(for_weights, total + for_weights * (layers - 1) // max(layers, 1))


class LayerKept(NamedTuple):
    """Bytes that one layer keeps of a micro batch."""

    kept: int
    """Tokens of experts left out."""
    routed: int
    """Tokens of experts."""

    @property
    def total(self) -> int:
        return self.kept + self.routed


def kept_by_layer(recompute: RecomputeSpec, layers: Sequence[LayerBytes]) -> list[LayerKept]:
    """Of each layer of a chunk, in order, after layers were dropped that are computed again as a whole."""
    found = []
    for number, one in enumerate(layers):
        kept = LayerKept(one.kept, one.routed)
        if recompute.kind == "full":
            group = recompute.layers or 1
            if recompute.method != "block":
                # of a group the input of its first layer alone
                is_first = number % group == 0
                kept = LayerKept(one.input * is_first, 0)
            elif number < group:
                kept = LayerKept(one.input, 0)
        found.append(kept)
    return found


def _without_input(one: LayerBytes) -> int:
    """A layer that is recomputed in full, its input left out."""
    return one.kept + one.routed + one.again - one.input


def _angles(facts: ModelFacts, positions: int) -> int:
    """Cosine and sine of every position."""
    return positions * facts.angles * _ANGLE


def _head(recipe: Recipe, run: LayerRun, facts: ModelFacts, *, adds_inside: bool) -> int:
    """The last norm in fp32, its output gathered, and the loss with the gradients that it makes on the way.

    Legend: rows, tokens of a rank in the head; columns, classes of its part of the vocabulary; d, d_model; e and w,
    bytes of a number in the model's format and of one in at least fp32.
    """
    rows = run.tokens.all
    d = facts.d_model
    e = run.width
    w = run.wide
    table = facts.table_on(tp=run.degrees.tp)
    columns = table // d
    total = _last_norm(run, facts) + run.tokens.stream * d * e
    if run.tokens.stream_ranks > 1:
        total += rows * d * e
    kernel = recipe.kernels.cross_entropy
    # of logits that are bent by a cap, the backward pass takes how far: one number more for each
    bent = int(recipe.model.logit_cap is not None)
    if kernel == "reference":
        # logits and two more tensors as large, in at least fp32
        return total + rows * columns * (3 + bent) * w
    # the gradient of the norm's output [rows, d], and of the table unless it is summed in place, are added up over
    # pieces of the tokens
    total += rows * d * e * facts.head_makes_input_gradient
    is_in_place = tables_in_place(recipe).head
    makes_table = not facts.head_table.is_frozen
    if makes_table and not is_in_place:
        total += table * w
    piece = logits_piece(rows, columns * e)
    # a piece's logits are dropped when the next piece's are there
    at_piece = (piece + min(piece, rows - piece)) * columns * e
    if kernel != "triton":
        at_piece += (_softmax_numbers(e, w) + 2 * bent * w) * piece * columns
    # at the end the last piece's logits, and the table's gradient in the model's format; in place that is one piece's,
    # which GPUs add inside of the product
    last_piece = (rows - 1) % piece + 1
    at_end = last_piece * columns * e
    if e < w and makes_table and not (is_in_place and adds_inside):
        at_end += table * e
    return total + max(at_piece, at_end)


def _softmax_numbers(e: int, w: int) -> int:
    """Bytes for each logit that plain operations make in at least fp32: two tensors where logits have another format,
    else one."""
    if e < w:
        return 2 * w
    return w


def _head_waits(recipe: Recipe, run: LayerRun, facts: ModelFacts) -> int:
    """What the last norm and the loss keep of a micro batch whose backward pass does not follow at once; of the loss,
    the gradients that it has made on the way and added to no sum."""
    table = facts.table_on(tp=run.degrees.tp)
    if recipe.kernels.cross_entropy == "reference":
        kept = 2 + int(recipe.model.logit_cap is not None)
        return _last_norm(run, facts) + kept * run.tokens.all * table // facts.d_model * run.wide
    kept = run.tokens.all * facts.d_model
    if not tables_in_place(recipe).head:
        kept += table
    return _last_norm(run, facts) + kept * run.width


def _last_norm(run: LayerRun, facts: ModelFacts) -> int:
    """What it keeps: it is outside of the compiled layers."""
    size = 0
    # as operations of their own
    for kept in facts.norm.kept(Execution(fused=run.execution.fused)):
        # what its weight's gradient is made of
        if not facts.trained_norm_weights and kept.what.endswith(".normed"):
            continue
        size += kept.times * run.tokens.stream * run.on_rank(kept.features) * run.bytes_of(kept.element)
    return size


def _shares(recipe: Recipe, *, from_strategy: int) -> bool:
    """What strategies share out from one on is shared out: 1 zero1, 2 zero2, 3 fsdp."""
    return _STRATEGY_LEVEL[recipe.parallelism.dp_strategy] >= from_strategy


def _sums(recipe: Recipe, buckets: StageBuckets) -> int:
    """Numbers of the sums of gradients."""
    trained = buckets.all.trained
    if _shares(recipe, from_strategy=2):
        return trained.shards.total
    return trained.whole.total


def _weights(recipe: Recipe, run: LayerRun, contents: StageContents, buckets: StageBuckets) -> int:
    """In the model's format, with copies in fp8 and tables of angles."""
    facts = facts_of(recipe)
    tables = _angles(facts, recipe.model.max_seq_len)
    tables += _fp8_weights(recipe, run, contents, buckets)
    held = buckets.all.whole.total
    if _shares(recipe, from_strategy=3):
        held = buckets.all.shards.total
    elif not _shares(recipe, from_strategy=1):
        # they stay outside of buffers, which are of gradients alone
        held = buckets.all.most_held.total
    return held * run.width + tables


def _fp8_weights(recipe: Recipe, run: LayerRun, contents: StageContents, buckets: StageBuckets) -> int:
    """Copies of weights in fp8, with their scales, in each of two layouts: of all layers, or where weights are gathered
    for each pass of a layer, of the one that runs. Where they are gathered in fp8, this rank's rows of all besides."""
    of_layers: list[int] = []
    if recipe.parallelism.dp_strategy not in ("fsdp", "hsdp"):
        for chunk in contents.chunks:
            of_layers += [2 * run.fp8_bytes(layer.fp8_weights_on(run.degrees).total) for layer in chunk]
        return sum(of_layers)
    for layers in buckets.units:
        of_layers.append(sum(2 * run.fp8_bytes(layer.fp8_weights_on(run.degrees).total) for layer in layers))
    return max(of_layers, default=0) + buckets.all.in_fp8.shards.total


def _states(recipe: Recipe, run: LayerRun, contents: StageContents, buckets: StageBuckets) -> int:
    """Master weights and moments on the rank that has most, those on the CPU left out. No padding has any."""
    here = 1.0 - recipe.parallelism.offload.optimizer
    trained = buckets.all.trained
    states = here * trained.most_held.total * state_bytes(recipe.optim, width=run.width)
    if not isinstance(recipe.optim, MuonSpec):
        return ceil(states)
    # what is no hidden matrix has a second moment: as if it were shared out evenly
    dense = trained.elements.dense
    for chunk in contents.chunks:
        for kind, layers in Counter(chunk).items():
            dense -= layers * hidden_of_layer(kind, run.degrees).dense
    ranks = 1
    if _shares(recipe, from_strategy=1):
        ranks = sharing_ranks(recipe.parallelism).dense
    return ceil(states) + ceil(dense / ranks) * run.wide


def state_bytes(optim: OptimSpec, *, width: int) -> int:
    """Bytes of master weight and moments of one weight, under Muon of a hidden matrix, that is computed with in `width`
    bytes."""
    wide = max(4, width)
    # weights that are computed with in at least fp32 are their own master weights
    has_master = width < wide
    if not isinstance(optim, AdamWSpec):
        return (optim.n_moments + has_master) * wide
    # of an fp64 model "fp32" is fp64
    bytes_of = _FORMAT | {"fp32": wide}
    formats = optim.formats
    moments = bytes_of[formats.exp_avg] + bytes_of[formats.exp_avg_sq]
    if has_master:
        return moments + bytes_of[formats.master]
    return moments


def _rounded(recipe: Recipe, buckets: StageBuckets) -> int:
    """The largest bucket as it is sent, where gradients are rounded for their way: in memory of the stream that sends,
    which no other takes."""
    if recipe.parallelism.grad_reduce != "bf16" or _data_ranks(recipe) == 1:
        return 0
    return buckets.all.trained.largest * _FORMAT["bf16"]


def _data_ranks(recipe: Recipe) -> int:
    return recipe.parallelism.dp_replicate * recipe.parallelism.dp_shard
