"""What ranks run in the parity tests."""

from dataclasses import asdict
from functools import lru_cache
from typing import Any

import torch

from megaspec.parallelism.mesh import Mesh
from megaspec.runtime.build import build, initialise
from megaspec.runtime.parity import Gathered, Trajectory, run_steps
from tests.parity.cases import Case, alone, batches_of, empty_sequences, spec_of
from tests.ranks import RankPool


def train(
    rank: int, case: Case, empty: list[int], steps: int, *, device: str = "cpu", round_to: str | None = None
) -> dict[str, Any] | None:
    """Trains a case. -> the trajectory as plain data, from rank 0."""
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    mesh = Mesh({"tp": case.tp, "dp_replicate": case.dp}, rank=rank, device=where)
    trajectory = run_steps(
        spec_of(case, device=device),
        mesh=mesh,
        batches=batches_of(case, empty, steps),
        loss_scale=case.scale,
        round_weights_to=getattr(torch, round_to) if round_to else None,
    )
    return plain(trajectory) if rank == 0 else None


def plain(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory that can leave the process: tensors as numpy arrays."""
    fields = asdict(trajectory)
    for part in ("gradients", "weights"):
        fields[part]["values"] = {n: t.numpy() for n, t in fields[part]["values"].items()}
    return fields


def trajectory_of(fields: dict[str, Any]) -> Trajectory:
    """The way back from `plain`."""
    gathered = {
        part: Gathered(
            {n: torch.from_numpy(a) for n, a in fields[part]["values"].items()},
            fields[part]["replica_gap"],
            fields[part]["padding"],
        )
        for part in ("gradients", "weights")
    }
    return Trajectory(**{**fields, **gathered})


def run_case(pool: RankPool, case: Case, *, steps: int, device: str = "cpu", round_to: str | None = None) -> Trajectory:
    """Trains a case on the pool's ranks."""
    more = {"device": device, "round_to": round_to}
    return trajectory_of(pool.run(train, case, empty_sequences(case), steps, ranks=case.ranks, **more)[0])


@lru_cache(maxsize=64)
def _alone(case: Case, empty: tuple[int, ...], steps: int, device: str, round_to: str | None) -> Trajectory:
    return trajectory_of(train(0, case, list(empty), steps, device=device, round_to=round_to))


def truth_of(case: Case, *, steps: int, device: str = "cpu", round_to: str | None = None) -> Trajectory:
    """The one-rank run on the same batches, in this process."""
    torch.set_num_threads(1)
    return _alone(alone(case), tuple(empty_sequences(case)), steps, device, round_to)


@torch.no_grad()
def logits(rank: int, case: Case) -> Any:
    """The logits of the first batch at the initial weights, on every rank, as a numpy array."""
    mesh = Mesh({"tp": case.tp, "dp_replicate": case.dp}, rank=rank, device=torch.device("cpu"))
    built = build(spec_of(case), mesh=mesh)
    initialise(built)
    batch = batches_of(case, [], 1)[0]
    return built.model(batch.tokens, batch.documents).numpy()
