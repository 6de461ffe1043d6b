"""What tensors take between steps, as it is measured, is what the plan says of them, kind by kind."""

from typing import Any

import pytest
import torch

from megaspec.core.units import MIB
from megaspec.estimate.memory import memory_of
from megaspec.log.events import MemoryHeld
from megaspec.parallelism.mesh import Mesh
from megaspec.runtime.build import build, initialise, mesh_of
from megaspec.runtime.held import memory_held
from tests.ranks import RankPool
from tests.runtime.specs import SGD, spec
from tests.runtime.test_weights import KINDS, step

# weights so large that buffers of angles and of numbers are nothing beside them
WIDE: dict[str, Any] = {
    "model": {
        "kind": "decoder", "n_layers": 2, "d_model": 256, "n_heads": 4, "n_kv_heads": 2, "d_ffn": 512,
        "vocab_size": 512,
    },
    "data": {"kind": "synthetic", "vocab_size": 512, "seq_len": 16, "masked": 0.2},
}  # fmt: skip
SHARED: dict[str, dict[str, Any]] = {
    "replicate": {"parallelism.dp_replicate": 2},
    "zero1": {"parallelism.dp_shard": 2, "parallelism.dp_strategy": "zero1"},
    "zero2": {"parallelism.dp_shard": 2, "parallelism.dp_strategy": "zero2"},
    "fsdp": {"parallelism.dp_shard": 2, "parallelism.dp_strategy": "fsdp"},
    "tp": {"parallelism.tp": 2},
}


def hold_to_the_plan(held: MemoryHeld, changes: dict[str, Any]) -> None:
    planned = memory_of(spec(WIDE | changes), device="cpu")[0]
    for kind in ("weights", "gradients", "optimizer"):
        wanted = getattr(planned, kind)
        assert getattr(held, kind) == pytest.approx(wanted, rel=0.03, abs=0.02 * MIB), kind


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "offload"])
def test_kinds_are_those_of_the_plan(kind: str) -> None:
    changes = KINDS[kind]
    built = build(spec(WIDE | changes), mesh=Mesh({}, rank=0, device=torch.device("cpu")))
    initialise(built)
    step(built, lr=1e-3)
    hold_to_the_plan(memory_held(built, step=1), changes)


def test_a_master_that_is_the_weight_counts_once() -> None:
    changes = {"precision": {"kind": "fp32"}, "optim": SGD}
    built = build(spec(WIDE | changes), mesh=Mesh({}, rank=0, device=torch.device("cpu")))
    held = memory_held(built, step=0)
    parameters = sum(one.numel() for one in built.parameters.values())
    assert held.weights >= 4 * parameters
    assert held.gradients == pytest.approx(4 * parameters, rel=0.01)
    # plain SGD has a velocity where it has a momentum
    assert held.optimizer == pytest.approx(4 * parameters * bool(built.optimizer.state()), rel=0.01, abs=64)


def _held_on_a_rank(rank: int, changes: dict[str, Any]) -> MemoryHeld:
    made = spec(WIDE | changes)
    built = build(made, mesh=mesh_of(made, rank=rank, device=torch.device("cpu")))
    initialise(built)
    return memory_held(built, step=0)


@pytest.mark.parametrize("layout", SHARED)
def test_so_they_are_where_ranks_share_them(layout: str, pool: RankPool) -> None:
    changes = {"precision": {"kind": "bf16"}} | SHARED[layout]
    for held in pool.run(_held_on_a_rank, changes, ranks=2):
        hold_to_the_plan(held, changes)
