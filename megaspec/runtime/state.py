"""What a checkpoint of a run holds, in global names: the layout that wrote it does not matter to the one that reads it.

model/<name>          master weights
router/<name>          biases and shares of the routers of experts
optim/<kind>/<name>   optimizer state
fp8/<name>             largest elements of the steps before, of the layer of a weight: what delayed scales are made of
rng/<generator>/<rank> random generators that user code may draw from, as bytes
"""

import heapq
import sys
from collections.abc import Mapping, Sequence, Set
from functools import partial
from math import prod
from typing import Any

import torch

from megaspec.checkpoint.comm import Comm, SoloComm, together
from megaspec.checkpoint.examine import MOST_PROBLEMS
from megaspec.checkpoint.format import Manifest
from megaspec.checkpoint.reader import Reader, Weights
from megaspec.checkpoint.shard import TORCH_DTYPES
from megaspec.checkpoint.store import SavedPiece
from megaspec.checkpoint.streamed import WEIGHTS
from megaspec.core.errors import CheckpointError, printable
from megaspec.core.layout import Layout
from megaspec.nn.decoder import Decoder
from megaspec.parallelism.expert import buffers_of
from megaspec.rules.belonging import FP8, NUMBERS, holds_weights_alone, is_fork_point, starts_optimizer_anew
from megaspec.runtime.build import TrainState

_ALONE = SoloComm()


def tensors_of(built: TrainState) -> dict[str, tuple[str, torch.Tensor]]:
    """Stored name -> (parameter, tensor of its local shape): everything that has the parameter's layout."""
    found = {f"model/{name}": (name, master) for name, master in built.optimizer.masters.items()}
    for kind, tensors in built.optimizer.state().items():
        for name, tensor in tensors.items():
            found[f"optim/{kind}/{name}"] = (name, tensor)
    return found


def weight_pieces_of(built: TrainState) -> list[SavedPiece]:
    """What this rank writes of a checkpoint of weights alone."""
    return [piece for piece in pieces_of(built) if piece.name.startswith(WEIGHTS)]


def pieces_of(built: TrainState) -> list[SavedPiece]:
    """What this rank writes: of each piece that several ranks hold a share of the tensors, and its own generators."""
    pieces = []
    tensors = tensors_of(built)
    sizes = {}
    for stored, (name, tensor) in tensors.items():
        sizes[stored] = prod(built.shards[name].shape) * tensor.element_size()
    writers: dict[int, dict[str, int]] = {}
    for stored, (name, tensor) in tensors.items():
        layout = built.shards[name]
        for piece in layout.pieces:
            if piece.copies not in writers:
                writers[piece.copies] = shared_out(sizes, piece.copies)
            if writers[piece.copies][stored] == piece.replica:
                pieces.append(SavedPiece(stored, layout.shape, piece.global_start, tensor[piece.local_slices]))
    # routers' buffers are whole and the same on all ranks of a pipeline stage: one of them writes
    if built.mesh.index("tp-dp-cp") == 0:
        for name, buffer in buffers_of(built.chunks).items():
            pieces.append(SavedPiece(f"router/{name}", tuple(buffer.shape), (0,), buffer))
        # those of a layer as well
        for name, largest in built.fp8.state().items():
            pieces.append(SavedPiece(f"{FP8}{name}", tuple(largest.shape), (0, 0), largest))
    for name, state in generators(built).items():
        pieces.append(SavedPiece(f"rng/{name}/{built.mesh.rank}", tuple(state.shape), (0,), state))
    return pieces


def shared_out(sizes: Mapping[str, int], copies: int) -> dict[str, int]:
    """Which of the ranks that hold copies of a tensor writes it: each as many bytes as can be.

    `sizes`: bytes of the global tensors of a pipeline stage, so that all its ranks come to the same. The largest first,
    each to the rank that has least so far.
    """
    loads = [(0, replica) for replica in range(copies)]  # a heap: the least first
    writer = {}
    for stored in sorted(sizes, key=lambda stored: (-sizes[stored], stored)):
        load, replica = loads[0]
        writer[stored] = replica
        heapq.heapreplace(loads, (load + sizes[stored], replica))
    return writer


def generators(built: TrainState) -> dict[str, torch.Tensor]:
    """The state of each random generator as uint8. The training step draws from none of them."""
    states = {"cpu": torch.get_rng_state()}
    if built.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(built.device)
    return states


def tell_passed_over(reader: Reader) -> None:
    """Says on stderr which newer checkpoints were not good, so that lost steps are never a surprise."""
    for what in reader.passed_over:
        print(printable(f"megaspec: a checkpoint is not good: {what}", keep="\n"), file=sys.stderr)
    if reader.passed_over:
        print(printable(f"megaspec: step {reader.step} is the newest good one"), file=sys.stderr, flush=True)


def misfits(built: TrainState, manifest: Manifest) -> list[str]:
    """Why this rank can't load a checkpoint, a line each: tensors that are missing, left over or of another kind."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for stored, (name, tensor) in tensors_of(built).items():
        shapes[stored] = built.shards[name].shape
        dtypes[stored] = tensor.dtype
    elsewhere = built.tensor_parallel.layouts.keys() - built.shards.keys()
    within = ("model/", "optim/")
    if holds_weights_alone(manifest) or starts_optimizer_anew(manifest, built.spec):
        within = ("model/",)
        shapes = {stored: shape for stored, shape in shapes.items() if stored.startswith("model/")}
    elif is_fork_point(manifest, built.spec):
        # what the fork has frozen leaves its state behind
        elsewhere = elsewhere | {name for name, facts in built.facts.items() if not facts.is_trained}
    for name, buffer in buffers_of(built.chunks).items():
        shapes[f"router/{name}"] = tuple(buffer.shape)
        dtypes[f"router/{name}"] = buffer.dtype
    found = wrong_names(manifest, shapes, within=within, elsewhere=elsewhere)
    for stored, dtype in dtypes.items():
        if stored in shapes and stored in manifest.tensors:
            saved = TORCH_DTYPES[manifest.tensors[stored].dtype]
            # A fork may compute in another number format.
            is_same = saved.is_floating_point if is_fork_point(manifest, built.spec) else saved == dtype
            if not is_same:
                found.append(f"{stored} has dtype {saved}, this run has {dtype}")
    for name, state in generators(built).items():
        stored = f"rng/{name}/{built.mesh.rank}"
        tensor = manifest.tensors.get(stored)
        if tensor is not None and (tensor.dtype != "U8" or tensor.shape != tuple(state.shape)):
            kind = f"dtype {tensor.dtype} and shape {list(tensor.shape)}"
            found.append(f"{stored} has {kind}, torch's generator has {state.numel()} bytes")
    return found[:MOST_PROBLEMS]


@torch.no_grad()
def load(built: TrainState, reader: Reader, *, comm: Comm = _ALONE) -> None:
    """Fills weights and optimizer state from a checkpoint of any layout, weights alone where it holds no more, or where
    a fork trains what was frozen there: see rules/belonging.py.

    Raises CheckpointError for a parameter that is missing, of another kind, or that this model does not have, and
    DiskError for what can't be read now. `comm`: ranks that load together; what one of them raises, all do, before any
    waits for another's weights.
    """
    together(comm, partial(_read, built, reader))
    built.optimizer.write_back()
    built.data_parallel.gather_weights()


def _read(built: TrainState, reader: Reader) -> None:
    """What this rank owns, into the optimizer and the buffers. No rank waits for another here."""
    problems = misfits(built, reader.manifest)
    if problems:
        raise CheckpointError([f"{reader.path}: {problem}" for problem in problems])
    is_anew = starts_optimizer_anew(reader.manifest, built.spec)
    for stored, (name, tensor) in tensors_of(built).items():
        if stored.startswith("optim/") and (is_anew or holds_weights_alone(reader.manifest)):
            continue
        value = torch.empty_like(tensor)
        fill(value, built.shards[name], stored, reader)
        kind = "master" if stored.startswith("model/") else stored.split("/")[1]
        built.optimizer.put(kind, name, value)
    load_buffers(built.chunks, reader)
    load_largest(built, reader)
    if not is_anew:
        built.optimizer.updates = reader.state["optimizer_updates"]
    for name in generators(built):
        stored = f"rng/{name}/{built.mesh.rank}"
        if stored in reader:
            _set_generator(name, reader.read(stored), built.device, where=f"{reader.path}: {stored}")


def _set_generator(name: str, state: torch.Tensor, device: torch.device, *, where: str) -> None:
    try:
        if name == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)
    except RuntimeError as error:
        raise CheckpointError(f"{where}: torch does not take it: {str(error).splitlines()[0]}") from None


@torch.no_grad()
def load_largest(built: TrainState, reader: Reader) -> None:
    """Fills what delayed scales are made of. Of layers of which a checkpoint does not hold it, being of another
    precision, of weights alone, or with other layers in fp8, it begins anew, which is said on stderr. Others keep
    theirs: a rank has some of the layers, and what becomes of one must not depend on which."""
    mine = built.fp8.state()
    if not mine:
        return
    missing = [name for name in mine if f"{FP8}{name}" not in reader]
    if missing and built.mesh.index("tp-dp-cp") == 0:
        text = f"{reader.path} holds no {FP8}{missing[0]}: delayed scales begin anew"
        if len(missing) < len(mine):
            text += f" there and in {len(missing) - 1} more of {len(mine)}"
        print(printable(f"megaspec: {text}"), file=sys.stderr, flush=True)
    state = {}
    for name, largest in mine.items():
        state[name] = torch.zeros_like(largest)
        if name in missing:
            continue
        found = reader.read(f"{FP8}{name}").to(largest)
        # another length of history: as far as both go back, the newest first
        steps = min(found.shape[1], largest.shape[1])
        state[name][:, :steps] = found[:, :steps]
    built.fp8.load_state(state)


@torch.no_grad()
def load_buffers(chunks: Sequence[Decoder], reader: Reader) -> None:
    """Fills what routers keep from step to step. Raises CheckpointError for what is missing or of another shape."""
    for name, buffer in buffers_of(chunks).items():
        stored = f"router/{name}"
        if stored not in reader or reader.shape(stored) != tuple(buffer.shape):
            raise CheckpointError(f"{reader.path}: holds no {stored} of shape {list(buffer.shape)}")
        buffer.copy_(reader.read(stored))


@torch.no_grad()
def load_weights(
    parameters: Mapping[str, torch.Tensor],
    layouts: Mapping[str, Layout],
    reader: Reader,
    *,
    elsewhere: Set[str] = frozenset(),
) -> None:
    """Fills weights alone, in their own dtype, for evaluation and generation. Raises as `load` does. `elsewhere`:
    parameters that other ranks or chunks have."""
    wanted = {f"model/{name}": layouts[name].shape for name in parameters}
    problems = wrong_names(reader.manifest, wanted, within=("model/",), elsewhere=elsewhere)
    if problems:
        raise CheckpointError([f"{reader.path}: {problem}" for problem in problems])
    for name, parameter in parameters.items():
        fill(parameter, layouts[name], f"model/{name}", reader)


def fill(tensor: torch.Tensor, layout: Layout, stored: str, reader: Weights) -> None:
    """Reads this rank's rectangles of a stored tensor; rows that pad the vocabulary become zero."""
    for piece in layout.pieces:
        tensor[piece.local_slices] = reader.read(stored, piece.global_start, piece.shape).to(tensor.device)
    n_rows = sum(piece.shape[0] for piece in layout.pieces)
    tensor[n_rows:] = 0


def wrong_names(
    manifest: Manifest,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    within: tuple[str, ...],
    elsewhere: Set[str] = frozenset(),
) -> list[str]:
    """Which tensors that are wanted are missing or of another shape, and which of those that begin with one of `within`
    are left over; parameters `elsewhere` may be."""
    found = []
    for name, shape in shapes.items():
        if name not in manifest.tensors:
            found.append(f"holds no {name}; it was written by another model or optimizer")
        elif manifest.tensors[name].shape != shape:
            found.append(f"{name} has shape {list(manifest.tensors[name].shape)}, this run has {list(shape)}")
    extra = []
    for stored in sorted(manifest.tensors.keys() - shapes.keys()):
        if stored.startswith(within) and _parameter_of(stored) not in elsewhere:
            extra.append(stored)
    if extra:
        found.append(f"{extra[0]} and {len(extra) - 1} more belong to no parameter of this run")
    return found


def _parameter_of(stored: str) -> str:
    """The parameter's name in `model/<name>` and `optim/<kind>/<name>`; it may hold slashes itself."""
    n_prefixes = 2 if stored.startswith("optim/") else 1
    return stored.split("/", n_prefixes)[-1]


def progress(
    built: TrainState,
    *,
    step: int,
    samples: int,
    tokens: int,
    scaler: dict[str, Any] | None,
    numbers: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The JSON beside the tensors: where the run is. `numbers`: what its guard knows (train/guard.py), if any."""
    return {
        "step": step,
        "samples": samples,
        "tokens": tokens,
        "optimizer_updates": built.optimizer.updates,
        "loss_scale": scaler,
        NUMBERS: numbers or {},
    }
