"""A step costs three matrix products for each linear layer and for the output head, in every layout."""

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megaspec.precision.scaler import build_scaler
from megaspec.runtime.build import build, initialise, mesh_of
from megaspec.runtime.step import train_step
from megaspec.verify.parity import divide
from tests.parity.cases import Case, batches_of, spec_of
from tests.ranks import RankPool

LINEARS_AND_HEAD = 2 * 4 + 1


def count(rank: int, case: Case) -> int:
    """Matrix products of one step on one rank; those of attention are batched and not counted."""
    spec = spec_of(case)
    mesh = mesh_of(spec, rank=rank, device=torch.device("cpu"))
    built = build(spec, mesh=mesh)
    initialise(built)
    mine = divide(batches_of(case, [], 1)[0], mesh=mesh, micro_batch=spec.train.micro_batch)
    scaler = build_scaler(spec.precision, device=mesh.device)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        train_step(built, mine, lr=1e-3, weight_decay=0.1, scaler=scaler)
    return sum(e.name.rstrip("_") in ("aten::mm", "aten::addmm") for e in seen.events())


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(family="gpt", attention="reference", cross_entropy="reference", accumulate=3),
        Case(tp=2, sequence=True, family="gpt", tied=True),
        Case(tp=4, dp=2, kv_heads=2, accumulate=3),
    ],
    ids=str,
)
def test_three_products_for_each_layer(pool: RankPool, case: Case) -> None:
    expected = 3 * LINEARS_AND_HEAD * case.accumulate
    assert pool.run(count, case, ranks=case.ranks) == [expected] * case.ranks


@pytest.mark.parametrize(
    ("trainable", "products"),
    [
        # 16 linears and the head forward; then input gradients, of the head last; then weight gradients
        ("norms", 17 + 16 + 1),
        ("head", 17 + 1 + 1),
        ("upper", 17 + 12 + 1 + 8),
        ("lower", 17 + 16 + 1 + 4),
        # nothing is trained before the first layer's last product
        ("down", 17 + 12 + 1 + 4),
        ("embedding", 17 + 16 + 1),
    ],
)
@pytest.mark.parametrize("way", [{}, {"tp": 2}, {"pp": 2, "schedule": "zb_h1"}], ids=str)
def test_no_product_for_what_is_frozen(pool: RankPool, way: dict[str, Any], trainable: str, products: int) -> None:
    case = Case(n_layers=4, trainable=trainable, **way)
    of_ranks = pool.run(count, case, ranks=case.ranks)
    if case.pp > 1:
        assert sum(of_ranks) == products
    else:
        assert of_ranks == [products] * case.ranks
