"""The weights that a run starts with: read from the folder that `init` names, or drawn from the seed."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from megaspec.checkpoint.comm import Comm, on_first, together
from megaspec.checkpoint.examine import no_objections
from megaspec.checkpoint.fallback import fallback_dir_of
from megaspec.checkpoint.opening import open_saved
from megaspec.checkpoint.reader import Weights
from megaspec.core.errors import CheckpointError
from megaspec.hf.digest import folder_digest
from megaspec.hf.folder import CONFIG, HfFolder, open_hf_folder
from megaspec.hf.names import weight_table
from megaspec.hf.table import family_of, read_model
from megaspec.hf.weights import HfWeights
from megaspec.parallelism.expert import buffers_of
from megaspec.rules.initial_weights import initial_weights
from megaspec.runtime.build import TrainState, initialise
from megaspec.runtime.source_weights import SourceWeights
from megaspec.runtime.state import fill
from megaspec.spec import Spec, WeightsOrigin

_OTHER = "has changed since the run was made, whose weights begin with it"


def start_from_source(built: TrainState, comm: Comm) -> None:
    """Fills the master weights and copies them into the model. Each rank reads the slices that it owns, a tensor at a
    time; what the Spec does not read is drawn from the seed. All ranks call it together.

    CheckpointError, on all ranks: the folder is gone, is another one than the run was made with, or is damaged.
    """
    origin = built.spec.weights_from
    if origin is None:
        initialise(built)
        return
    with ExitStack() as stack:
        source = _open(built.spec, origin, comm, stack)
        shapes = {name: source.shape(name) for name in source.names()}
        found = initial_weights(built.spec.init, built.spec.model.facts, theirs=shapes)
        drawn = [*found.drawn, *found.missing]
        said = found.read.keys() | set(drawn)
        for name in built.optimizer.masters:
            # nobody would fill it: it would stay NaN
            assert f"model/{name}" in said, f"{name} is neither read nor drawn, of {sorted(said)}"
        if drawn:
            initialise(built)
        ours = SourceWeights(
            source,
            found.read,
            new_rows=built.spec.init.new_rows,
            starts=built.starts,
            seed=built.spec.train.seed,
            wide=built.wide,
        )
        # one rank may meet NaN in its slices: the others would wait for its weights
        together(comm, partial(_fill, built, ours))
    built.optimizer.write_back()
    built.data_parallel.gather_weights()


def _open(spec: Spec, origin: WeightsOrigin, comm: Comm, stack: ExitStack) -> Weights:
    """The folder that the run was made with, opened on every rank. CheckpointError."""
    if origin.step is not None:
        source = Path(origin.path)
        fallback_dir = on_first(comm, lambda: fallback_dir_of(source))
        reader = open_saved(source, fallback_dir, comm, step=origin.step, inspect=no_objections)
        stack.enter_context(reader)
        if reader.manifest.digest != origin.digest:
            raise CheckpointError(f"{reader.path} {_OTHER}; put it back, or start a new run")
        return reader
    opened: list[HfWeights] = []

    def open_folder() -> None:
        folder = stack.enter_context(open_hf_folder(Path(origin.path)))
        if comm.rank == 0:
            _refuse_other(folder, origin)
        opened.append(_hf_weights(folder))

    together(comm, open_folder)
    return opened[0]


def _refuse_other(folder: HfFolder, origin: WeightsOrigin) -> None:
    """CheckpointError: a restart from step 0 would begin with other weights. Reads every byte."""
    if folder_digest(folder) != origin.digest:
        raise CheckpointError(f"{origin.path} {_OTHER}; put it back, or start a new run")


def _hf_weights(folder: HfFolder) -> HfWeights:
    where = f"{folder.path / CONFIG}"
    model = read_model(folder.config, where)
    family = family_of(folder.config, where)
    return HfWeights(folder, weight_table(model.facts, family.names(model)))


@torch.no_grad()
def _fill(built: TrainState, source: SourceWeights) -> None:
    """What this rank owns of the weights that are read."""
    for name, master in built.optimizer.masters.items():
        stored = f"model/{name}"
        if stored in source:
            value = torch.empty_like(master)
            fill(value, built.shards[name], stored, source)
            built.optimizer.put("master", name, value)
    for name, buffer in buffers_of(built.chunks).items():
        stored = f"router/{name}"
        if stored in source:
            buffer.copy_(source.read(stored))
