"""Weights and gradients of a run by global name, whole, whatever the layout: for loops of one's own.

Note on whole tensors. Each element has one rank that holds copy 0 of it (core/layout.py). That rank's bits and zeros
from all others are summed as whole numbers, which is exact, slab by slab, so that a rank's device holds no more than a
slab beside its shard.
"""

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from megaspec.checkpoint.comm import Comm, DistComm, SoloComm, together
from megaspec.core import counted
from megaspec.core.errors import Problem, UsageError
from megaspec.core.layout import Layout, whole
from megaspec.core.problems import did_you_mean
from megaspec.parallelism.expert import routers_of
from megaspec.runtime.build import Summed, TrainState
from megaspec.runtime.step import finish_gradients

MOST_PROBLEMS = 20
# Elements that ranks exchange at once: 256 MB in fp32.
_SLAB = 1 << 26
# Whole numbers of the same width: a sum of bits.
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


@dataclass(frozen=True)
class WeightShard:
    """What one rank holds of a tensor."""

    layout: Layout
    """The global name and shape, and which rectangles of it lie where in `values`."""
    values: Tensor
    """[layout.local_shape]; what no rectangle covers is padding."""


def weights(
    built: TrainState, *, names: Collection[str] | None = None, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Whole weights by global name, copies on the CPU of every rank. All ranks call it together, with the same names.

    They are the master weights, in fp32 or wider, of which the model computes with a rounded copy; `dtype` rounds them.
    A router's bias is among them. `names`: of those that are wanted; None: of all, which every rank needs memory for.
    UsageError: a name that is no weight's.
    """
    shapes = _shapes(built)
    shards = weight_shards(built)
    found = {}
    for name in _chosen(built, shapes, names):
        value = _whole(built, shards.get(name), shapes[name])
        if dtype is not None:
            value = value.to(dtype)
        found[name] = value
    return found


def weight_shards(built: TrainState) -> dict[str, WeightShard]:
    """What this rank holds of the master weights, by global name, without a word to other ranks. To be read only."""
    shards = {name: WeightShard(built.shards[name], master) for name, master in built.optimizer.masters.items()}
    # a router's bias is whole on every rank that has its layer
    rank_of_stage = built.mesh.index("tp-dp-cp")
    copies = built.mesh.size("tp-dp-cp")
    for name, bias in _biases(built).items():
        layout = whole(name, tuple(bias.shape), replica=rank_of_stage, copies=copies)
        shards[name] = WeightShard(layout, bias)
    return shards


@torch.no_grad()
def set_weights(built: TrainState, values: Mapping[str, Tensor]) -> None:
    """Sets whole weights by global name: the master weights and the model's copy of them, in whatever layout.

    `values`: floating-point tensors of the global shapes, on any device; names and shapes are those of `weights`. What
    is not named stays as it is, the optimizer's state too. All ranks call it together, with the same values.
    UsageError, on all ranks, before anything is set: a name, shape or kind that does not fit, or ranks that disagree.
    """
    comm = _comm(built)
    shapes = _shapes(built)
    # a rank whose values do not fit would leave the others waiting
    digests = together(comm, lambda: _checked(built, values, shapes, with_values=comm.size > 1))
    _refuse_differing(digests)
    biases = _biases(built)
    for name, value in values.items():
        if name in biases:
            biases[name].copy_(value)
        elif name in built.shards:
            layout = built.shards[name]
            # rows that pad the vocabulary are zero
            shard = torch.zeros(layout.local_shape, dtype=built.wide, device=value.device)
            for piece in layout.pieces:
                shard[piece.local_slices] = value[piece.global_slices].to(built.wide)
            built.optimizer.put("master", name, shard)
    # the model's copy of this rank's shards, then of everybody's
    built.optimizer.write_back([name for name in values if name in built.shards])
    built.data_parallel.gather_weights()


def _refuse_differing(digests: Sequence[Mapping[str, int]]) -> None:
    """UsageError where ranks gave other values. `digests`: of each rank, by the values' names."""
    first = digests[0]
    for rank, digest in enumerate(digests):
        for name in sorted(digest.keys() | first.keys()):
            if digest.get(name) != first.get(name):
                text = f"set_weights: {name} is another on rank {rank} than on rank 0"
                raise UsageError(f"{text}; every rank gives the same names and the same whole tensors")


def gradients(built: TrainState, *, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Whole main gradients by global name, copies on the CPU of every rank, in fp32 or wider. All ranks call it
    together, with the same names.

    They are the sums over all micro batches and ranks, without loss scale and before clipping: what StepResult's
    grad_norm is the norm of. Inside train_step they are there for `on_gradients`, and behind forward_backward until the
    update, which may overwrite them. Behind a `backward` of one's own they are the sum of what all passes and ranks
    have added since they were last read here. What train.trainable freezes has none. `names`: as for `weights`.
    UsageError: there are none, or a name that is no trained parameter's.
    """
    summed = _summed(built)
    scale = summed.loss_scale.cpu()
    layouts = built.tensor_parallel.layouts
    shapes = {name: layout.shape for name, layout in layouts.items() if built.facts[name].is_trained}
    sums = built.data_parallel.gradients
    found = {}
    for name in _chosen(built, shapes, names):
        # None: the layer is another pipeline stage's
        shard = WeightShard(built.shards[name], sums[name]) if name in sums else None
        found[name] = _whole(built, shard, shapes[name]) / scale
    return found


def gradient_shards(built: TrainState) -> dict[str, WeightShard]:
    """Copies of what this rank holds of `gradients`, by global name. All ranks call it together; raises as `gradients`
    does."""
    scale = _summed(built).loss_scale
    shards = {}
    for name, sums in built.data_parallel.gradients.items():
        shards[name] = WeightShard(built.shards[name], sums / scale)
    return shards


def _summed(built: TrainState) -> Summed:
    """What the buckets hold, summed over all ranks where that is still to be done. UsageError: nothing."""
    if built.data_parallel.has_unsummed:
        finish_gradients(built, loss_scale=torch.ones((), dtype=built.wide, device=built.device))
    if built.summed is None:
        text = "there are no gradients: no backward pass has been made"
        raise UsageError(f"{text}; call megaspec.forward_backward, or loss.backward() where one rank has the model")
    if built.summed.is_spent:
        text = "the last step's gradients are gone: its update may have overwritten them"
        raise UsageError(f"{text}; read them in megaspec.train_step(..., on_gradients=...), which is called before it")
    return built.summed


def _comm(built: TrainState) -> Comm:
    if built.mesh.world_size == 1:
        return SoloComm()
    return DistComm(device=built.device)


def _biases(built: TrainState) -> dict[str, Tensor]:
    """What the routers here add to the scores that experts are chosen by: it is learned, though by no gradient."""
    biases = {}
    for name, router in routers_of(built.chunks):
        if router.expert_bias is not None:
            biases[f"{name}.expert_bias"] = router.expert_bias
    return biases


def _shapes(built: TrainState) -> dict[str, tuple[int, ...]]:
    """The global shape of every weight, those of other pipeline stages included, in one order on all ranks."""
    shapes = {name: layout.shape for name, layout in built.tensor_parallel.layouts.items()}
    here = {name: list(bias.shape) for name, bias in _biases(built).items()}
    bias_shapes_of_ranks = [here]
    if built.mesh.size("pp") > 1:
        bias_shapes_of_ranks = _comm(built).gather(here)
    for bias_shapes in bias_shapes_of_ranks:
        for name, shape in bias_shapes.items():
            shapes[name] = tuple(shape)
    return shapes


def _chosen(built: TrainState, shapes: Mapping[str, tuple[int, ...]], names: Collection[str] | None) -> list[str]:
    """The names that are asked for, in the order of the model. UsageError: one is no weight's."""
    if names is None:
        return list(shapes)
    wanted = {names} if isinstance(names, str) else set(names)
    problems = []
    for name in sorted(wanted - shapes.keys())[:MOST_PROBLEMS]:
        problems.append(Problem("", _unknown(built, name, shapes), code="weight.unknown"))
    if problems:
        raise UsageError(problems)
    return [name for name in shapes if name in wanted]


def _unknown(built: TrainState, name: object, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Why a name is no weight's, and what to write."""
    text = f"{name}: this model has no such weight"
    tied_names = built.chunks[0].facts.tied_names
    if name in tied_names:
        embedding = tied_names[name]
        return f"{text}, its output head is the embedding (model.tied_embeddings=true); set {embedding}"
    if name in built.facts and not built.facts[name].is_trained:
        return f"{name} is frozen (train.trainable), and has no gradient"
    near = did_you_mean(str(name), shapes)
    return f"{text}; {near or f'its weights are {_some(shapes)}'}"


def _some(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The first names."""
    first = list(shapes)[:3]
    return ", ".join([*first, f"and {len(shapes) - 3} more, see megaspec.weights"])


def _whole(built: TrainState, shard: WeightShard | None, shape: tuple[int, ...]) -> Tensor:
    """The global tensor on the CPU, from all ranks' shards. See the note on whole tensors."""
    out = torch.empty(shape, dtype=built.wide)
    rows = max(1, _SLAB // prod(shape[1:]))
    for first in range(0, shape[0], rows):
        last = min(first + rows, shape[0])
        slab = torch.zeros(last - first, *shape[1:], dtype=built.wide, device=built.device)
        if shard is not None:
            _lay(shard, slab, first)
        if built.mesh.world_size > 1:
            counted.all_reduce(slab.view(_BITS[built.wide]))
        out[first:last] = slab
    return out


def _lay(shard: WeightShard, slab: Tensor, first: int) -> None:
    """Copies what this rank has the first copy of into the rows of the global tensor from `first` on."""
    for piece in shard.layout.pieces:
        begin = max(piece.global_start[0], first)
        end = min(piece.global_start[0] + piece.shape[0], first + slab.shape[0])
        if piece.replica > 0 or begin >= end:
            continue
        # rows are cut by the slab, all other dimensions are the piece's
        rows_in_slab = slice(begin - first, end - first)
        begin_in_shard = piece.local_start[0] + begin - piece.global_start[0]
        rows_in_shard = slice(begin_in_shard, begin_in_shard + end - begin)
        values = shard.values[(rows_in_shard, *piece.local_slices[1:])]
        slab[(rows_in_slab, *piece.global_slices[1:])] = values


def _checked(
    built: TrainState, values: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], *, with_values: bool
) -> dict[str, int]:
    """Name -> checksum of the value, 0 unless `with_values`. UsageError: everything that does not fit."""
    if not isinstance(values, Mapping) or not values:
        raise UsageError("set_weights: there are no values; give {name: tensor}, as megaspec.weights returns them")
    misfits = []
    for name, value in values.items():
        text = _misfit(built, name, value, shapes)
        if text is not None:
            misfits.append(text)
    more = len(misfits) - MOST_PROBLEMS
    if more > 0:
        misfits = [*misfits[:MOST_PROBLEMS], f"{more} more do not fit"]
    if misfits:
        raise UsageError([Problem("", text, code="weight.misfit") for text in misfits])
    if not with_values:
        return dict.fromkeys(values, 0)
    return {name: _checksum(value) for name, value in values.items()}


def _misfit(built: TrainState, name: str, value: Any, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why a value can't be a weight."""
    if name not in shapes:
        return _unknown(built, name, shapes)
    if not isinstance(value, Tensor):
        return f"{name} is a {type(value).__name__}, weights are torch tensors; use torch.as_tensor"
    if tuple(value.shape) != shapes[name]:
        shape = list(value.shape)
        expected = list(shapes[name])
        return f"{name} has shape {shape}, this model has {expected}; give the whole tensor, without padding"
    if not value.is_floating_point():
        return f"{name} has dtype {value.dtype}, weights are floating-point numbers; give float32"
    if value.is_meta:
        return f"{name} is on the meta device, where it has no values; give it some"
    return None


def _checksum(value: Tensor) -> int:
    return zlib.crc32(value.detach().cpu().contiguous().view(torch.uint8).numpy())
