"""Whole matrices out of shares: Muon on ranks that hold rows, columns, copies or nothing, against one rank in fp64."""

import json
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from megaspec.core.layout import Layout, Piece, replicated, rows, whole
from megaspec.nn.model_facts import consecutive
from megaspec.optim.optimizer import build_optimizer
from megaspec.optim.spec import OptimSpec
from megaspec.parallelism import whole_matrices
from megaspec.parallelism.whole_matrices import WholeMatrices, _whole_matrices, share_out
from tests.ranks import RankPool

# Global parameters; the rows of wqkv, experts and gate_up are several matrices.
SHAPES = {"wqkv": (16, 6), "gate_up": (14, 6), "down": (6, 7), "experts": (24, 5), "square": (8, 8), "norm": (6,)}
MATRICES = {
    "wqkv": consecutive(8, 4, 4),
    "gate_up": consecutive(7, 7),
    "down": consecutive(6),
    "experts": consecutive(*(3,) * 8),
    "square": consecutive(8),
}
SPEC = TypeAdapter(OptimSpec).validate_json(json.dumps({"kind": "muon", "lr": 1.0, "momentum": 0.9}))
STEPS = 3


def columns(name, begin, end):
    n_rows, n_in = SHAPES[name]
    return Layout(name, (n_rows, n_in), (n_rows, end - begin), (Piece((0, begin), (0, 0), (n_rows, end - begin)),))


def picked(name, *spans):
    """Some global rows of a parameter, one below the other."""
    n_in, pieces, at = SHAPES[name][1], [], 0
    for first, last in spans:
        pieces.append(Piece((first, 0), (at, 0), (last - first, n_in)))
        at += last - first
    return Layout(name, SHAPES[name], (at, n_in), tuple(pieces))


def copies(rank, ranks):
    return {n: replicated(whole(n, s), index=rank, count=ranks) for n, s in SHAPES.items()}


def row_shards(rank, ranks):
    """The first of `ranks` has no row of anything, the others all but evenly many."""
    bounds = {n: [0, 0, *(s[0] * r // (ranks - 1) for r in range(1, ranks - 1)), s[0]] for n, s in SHAPES.items()}
    return {n: rows(whole(n, s), *bounds[n][rank : rank + 2]) for n, s in SHAPES.items()}


def tensor(rank):
    """Two tensor-parallel ranks: outputs or inputs split, experts split, keys and values on both."""
    both = {"replica": rank, "copies": 2}
    wqkv = picked("wqkv", (4 * rank, 4 * rank + 4), (8, 12), (12, 16))
    pieces = (wqkv.pieces[0], *(replace(p, **both) for p in wqkv.pieces[1:]))
    return {
        "wqkv": replace(wqkv, pieces=pieces),
        "gate_up": picked("gate_up", *(((0, 4), (7, 11)) if rank == 0 else ((4, 7), (11, 14)))),
        "down": columns("down", *((0, 4) if rank == 0 else (4, 7))),
        "experts": picked("experts", (12 * rank, 12 * rank + 12)),
        "square": whole("square", SHAPES["square"], **both),
        "norm": whole("norm", SHAPES["norm"], **both),
    }


def tensor_and_rows(rank):
    """Two by two: each tensor-parallel rank's rows are shared out again, 3 to 1."""
    shares = {}
    for name, layout in tensor(rank % 2).items():
        n = layout.local_shape[0]
        shares[name] = rows(layout, *((0, 3 * n // 4) if rank < 2 else (3 * n // 4, n)))
    return shares


def tensor_and_copies(rank):
    return {n: replicated(layout, index=rank // 2, count=2) for n, layout in tensor(rank % 2).items()}


LAYOUTS = {
    "copies-2": (2, lambda r: copies(r, 2)),
    "rows-2": (2, lambda r: row_shards(r, 2)),
    "tensor-2": (2, tensor),
    "copies-4": (4, lambda r: copies(r, 4)),
    "rows-4": (4, lambda r: row_shards(r, 4)),
    "tensor-rows-4": (4, tensor_and_rows),
    "tensor-copies-4": (4, tensor_and_copies),
}


def values(step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(step)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for n, s in SHAPES.items()}


def share_of(layout, value):
    out = torch.zeros(layout.local_shape, dtype=value.dtype)
    for piece in layout.pieces:
        out[piece.local_slices] = value[piece.global_slices]
    return out


def trained(layouts, group, *, dtype=torch.float64, round_elements=1 << 27):
    device = torch.device("cpu")
    matrices = WholeMatrices(layouts, MATRICES, group=group, device=device, round_elements=round_elements)
    weights = {n: share_of(layout, values(0, dtype)[n]) for n, layout in layouts.items()}
    optimizer = build_optimizer(weights, SPEC, adamw="torch", matrices=matrices)
    wide = torch.promote_types(dtype, torch.float32)
    for step in range(1, STEPS + 1):
        gradients = {n: share_of(layout, values(step, wide)[n]) for n, layout in layouts.items()}
        two = torch.tensor(2.0, dtype=wide)
        optimizer.update(gradients, lr=0.1, weight_decay=0.1, divide_by=two, skip=torch.zeros(()))
    return optimizer, matrices


def one_rank(dtype=torch.float64):
    optimizer, _ = trained({n: whole(n, s) for n, s in SHAPES.items()}, None, dtype=dtype)
    return optimizer


def errors_of(rank, layout, round_elements, is_far=False, dtype=torch.float64):
    """Largest difference of this rank's shares from one rank's, and the matrices that it owns.

    `is_far`: owners are chosen as if it took no time to send, so that they rather have nothing of their matrices.
    """
    layouts = LAYOUTS[layout][1](rank)
    with patch.object(whole_matrices, "_OPERATIONS_PER_ELEMENT", 0 if is_far else 16_000):
        optimizer, matrices = trained(layouts, dist.group.WORLD, dtype=dtype, round_elements=round_elements)
    truth = one_rank(dtype)
    worst = 0.0
    for kind, held in {"master": optimizer.masters, **optimizer.state()}.items():
        there = truth.masters if kind == "master" else truth.state()[kind]
        for name, tensor in held.items():
            difference = (tensor - share_of(layouts[name], there[name])).abs()
            worst = max(worst, difference.max().item() if difference.numel() else 0.0)
    return {"error": worst, "owned": matrices.owned, "updates": optimizer.updates}


@pytest.fixture(scope="module")
def pool():
    with RankPool() as pool:
        yield pool


@pytest.mark.parametrize(
    ("round_elements", "is_far"), [(1 << 27, False), (50, True)], ids=["one-round", "many-rounds-far"]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_on_one_rank(pool, layout, round_elements, is_far):
    ranks = LAYOUTS[layout][0]
    found = pool.run(errors_of, layout, round_elements, is_far, ranks=ranks)
    assert max(one["error"] for one in found) < 1e-12
    assert {one["updates"] for one in found} == {STEPS}
    # every matrix has one owner
    assert sum(len(one["owned"]) for one in found) == sum(map(len, MATRICES.values()))
    assert not is_far or all(one["owned"] for one in found)


def test_narrow_weights(pool):
    """In bf16 with fp32 masters: the same up to the order of fp32's products."""
    found = pool.run(errors_of, "tensor-rows-4", 200, True, torch.bfloat16, ranks=4)
    assert max(one["error"] for one in found) < 1e-4


def sent(rank, layout):
    """Elements of matrices that leave this rank: of the momentum, and of the steps."""
    _, matrices = trained(LAYOUTS[layout][1](rank), dist.group.WORLD)
    counts = []
    for messages in ("gather", "scatter"):
        parts = [
            part.numel
            for one in matrices._rounds
            for to, held in getattr(one, messages).sent.items()
            for _, part in held
            if to != rank
        ]
        counts.append(sum(parts))
    return counts


def test_what_travels(pool):
    elements = sum(n * m for n, m in (s for name, s in SHAPES.items() if name in MATRICES))
    found = pool.run(sent, "copies-4", ranks=4)
    # with copies no momentum travels, and each step goes to the three others
    assert [sum(column) for column in zip(*found, strict=True)] == [0, 3 * elements]
    # of shares each element travels at most once either way
    momentum, steps = (sum(column) for column in zip(*pool.run(sent, "rows-4", ranks=4), strict=True))
    assert momentum == steps < elements


def test_owners_are_balanced():
    """No rank has much more than its part, wherever the matrices lie."""
    layouts = {f"m{i}": whole(f"m{i}", (64, 64 * (1 + i % 3))) for i in range(40)}

    matrices = [w for n, one in layouts.items() for w in _whole_matrices(n, consecutive(64), [one] * 8)]
    share_out(matrices, ranks=8)
    loads = [sum(w.operations for w in matrices if w.owner == rank) for rank in range(8)]
    assert max(loads) < 1.15 * sum(loads) / 8


def test_a_matrix_that_ranks_do_not_hold_whole_is_refused():
    lacking = {"down": rows(whole("down", (6, 7)), 0, 5)}
    with pytest.raises(AssertionError, match="down: ranks hold 35 elements"):
        WholeMatrices(lacking, {"down": consecutive(6)}, group=None, device=torch.device("cpu"))
