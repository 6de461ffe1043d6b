"""What routers did is told of all layers, whichever rank has them."""

from typing import Any

import pytest
import torch

from megaspec.log.events import RoutersDone
from megaspec.precision.scaler import build_scaler
from megaspec.runtime.build import build, initialise, mesh_of
from megaspec.runtime.router_metrics import router_numbers, routers_done
from megaspec.runtime.step import train_step
from megaspec.verify.parity import divide
from tests.parity.cases import Case, batches_of, spec_of
from tests.ranks import RankPool

ALONE = Case(router="softmax", drop="probs", n_layers=4, every=2, accumulate=6)
SPLIT = Case(
    router="softmax", drop="probs", n_layers=4, every=2, pp=2, dp=2, ep=2, accumulate=3, strategy="zero1"
)  # fmt: skip


def told(rank: int, case: Case) -> Any:
    """The numbers of the first step."""
    spec = spec_of(case)
    built = build(spec, mesh=mesh_of(spec, rank=rank, device=torch.device("cpu")))
    initialise(built)
    mine = divide(batches_of(case, [], 1)[0], mesh=built.mesh, micro_batch=spec.train.micro_batch)
    scaler = build_scaler(spec.precision, device=built.device)
    result = train_step(built, mine, lr=1e-3, weight_decay=0.1, scaler=scaler)
    numbers = router_numbers(built, result.routers).flatten().tolist()
    event = routers_done(built, 1, numbers, steps=5)
    return numbers, event and vars(event)


def test_every_rank_knows_all_layers_and_they_are_what_one_rank_sees() -> None:
    numbers, fields = told(0, ALONE)
    event = RoutersDone(**fields)
    assert event.layers == ["layers.0", "layers.2"]
    assert all(sum(loads) == pytest.approx(8, abs=1e-3) for loads in event.loads)
    assert event.max_violation == [pytest.approx(max(loads) - 1, abs=1e-3) for loads in event.loads]
    assert set(event.losses) == {"aux", "z"}
    assert 0 < max(event.drops) < 1
    with RankPool() as pool:
        for other, _ in pool.run(told, SPLIT, ranks=SPLIT.ranks):
            assert torch.allclose(torch.tensor(other), torch.tensor(numbers), rtol=1e-12)


def test_nothing_is_told_of_a_model_without_experts() -> None:
    assert told(0, Case()) == ([], None)


def test_loads_are_told_now_and_then() -> None:
    spec = spec_of(ALONE)
    built = build(spec, mesh=mesh_of(spec, rank=0, device=torch.device("cpu")))
    numbers = [0.5] * 2 * (6 + 8)
    loads = {step: routers_done(built, step, numbers, steps=250).loads is not None for step in (1, 2, 99, 100, 250)}
    assert loads == {1: True, 2: False, 99: False, 100: True, 250: True}
