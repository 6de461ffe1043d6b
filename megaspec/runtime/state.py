"""What a checkpoint of a run holds, in global names: the layout that wrote it does not matter to the one that reads it.

model/<name>          master weights
router/<name>          biases and shares of the routers of experts
optim/<kind>/<name>   optimizer state
rng/<generator>/<rank> random generators that user code may draw from, as bytes
"""

import sys
import zlib
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from megaspec.checkpoint.reader import Reader
from megaspec.checkpoint.store import SavedPiece
from megaspec.core.errors import CheckpointError, printable
from megaspec.core.layout import Layout
from megaspec.nn.decoder import Decoder
from megaspec.parallelism.expert import buffers_of
from megaspec.runtime.build import Built


def tensors_of(built: Built) -> dict[str, tuple[str, torch.Tensor]]:
    """Stored name -> (parameter, tensor of its local shape): everything that has the parameter's layout."""
    found = {f"model/{name}": (name, master) for name, master in built.optimizer.masters.items()}
    for kind, tensors in built.optimizer.state().items():
        found |= {f"optim/{kind}/{name}": (name, tensor) for name, tensor in tensors.items()}
    return found


def pieces_of(built: Built) -> list[SavedPiece]:
    """What this rank writes: of each piece that several ranks hold a share of the tensors, and its own generators."""
    pieces = []
    for stored, (name, tensor) in tensors_of(built).items():
        layout = built.shards[name]
        for piece in layout.pieces:
            if zlib.crc32(stored.encode()) % piece.copies == piece.replica:
                pieces.append(SavedPiece(stored, layout.shape, piece.global_start, tensor[piece.local_slices]))
    first, names = built.mesh.index("tp-dp-cp") == 0, buffers_of(built.chunks)
    pieces += [SavedPiece(f"router/{n}", tuple(b.shape), (0,), b) for n, b in names.items() if first]
    for name, state in generators(built).items():
        pieces.append(SavedPiece(f"rng/{name}/{built.mesh.rank}", tuple(state.shape), (0,), state))
    return pieces


def generators(built: Built) -> dict[str, torch.Tensor]:
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


@torch.no_grad()
def load(built: Built, reader: Reader) -> None:
    """Fills weights and optimizer state from a checkpoint of any layout.

    Raises CheckpointError for a parameter that is missing, of another shape, or that this model does not have.
    """
    wanted = tensors_of(built)
    shapes = {stored: built.shards[name].shape for stored, (name, _) in wanted.items()}
    check_names(reader, shapes, elsewhere=built.tensor_parallel.layouts.keys() - built.shards.keys())
    for stored, (name, tensor) in wanted.items():
        value = torch.empty_like(tensor)
        fill(value, built.shards[name], stored, reader)
        kind = "master" if stored.startswith("model/") else stored.split("/")[1]
        built.optimizer.put(kind, name, value)
    load_buffers(built.chunks, reader)
    built.optimizer.updates = reader.state["optimizer_updates"]
    built.optimizer.write_back()
    built.data_parallel.gather_weights()
    for name, state in generators(built).items():
        stored = f"rng/{name}/{built.mesh.rank}"
        if stored in reader:
            state = reader.read(stored)
            if name == "cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, built.device)


@torch.no_grad()
def load_buffers(chunks: Sequence[Decoder], reader: Reader) -> None:
    """Fills what routers keep from step to step. Raises CheckpointError for what is missing or of another shape."""
    for name, buffer in buffers_of(chunks).items():
        stored = f"router/{name}"
        if stored not in reader or reader.shape(stored) != tuple(buffer.shape):
            raise CheckpointError(f"{reader.path}: holds no {stored} of shape {list(buffer.shape)}")
        buffer.copy_(reader.read(stored))


@torch.no_grad()
def load_weights(parameters: Mapping[str, torch.Tensor], layouts: Mapping[str, Layout], reader: Reader) -> None:
    """Fills weights alone, in their own dtype, for evaluation and generation. Raises as `load` does."""
    check_names(reader, {f"model/{name}": layouts[name].shape for name in parameters}, within="model/")
    for name, parameter in parameters.items():
        fill(parameter, layouts[name], f"model/{name}", reader)


def fill(tensor: torch.Tensor, layout: Layout, stored: str, reader: Reader) -> None:
    """Reads this rank's rectangles of a stored tensor; rows that pad the vocabulary become zero."""
    for piece in layout.pieces:
        tensor[piece.local_slices] = reader.read(stored, piece.global_start, piece.shape).to(tensor.device)
    covered = sum(p.shape[0] for p in layout.pieces)
    tensor[covered:] = 0


def check_names(
    reader: Reader, shapes: dict[str, tuple[int, ...]], *, within: str = "", elsewhere: Set[str] = frozenset()
) -> None:
    """Every tensor that is wanted is there in its shape, and none is left over but those of parameters `elsewhere`."""
    stored = {n for n in reader.names() if n.startswith(within or ("model/", "optim/"))}
    for name, shape in shapes.items():
        if name not in stored:
            raise CheckpointError(f"{reader.path}: holds no {name}; it was written by another model or optimizer")
        if reader.shape(name) != shape:
            found = list(reader.shape(name))
            raise CheckpointError(f"{reader.path}: {name} has shape {found}, this run has {list(shape)}")
    # model/<name>, optim/<kind>/<name>
    extra = sorted(n for n in stored - shapes.keys() if n.split("/", 1 + n.startswith("optim/"))[-1] not in elsewhere)
    if extra:
        raise CheckpointError(f"{reader.path}: {extra[0]} and {len(extra) - 1} more belong to no parameter of this run")


def progress(built: Built, *, step: int, samples: int, tokens: int, scaler: dict[str, Any] | None) -> dict[str, Any]:
    """The JSON beside the tensors: where the run is."""
    return {
        "step": step,
        "samples": samples,
        "tokens": tokens,
        "optimizer_updates": built.optimizer.updates,
        "loss_scale": scaler,
    }
