"""Every strategy of data parallelism trains the model of one rank; what it shares out is held nowhere twice."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from megaspec.parallelism.mesh import Mesh
from megaspec.precision.scaler import build_scaler
from megaspec.runtime.build import Built, build, initialise
from megaspec.runtime.parity import Tolerances, Trajectory, compare, divide, run_steps
from megaspec.runtime.step import evaluate, train_step
from megaspec.spec import Spec
from tests.parity.cases import Case, batches_of, empty_sequences, spec_of
from tests.parity.tasks import plain, trajectory_of, truth_of
from tests.ranks import RankPool

STEPS = 4
# Rounding: 4e-15 in gradients was the most that was seen.
EXACT = Tolerances(loss=1e-14, norm=1e-13, gradient=1e-13, weight=1e-13)


@dataclass(frozen=True)
class Shared:
    """A case of the parity tests in another strategy; `case.dp` counts all data-parallel ranks."""

    case: Case
    strategy: str
    replicas: int = 1
    grad_reduce: str = "fp32"
    bucket_mb: float = 0.02

    @property
    def degrees(self) -> dict[str, int]:
        return {
            "tp": self.case.tp,
            "dp_replicate": self.replicas,
            "dp_shard": self.case.dp // self.replicas,
        }

    def __str__(self) -> str:
        words = [self.strategy, f"{self.replicas} replicas" if self.replicas > 1 else "", f"bucket {self.bucket_mb}"]
        words.append("bf16 reduction" if self.grad_reduce == "bf16" else "")
        return " ".join(w for w in [*words, str(self.case)] if w)


def spec_for(shared: Shared, *, device: str = "cpu") -> Spec:
    fields = spec_of(shared.case, device=device).model_dump(mode="json")
    fields["parallelism"] |= {
        **shared.degrees,
        "dp_strategy": shared.strategy,
        "grad_reduce": shared.grad_reduce,
        "bucket_mb": shared.bucket_mb,
    }
    return Spec.model_validate_json(json.dumps(fields))


def mesh_for(rank: int, shared: Shared, *, device: str = "cpu") -> Mesh:
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    return Mesh(shared.degrees, rank=rank, device=where)


def train(rank: int, shared: Shared, empty: list[int], steps: int, *, device: str = "cpu") -> dict[str, Any] | None:
    """-> the trajectory as plain data, from rank 0."""
    trajectory = run_steps(
        spec_for(shared, device=device),
        mesh=mesh_for(rank, shared, device=device),
        batches=batches_of(shared.case, empty, steps),
        loss_scale=shared.case.scale,
    )
    return plain(trajectory) if rank == 0 else None


def run(pool: RankPool, shared: Shared, *, steps: int = STEPS, device: str = "cpu") -> Trajectory:
    fields = pool.run(train, shared, empty_sequences(shared.case), steps, ranks=shared.case.ranks, device=device)[0]
    return trajectory_of(fields)


def check(pool: RankPool, shared: Shared, tolerances: Tolerances = EXACT, *, device: str = "cpu") -> None:
    truth = truth_of(shared.case, steps=STEPS, device=device)
    findings = compare(run(pool, shared, device=device), truth, tolerances)
    wrong = [str(f) for f in findings if not f.passed]
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool() as ranks:
        yield ranks


PLAIN = Case(dp=2, mask="uneven", kv_heads=2)
CASES = [
    PLAIN,
    Case(dp=2, accumulate=3, mask="uneven", kv_heads=1, tied=True, pad=8),
    Case(dp=2, accumulate=3, mask="empty_rank", family="gpt", tied=True, optimizer="sgd"),
    Case(tp=2, dp=2, sequence=True, accumulate=3, mask="uneven", kv_heads=1, pad=8),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_a_strategy_equals_one_rank(pool: RankPool, strategy: str, case: Case) -> None:
    check(pool, Shared(case, strategy))
