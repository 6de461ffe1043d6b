"""What ranks run for `megaspec eval`: the weights of a checkpoint on any layout, and the loss of each evaluation set.

FOLDER/spec.json      the run as it is evaluated: its layout, sets and kernels (see `for_evaluation`)
FOLDER/trained.json   the run as it is trained, whose own the checkpoint has to be
FOLDER/evaluated.json written by rank 0
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

from megaspec.checkpoint.comm import Comm, DistComm, SoloComm
from megaspec.checkpoint.opening import open_saved
from megaspec.checkpoint.reader import Reader
from megaspec.core.errors import CheckpointError, Preempted
from megaspec.launcher.rendezvous import Rendezvous
from megaspec.plugins import load
from megaspec.rules.belonging import objections, other_place
from megaspec.runtime.build import TrainState, build, mesh_of
from megaspec.runtime.evaluation import Evaluation
from megaspec.runtime.position import Position
from megaspec.runtime.rank import RankInfo, bounded, exit_code_of, join_world, leave_world, pick_device, read_spec
from megaspec.runtime.state import fill, load_buffers, load_largest, tell_passed_over, wrong_names
from megaspec.spec import Spec

TRAINED = "trained.json"
EVALUATED = "evaluated.json"


def main(
    run_dir: str,
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    attempt: int,
    store: Rendezvous,
    timeout_seconds: float,
    step: int | None,
    plugins: Sequence[str] = (),
) -> int:
    """Evaluates what stands in the folder `run_dir`. `step`: of the checkpoint; None: the newest good one.
    -> exit code (core/errors.py)."""
    me = RankInfo(rank, world_size, local_rank, attempt, store, timeout_seconds)

    def evaluate() -> None:
        load(plugins)
        evaluate_checkpoint(Path(run_dir), me, step)

    return exit_code_of(me, evaluate)


def evaluate_checkpoint(folder: Path, me: RankInfo, step: int | None) -> None:
    """Builds, loads the weights and evaluates; rank 0 writes what came of it. Preempted: asked to stop meanwhile."""
    spec = read_spec(folder)
    trained = Spec.model_validate_json((folder / TRAINED).read_bytes())
    device = pick_device(spec, me.local_rank)
    with ExitStack() as stack:
        comm: Comm = SoloComm()
        if me.world_size > 1:
            join_world(me, device)
            stack.push(leave_world)
            comm = DistComm(device=device)
        position = Position(device)
        stack.enter_context(bounded(position, me))
        timeout = timedelta(seconds=me.timeout_seconds)
        built = build(spec, mesh=mesh_of(spec, rank=me.rank, device=device, timeout=timeout), position=position)
        reader = stack.enter_context(open_checkpoint(trained, comm, step))
        if me.rank == 0:
            tell_passed_over(reader)
        load_masters(built, reader)
        evaluated = Evaluation(built).run()
        if evaluated is None:
            raise Preempted("stopped before all was evaluated: nothing is lost, start again")
        if me.rank == 0:
            sets = {name: asdict(one) for name, one in evaluated.sets.items()}
            found = {"step": reader.step, "valid_loss": evaluated.loss, "sets": sets}
            (folder / EVALUATED).write_text(json.dumps(found))


def open_checkpoint(trained: Spec, comm: Comm, step: int | None) -> Reader:
    """A checkpoint of a run, good in every byte, see `open_saved`. CheckpointError: there is none."""
    inspect = partial(objections, run=trained)
    return open_saved(Path(trained.run_dir), other_place(trained), comm, step=step, inspect=inspect)


@torch.no_grad()
def load_masters(built: TrainState, reader: Reader) -> None:
    """Fills the weights, and what routers and delayed scales of fp8 keep: what an optimizer keeps is not read. Raises
    CheckpointError."""
    masters = built.optimizer.masters
    wanted = {f"model/{name}": built.shards[name].shape for name in masters}
    elsewhere = built.tensor_parallel.layouts.keys() - built.shards.keys()
    problems = wrong_names(reader.manifest, wanted, within=("model/",), elsewhere=elsewhere)
    if problems:
        raise CheckpointError([f"{reader.path}: {problem}" for problem in problems])
    for name, master in masters.items():
        value = torch.empty_like(master)
        fill(value, built.shards[name], f"model/{name}", reader)
        built.optimizer.put("master", name, value)
    load_buffers(built.chunks, reader)
    load_largest(built, reader)
    built.optimizer.write_back()
    built.data_parallel.gather_weights()
