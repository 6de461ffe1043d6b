"""The comparison itself: what it must notice, and what it must not stumble over."""

import importlib
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from megaspec.core.layout import Layout, Piece
from megaspec.data.batch import Batch
from megaspec.parallelism.mesh import Mesh
from megaspec.runtime.build import build, initialise
from megaspec.verify.parity import (
    TOLERANCES,
    Finding,
    Gathered,
    Trajectory,
    assemble,
    compare,
    divide,
    gradient_errors,
    run_steps,
)
from tests import source_patch
from tests.parity.cases import SEQUENCES, Case, batches_of, spec_of
from tests.parity.tasks import truth_of
from tests.ranks import RankDied, RankPool
from tests.source_patch import Patch

NAN = float("nan")


def half(start: int, *, replica: int = 0) -> Layout:
    return Layout("w", (4,), (3,), (Piece((start,), (0,), (2,), replica),))


def test_assemble_puts_pieces_where_they_belong() -> None:
    value, gap, padding = assemble([(half(2), torch.tensor([3.0, 4.0, 0.0])), (half(0), torch.tensor([1.0, 2.0, 0.0]))])
    assert value.tolist() == [1, 2, 3, 4]
    assert gap == padding == 0


def test_assemble_sees_copies_that_differ_and_padding_that_is_not_zero() -> None:
    shares = [
        (half(0), torch.tensor([1.0, 2.0, -5.0])),
        (half(2), torch.tensor([3.0, 4.0, 0.0])),
        (half(0, replica=1), torch.tensor([1.0, 2.25, 0.0])),
    ]
    _, gap, padding = assemble(shares)
    assert (gap, padding) == (0.25, 5.0)
    shares[2] = (half(0, replica=1), torch.tensor([1.0, NAN, 0.0]))
    assert assemble(shares)[1] == float("inf")


def test_assemble_refuses_a_hole() -> None:
    with pytest.raises(AssertionError, match="no rank holds 2 elements of w"):
        assemble([(half(2), torch.zeros(3))])


def trajectory(loss: float = 2.0, gradient: float = 1.0) -> Trajectory:
    weights = Gathered({"w": torch.ones(2).double(), "b": torch.zeros(2).double()}, {"w": 0.0, "b": 0.0}, {"w": 0.0})
    gradients = replace(
        weights, values={"w": torch.full((2,), gradient, dtype=torch.float64), "b": torch.zeros(2).double()}
    )
    return Trajectory([loss, 1.5], [2**0.5 * gradient, 1.0], 1.25, gradients, weights)


def failed(run: Trajectory) -> list[str]:
    return [f.what for f in compare(run, trajectory(), TOLERANCES["fp64"]) if not f.passed]


def test_equal_runs_pass() -> None:
    assert failed(trajectory()) == []


def test_each_quantity_is_compared() -> None:
    assert failed(trajectory(loss=2.0 + 1e-9)) == ["loss at step 1", "loss at step 1"]
    assert "gradient of w" in failed(trajectory(gradient=1.0 + 1e-9))
    assert failed(replace(trajectory(), losses=[2.0, 1.5 + 1e-9])) == ["loss at step 2"]
    assert failed(replace(trajectory(), norms=[2**0.5, 1.0 + 1e-6])) == ["gradient norm at step 2"]
    assert failed(replace(trajectory(), evaluation=NAN)) == ["evaluation loss"]
    off = replace(trajectory().weights, replica_gap={"w": 0.0, "b": 1e-300})
    assert failed(replace(trajectory(), weights=off)) == ["copies of weight b"]
    off = replace(trajectory().gradients, padding={"w": 1e-300})
    assert failed(replace(trajectory(), gradients=off)) == ["padding of gradient w"]


def test_what_routers_did_is_compared() -> None:
    seen = Gathered({"router.loads": torch.ones(2).double()}, {"router.loads": 0.0}, {"router.loads": 0.0})
    truth = replace(trajectory(), routers=seen)
    assert all(f.passed for f in compare(truth, truth, TOLERANCES["fp64"]))
    off = replace(seen, values={"router.loads": seen.values["router.loads"] + 1e-9})
    findings = compare(replace(truth, routers=off), truth, TOLERANCES["fp64"])
    assert [f.what for f in findings if not f.passed] == ["router.loads"]
    with pytest.raises(AssertionError, match="different parameters"):
        compare(trajectory(), truth, TOLERANCES["fp64"])


def test_a_zero_gradient_is_measured_against_the_others() -> None:
    truth = {"w": torch.ones(3).double(), "b": torch.zeros(1).double()}
    errors = gradient_errors({"w": truth["w"], "b": torch.full((1,), 1e-17).double()}, truth)
    assert errors["w"] == 0
    assert errors["b"] == pytest.approx(1e-17 / (3 / 4) ** 0.5)
    assert gradient_errors({"w": torch.full((3,), NAN).double(), "b": truth["b"]}, truth)["w"] != 0


def test_nan_fails() -> None:
    assert not Finding("x", NAN, 1.0).passed
    assert Finding("x", NAN, 1.0).margin == float("inf")
    gradients = replace(trajectory().gradients, values={"w": torch.full((2,), NAN).double(), "b": torch.zeros(2)})
    assert "gradient of w" in failed(replace(trajectory(), gradients=gradients))


def test_micro_batches_cover_a_global_batch_in_order() -> None:
    batch = Batch(*(torch.arange(12).view(12, 1),) * 3, ids=torch.arange(12))

    class Place:
        device = torch.device("cpu")

        def __init__(self, rank: int):
            self.rank = rank

        def size(self, axis: str) -> int:
            return 2

        def index(self, axis: str) -> int:
            return self.rank

    found = [[b.ids.tolist() for b in divide(batch, mesh=Place(r), micro_batch=2)] for r in (0, 1)]
    assert found == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]
    with pytest.raises(AssertionError, match="12 sequences don't divide"):
        divide(batch, mesh=Place(0), micro_batch=4)


def test_a_batch_without_a_single_valid_token_moves_nothing_by_gradient() -> None:
    spec = spec_of(Case(optimizer="sgd"))
    mesh = Mesh({}, rank=0, device=torch.device("cpu"))
    batch = batches_of(Case(), range(SEQUENCES), 1)[0]
    run = run_steps(spec, mesh=mesh, batches=[batch])
    assert run.losses == [0.0]
    assert run.norms == [0.0]
    assert run.evaluation == 0.0
    built = build(spec, mesh=mesh)
    initialise(built)
    for name, weight in built.parameters.items():
        decay = 1e-2 * 0.1 if weight.dim() >= 2 else 0.0
        assert torch.allclose(run.weights.values[name], weight * (1 - decay), rtol=1e-14), name


def test_a_trajectory_learns() -> None:
    """The comparison would mean little between runs that stand still."""
    run = truth_of(Case(), steps=20)
    start = run.gradients.values
    assert all(g.abs().max() > 0 for g in start.values())
    assert len(set(run.losses)) == 20


def test_a_rank_that_fails_is_reported_and_the_pool_goes_on() -> None:
    with RankPool() as pool:
        with pytest.raises(RankDied, match=r"(?s)rank 1 died.*RankError: rank 1"):
            pool.run(fails_on_rank_1, ranks=2)
        assert pool.run(squares, 3, ranks=2) == [(0, 9), (1, 9)]


class RankError(Exception):
    pass


def fails_on_rank_1(rank: int) -> int:
    if rank == 1:
        raise RankError("rank 1")
    return rank


def squares(rank: int, x: int) -> tuple[int, int]:
    return rank, x * x


SOURCE = """
import functools

def twice(x, by=2):
    return by * x + 0

@functools.cache
def kept(x):
    return [y + 1 for y in range(x)]

class Part:
    factor = 3

    @property
    def more(self):
        return self.factor + 10

    @staticmethod
    def less(x):
        return x - 20

    class Inner:
        def same(self):
            return 30

SUM = sum(x + 40 for x in range(2))
TABLE = {"a": lambda x: x + 50}
"""


@pytest.mark.parametrize(
    ("old", "new", "goes_into_functions"),
    [
        ("by * x + 0", "by * x + 1", True),
        ("y + 1 for", "y + 2 for", True),
        ("+ 10", "+ 11", True),
        ("x - 20", "x - 21", True),
        ("return 30", "return 31", True),
        # none of these can be put into what is there: the module is read anew
        ("by=2", "by=3", False),
        ("factor = 3", "factor = 4", False),
        ("range(2)", "range(3)", False),
        ("x + 40", "x + 41", False),
        ("x + 50", "x + 51", False),
        # moves the lines of what follows
        ("return 30", "assert self\n            return 31", False),
    ],
)
def test_a_patch_is_felt_in_a_module_that_is_loaded_already(
    tmp_path, monkeypatch, old, new, goes_into_functions
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(source_patch, "PROJECT", ("patched_here",))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    (tmp_path / "patched_here.py").write_text(SOURCE)
    try:
        loaded = importlib.import_module("patched_here")
        source_patch.install([Patch("patched_here", old, new)])
        assert ("patched_here" in sys.modules) == goes_into_functions
        expected: dict[str, Any] = {}
        exec(compile(SOURCE.replace(old, new), "expected", "exec"), expected)
        found = importlib.import_module("patched_here")
        # whoever has imported a function has the patched one
        assert (found.twice is loaded.twice) == goes_into_functions
        assert results(vars(found)) == results(expected)
    finally:
        sys.modules.pop("patched_here", None)


def results(module: dict[str, Any]) -> list[Any]:
    part = module["Part"]()
    calls = [module["twice"](5), module["kept"](3), part.more, part.less(5), part.Inner().same()]
    return [*calls, part.factor, module["SUM"], module["TABLE"]["a"](5), module["twice"].__defaults__]
