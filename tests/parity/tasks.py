"""What ranks run in the parity tests."""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch._inductor import config as inductor_config

from megaspec.runtime.build import build, initialise, mesh_of
from megaspec.verify.parity import Gathered, Trajectory, run_steps
from tests.parity.cases import Case, Empty, alone, batches_of, empty_of, spec_of
from tests.ranks import RankPool, gpu_of

PARTS = ("gradients", "weights", "routers")
"""Of a trajectory, what holds tensors."""


def without_cpp() -> AbstractContextManager[None]:
    """What is compiled calls torch's operations, in the order and the memory that inductor plans for them.

    On a CPU a compiler takes a second or two for each kernel in C++ that inductor would write, twenty for two layers.
    tests/nn compiles layers with them, tests/gpu whole models with kernels of a GPU.
    """
    return inductor_config.patch(fallback_by_default=True)


def train(
    rank: int, case: Case, empty: Empty, steps: int, *, device: str = "cpu", round_to: str | None = None
) -> dict[str, Any] | None:
    """Trains a case. -> the trajectory as plain data, from rank 0."""
    where = gpu_of(rank) if device == "cuda" else torch.device(device)
    spec = spec_of(case, device=device)
    # what cases before this one have compiled counts towards the limit behind which torch compiles nothing more
    torch._dynamo.reset()
    with without_cpp() if device == "cpu" else nullcontext():
        trajectory = run_steps(
            spec,
            mesh=mesh_of(spec, rank=rank, device=where),
            batches=batches_of(case, empty.sequences, steps, places=empty.places),
            loss_scale=case.scale,
            round_weights_to=getattr(torch, round_to) if round_to else None,
        )
    return plain(trajectory) if rank == 0 else None


def plain(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory that can leave the process: tensors as numpy arrays."""
    fields = dict(vars(trajectory))
    for part in PARTS:
        gathered: Gathered = fields[part]
        fields[part] = vars(gathered) | {"values": {n: t.numpy() for n, t in gathered.values.items()}}
    return fields


def trajectory_of(fields: dict[str, Any]) -> Trajectory:
    """The way back from `plain`."""
    gathered = {
        part: Gathered(
            {n: torch.from_numpy(a) for n, a in fields[part]["values"].items()},
            fields[part]["replica_gap"],
            fields[part]["padding"],
        )
        for part in PARTS
    }
    return Trajectory(**{**fields, **gathered})


def run_case(pool: RankPool, case: Case, *, steps: int, device: str = "cpu", round_to: str | None = None) -> Trajectory:
    """Trains a case on the pool's ranks."""
    more = {"device": device, "round_to": round_to}
    return trajectory_of(pool.run(train, case, empty_of(case), steps, ranks=case.ranks, **more)[0])


@lru_cache(maxsize=256)
def _alone(case: Case, empty: Empty, steps: int, device: str, round_to: str | None) -> Trajectory:
    return trajectory_of(train(0, case, empty, steps, device=device, round_to=round_to))


def truth_of(case: Case, *, steps: int, device: str = "cpu", round_to: str | None = None) -> Trajectory:
    """The one-rank run on the same batches, in this process."""
    torch.set_num_threads(1)
    return _alone(alone(case), empty_of(case), steps, device, round_to)


@torch.no_grad()
def logits(rank: int, case: Case) -> Any:
    """The logits of the first batch at the initial weights, on every rank, as a numpy array."""
    spec = spec_of(case)
    built = build(spec, mesh=mesh_of(spec, rank=rank, device=torch.device("cpu")))
    initialise(built)
    batch = batches_of(case, [], 1)[0]
    return built.model(batch.tokens, batch.documents).numpy()
