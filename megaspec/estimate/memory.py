"""The most memory that a rank takes in a step, by what it is for.

The peak lies in the last forward pass before a backward pass, at the output head, or in that backward pass, in its
first layer or at the embedding: everything that is kept is there at once. The optimizer's update needs less. Sizes are
counted tensor by tensor; `reserve` holds what no tensor accounts for, as measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from megaspec.estimate.activations import LayerBytes, layer_bytes
from megaspec.estimate.formula import sharing_ranks
from megaspec.estimate.hidden import hidden_of_layer
from megaspec.estimate.parameters import RankParameters, rank_parameters, table_parameters
from megaspec.estimate.schedule import (
    Moment,
    Moments,
    held_by_chunk,
    held_later,
    in_flight,
    messages_held,
    shape_of,
)
from megaspec.estimate.share import Share, share_of
from megaspec.estimate.traffic import Contents, Traffic
from megaspec.model.kinds import has_experts, mla_of
from megaspec.optim.spec import AdamWSpec, MuonSpec, OptimSpec
from megaspec.parallelism.group_memory import outside_torch
from megaspec.parallelism.spec import ParallelismSpec, PipelineSpec
from megaspec.parallelism.stages import stages_of
from megaspec.recipe import ModelSpec, Recipe
from megaspec_kernels.catalog import logits_piece

# Measured on H200 with torch 2.11 and CUDA 13.
_WORKSPACE = 64 * 2**20
"""Scratch of the matrix products' library; torch counts it as allocated."""
_SLACK, _MOST_SLACK = 0.03, 1.2e9
"""What the allocator holds and can't use, as a share of what is allocated and at most."""
_INPUT = 17
"""Bytes of a token of a batch: number and label of 8, mask of 1."""
_FORMAT = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


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
    """The peak of a rank of each pipeline stage, from a filled recipe."""
    return tuple(_by_stage(recipe, device))


def fullest_within(recipe: Recipe, room: int) -> StageMemory | None:
    """The stage that needs most of a GPU; None once one needs more bytes than `room`: no other is weighed then."""
    stages = []
    for stage in _by_stage(recipe, "cuda"):
        if stage.total > room:
            return None
        stages.append(stage)
    return fullest(stages)


def _by_stage(recipe: Recipe, device: str) -> Iterator[StageMemory]:
    """See memory_of; each is weighed when it is asked for."""
    share, own = share_of(recipe), recipe.parallelism
    layers = layer_bytes(share, with_experts=False), layer_bytes(share, with_experts=True)
    is_cuda = device == "cuda"
    micro_batches = recipe.train.global_batch // _data_ranks(recipe) // share.micro_batch
    shape, table = shape_of(recipe), table_parameters(share.model, tp=own.tp)
    beside = micro_batches * share.micro_batch * recipe.data.seq_len // share.cp * _INPUT
    beside += _WORKSPACE if is_cuda else 0
    outside = outside_torch(own) + _rounded(recipe, share) if is_cuda else 0
    # stages in the middle hold the same and differ in the micro batches in flight
    held_always: dict[tuple[Contents, int], tuple[dict[str, int], Traffic]] = {}
    for stage, (contents, held) in enumerate(
        zip(_contents(recipe.model, own.pp, own.pipeline), in_flight(recipe), strict=True)
    ):
        messages = messages_held(shape, stage, overlap=own.overlap.p2p)
        if (contents, messages) not in held_always:
            sizes = _held_always(recipe, share, contents, rank_parameters(recipe, stage))
            held_always[contents, messages] = sizes, Traffic(recipe, share, contents, messages)
        sizes, traffic = held_always[contents, messages]
        moments = held_by_chunk(shape, stage, alike=len(set(contents.chunks)) == 1)
        kept, routed, elsewhere, in_backward, gone = _activations(
            share, layers, contents, moments, splits=shape.splits_backward
        )
        before = traffic.before
        if not shape.splits_backward:
            later = held_later(shape, stage)
            # with the backward pass before went what was kept for it
            before = max(0, before - int((kept + routed) * (held - later.behind) / held))
            gone = int((kept + routed) * (held - later.at_embedding) / held)
        # the head is done before the first layer runs backward
        at_head, at_layer = traffic.at_head(), traffic.at_layer(before)
        if own.pipeline.schedule != "gpipe":
            # under gpipe all forward passes come before the first backward pass
            at_head += before
        more = max(0, elsewhere + in_backward + at_layer - sizes["logits"] - at_head)
        if contents.has_embedding:
            # what its micro batch kept is gone, and what left before it, but for what weight gradients need that were
            # deferred
            at_table = traffic.at_table() + share.width * table - gone
            more = max(more, elsewhere + at_table - sizes["logits"] - at_head)
        moving = min(more, max(0, at_layer - at_head))
        activations = kept + more - moving + beside
        if own.pipeline.schedule == "gpipe" and contents.has_head:
            activations += int((held - 1) * _head_waits(recipe, share))
        used = sizes | {"activations": activations, "expert_buffers": routed, "communication": at_head + moving}
        reserve = outside + int(min(_SLACK * sum(used.values()), _MOST_SLACK)) if is_cuda else 0
        yield StageMemory(**used, reserve=reserve)


def fullest(stages: Sequence[StageMemory]) -> StageMemory:
    """The stage that needs most."""
    return max(stages, key=lambda one: one.total)


@lru_cache(maxsize=4096)
def _contents(model: ModelSpec, pp: int, pipeline: PipelineSpec) -> tuple[Contents, ...]:
    experts = has_experts(model)
    stages = stages_of(model.n_layers, ParallelismSpec(pp=pp, pipeline=pipeline))
    return tuple(
        Contents(
            tuple((sum(not experts[i] for i in c.layers), sum(experts[i] for i in c.layers)) for c in chunks),
            any(c.embedding for c in chunks),
            any(c.head for c in chunks),
        )
        for chunks in stages
    )


def _held_always(recipe: Recipe, share: Share, contents: Contents, count: RankParameters) -> dict[str, int]:
    """What does not depend on the micro batches in flight."""
    return {
        "weights": _weights(recipe, share, contents, count),
        "gradients": shared_out(recipe, count, from_strategy=2) * share.wide,
        "optimizer": _states(recipe, share, contents, count),
        "logits": _head(recipe, share) if contents.has_head else 0,
    }


class _Activations(NamedTuple):
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


def _activations(
    share: Share,
    layers: tuple[LayerBytes, LayerBytes],
    contents: Contents,
    moments: Moments,
    *,
    splits: bool,
) -> _Activations:
    """Of `moments` those count that take most."""
    own = share.recompute
    rotary = 0 if not hasattr(share.model, "rope_base") else _angles(share.model, share.tokens // share.micro_batch)
    kept, routed, again, moving = [], [], 0, 0
    deferred = [sum(n * one.deferred for n, one in zip(numbers, layers, strict=True)) for numbers in contents.chunks]
    for numbers in contents.chunks:
        every = kept_by_layer(share, layers, numbers)
        away, stays = every[: share.offloaded_layers], every[share.offloaded_layers :]
        kept.append(rotary + sum(one for one, _ in stays))
        routed.append(sum(one for _, one in stays))
        # a layer runs backward while the one before it comes back; what stays is gone by then
        moving = max(moving, sum(map(sum, away[-2:])) - sum(map(sum, stays)))
        used_here = [one for one, n in zip(layers, numbers, strict=True) if n]
        if own.kind == "full":
            group = 1 if own.method == "block" else min(own.layers or 1, max(1, sum(numbers)))
            largest = max(map(_whole, used_here), default=0)
            again = max(again, group * largest + (group - 1) * layers[0].input)
        else:
            again = max([again, *(one.again for one in used_here)])
    used = [one for one, n in zip(layers, map(sum, zip(*contents.chunks, strict=True)), strict=True) if n]
    sent = max((one.sent for one in used), default=0)
    in_backward = again + max((one.input + one.backward for one in used), default=0)
    if contents.has_head and contents.has_embedding and share.model.tied_embeddings:
        # the gradient of a tied table waits for the embedding's part of it
        in_backward += share.width * table_parameters(share.model, tp=share.tp)
    in_backward += sent + max(0, moving)
    if splits:
        # while a chunk's last layer runs backward, all that the others' weight gradients need is there; then its own
        more = max(0, *(later - a - b for later, a, b in zip(deferred, kept, routed, strict=True)))
        n = max(map(sum, contents.chunks))
        in_backward = max(more, in_backward + more * (n - 1) // max(n, 1))

    def taken(moment: Moment) -> tuple[int, int]:
        whole = sum(
            one.for_backward * a + one.for_weights * b for one, a, b in zip(moment, kept, deferred, strict=True)
        )
        return int(whole), int(sum(one.for_backward * size for one, size in zip(moment, routed, strict=True)))

    at_layers = max(map(taken, moments.at_layers), key=sum)
    at_head = max(map(taken, moments.at_head), key=sum) if contents.has_head else at_layers
    elsewhere = sum(at_layers) - sum(at_head)
    return _Activations(*at_head, elsewhere, in_backward, kept[0] + routed[0] - deferred[0])


def kept_by_layer(
    share: Share, layers: tuple[LayerBytes, LayerBytes], numbers: tuple[int, int]
) -> list[tuple[int, int]]:
    """Bytes that each layer of a chunk keeps of a micro batch, tokens of experts apart. `numbers`: layers without and
    with experts, taken in this order."""
    own, every = share.recompute, [one for one, n in zip(layers, numbers, strict=True) for _ in range(n)]
    if own.kind != "full":
        return [(one.kept, one.routed) for one in every]
    if own.method == "block":
        return [(one.input, 0) if i < (own.layers or 1) else (one.kept, one.routed) for i, one in enumerate(every)]
    return [(one.input if i % (own.layers or 1) == 0 else 0, 0) for i, one in enumerate(every)]


def _whole(one: LayerBytes) -> int:
    """A layer that is recomputed in full, its input left out."""
    return one.kept + one.routed + one.again - one.input


def _angles(model: ModelSpec, positions: int) -> int:
    """Cosine and sine of every position in fp32."""
    mla = mla_of(model)
    return positions * (mla.d_rope if mla else model.d_head) * 4


def _head(recipe: Recipe, share: Share) -> int:
    """The last norm in fp32, its output gathered, and the loss with the gradients that it makes on the way."""
    d, e, wide, rows = share.model.d_model, share.width, share.wide, share.tokens
    table = table_parameters(share.model, tp=share.tp)
    columns = table // d
    norm = _last_norm(share) + share.split_tokens * d * e
    gathered = rows * d * e if share.is_sequence_split else 0
    kernel = recipe.kernels.cross_entropy
    if kernel == "reference":
        return norm + gathered + rows * columns * 3 * wide
    # a piece's logits are dropped when the next piece's are there
    piece = logits_piece(rows, columns * e)
    pieces = piece + min(piece, rows - piece)
    softmax = 0 if kernel == "triton" else piece * columns * (2 * wide if e < wide else wide)
    at_piece = pieces * columns * e + softmax
    last = (rows - 1) % piece + 1
    at_end = last * columns * e + (table * e if e < wide else 0)
    return norm + gathered + rows * d * e + table * wide + max(at_piece, at_end)


def _head_waits(recipe: Recipe, share: Share) -> int:
    """What the last norm and the loss keep of a micro batch whose backward pass does not follow at once; of the loss,
    both gradients that it has made on the way."""
    d, table = share.model.d_model, table_parameters(share.model, tp=share.tp)
    if recipe.kernels.cross_entropy == "reference":
        return _last_norm(share) + 2 * share.tokens * table // d * share.wide
    return _last_norm(share) + (share.tokens * d + table) * share.width


def _last_norm(share: Share) -> int:
    """What it keeps: its input and a row's statistics; of an RMS norm the input in fp32 before and after."""
    d, is_layer_norm = share.model.d_model, not hasattr(share.model, "rope_base")
    return share.split_tokens * (share.width * d + 8 if is_layer_norm else 2 * share.wide * d + 4)


def shared_out(recipe: Recipe, count: RankParameters, *, from_strategy: int) -> int:
    """Weights on the rank that has most when they are shared out from a strategy on: 1 zero1, 2 zero2, 3 fsdp."""
    level = {"replicate": 0, "zero1": 1, "zero2": 2, "fsdp": 3, "hsdp": 3}[recipe.parallelism.dp_strategy]
    if level < from_strategy:
        return count.total
    dense, expert = sharing_ranks(recipe.parallelism)
    return ceil(count.dense / dense) + ceil(count.expert / expert)


def _weights(recipe: Recipe, share: Share, contents: Contents, count: RankParameters) -> int:
    tables = _angles(share.model, share.model.max_seq_len) if hasattr(share.model, "rope_base") else 0
    if share.is_fp8 and recipe.parallelism.dp_strategy not in ("fsdp", "hsdp"):
        # products of the blocks want both layouts of a weight
        ends = contents.has_embedding + contents.has_head
        tables += 2 * max(0, count.total - ends * table_parameters(share.model, tp=share.tp))
    return shared_out(recipe, count, from_strategy=3) * share.width + tables


def _states(recipe: Recipe, share: Share, contents: Contents, count: RankParameters) -> int:
    """Master weights and moments, those on the CPU left out."""
    here = 1.0 - recipe.parallelism.offload.optimizer
    states = here * shared_out(recipe, count, from_strategy=1) * state_bytes(recipe.optim, width=share.width)
    if not isinstance(recipe.optim, MuonSpec):
        return ceil(states)
    # what is no hidden matrix has a second moment
    dense = count.dense - sum(
        numbers[with_experts] * hidden_of_layer(share.model, with_experts=bool(with_experts), tp=share.tp)
        for numbers in contents.chunks
        for with_experts in (0, 1)
    )
    return ceil(states) + shared_out(recipe, RankParameters(dense, 0), from_strategy=1) * share.wide


def state_bytes(optim: OptimSpec, *, width: int) -> int:
    """Bytes of master weight and moments of one weight, under Muon of a hidden matrix, that is computed with in `width`
    bytes."""
    wide = max(4, width)
    if not isinstance(optim, AdamWSpec):
        master = wide if width < wide else 0
        return master + optim.n_moments * wide
    formats = optim.formats
    master = {"fp32": wide, "fp16": 2}[formats.master] if width < wide else 0
    return master + sum(wide if f == "fp32" else _FORMAT[f] for f in (formats.exp_avg, formats.exp_avg_sq))


def _rounded(recipe: Recipe, share: Share) -> int:
    """A bucket as it is sent, where gradients are rounded for their way: in memory of the stream that sends, which no
    other takes."""
    summed = 2 if recipe.parallelism.grad_reduce == "bf16" else share.wide
    return _bucket(recipe, share) * summed // share.wide if summed < share.wide and _data_ranks(recipe) > 1 else 0


def _bucket(recipe: Recipe, share: Share) -> int:
    """Bytes of the largest bucket of gradients."""
    own = recipe.parallelism
    return max(int(own.bucket_mb * 1e6), share.wide * table_parameters(share.model, tp=own.tp))


def _data_ranks(recipe: Recipe) -> int:
    return recipe.parallelism.dp_replicate * recipe.parallelism.dp_shard
