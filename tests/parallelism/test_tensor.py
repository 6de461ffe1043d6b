"""Placement rows and layouts: everything is placed, once, and put together it is the model again."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megaspec.core.layout import Layout
from megaspec.core.placement import Row
from megaspec.nn.init import initial_value
from megaspec.nn.linear import Linear
from megaspec.optim.norm import global_norm, local_norms
from megaspec.parallelism.tensor import TensorParallel
from megaspec.runtime.build import build_model
from megaspec.verify.parity import assemble
from megaspec_kernels.registry import kernels_of
from tests.families import FAMILIES
from tests.parity.cases import Case, spec_of

CASES = [
    Case(tp=tp, family=family, kv_heads=kv, pad=pad, tied=tied, sequence=True)
    for family in ("llama", "gpt")
    for tp, kv, pad, tied in ((1, 4, 8, False), (2, 4, 1, True), (2, 1, 8, False), (4, 2, 64, True), (4, 1, 1, False))
]


class OneRank:
    """A rank's place in a mesh without its processes."""

    def __init__(self, tp: int, rank: int):
        self._tp, self._rank = tp, rank

    def size(self, axis: str) -> int:
        return self._tp

    def index(self, axis: str) -> int:
        return self._rank

    def group(self, axis: str) -> object:
        return SimpleNamespace(axis=axis)

    def neighbours(self, axis: str, count: int) -> object:
        return SimpleNamespace(axis=axis, count=count)


def split(case: Case, rank: int) -> tuple[torch.nn.Module, dict[str, Layout]]:
    spec = spec_of(case)
    model = build_model(spec.model, kernels_of(spec.kernels), dtype=torch.float64)
    strategy = TensorParallel(OneRank(case.tp, rank), case.sequence)
    strategy.split_model(model, model.placement)
    return model, strategy.layouts


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layouts_tile_the_global_tensors(case: Case) -> None:
    ranks = [split(case, r) for r in range(case.tp)]
    for name in ranks[0][1]:
        layouts = [layouts[name] for _, layouts in ranks]
        primary = torch.zeros(layouts[0].shape, dtype=torch.int64)
        copies: Counter[tuple] = Counter()
        numbers: dict[tuple, list[int]] = {}
        for (model, _), layout in zip(ranks, layouts, strict=True):
            assert tuple(dict(model.named_parameters())[name].shape) == layout.local_shape, name
            local = torch.zeros(layout.local_shape, dtype=torch.int64)
            for piece in layout.pieces:
                assert primary[piece.global_slices].shape == piece.shape, f"{name}: {piece} leaves the global tensor"
                assert local[piece.local_slices].shape == piece.shape, f"{name}: {piece} leaves the local tensor"
                local[piece.local_slices] += 1
                if piece.replica == 0:
                    primary[piece.global_slices] += 1
                where = (piece.global_start, piece.shape)
                copies[where] += 1
                numbers.setdefault(where, []).append(piece.replica)
            assert local.max() <= 1, f"{name}: pieces overlap in the local tensor"
        assert (primary == 1).all(), f"{name}: first copies don't tile the global tensor"
        for where, found in numbers.items():
            assert sorted(found) == list(range(copies[where])), f"{name}: copies of {where} are numbered {found}"


def shares(case: Case, seed: int = 3) -> list[tuple[dict[str, Layout], dict[str, Tensor]]]:
    """Every rank's layouts and initial values."""
    out = []
    for rank in range(case.tp):
        _, layouts = split(case, rank)
        like = torch.empty(0, dtype=torch.float64)
        out.append((layouts, {n: initial_value(x, seed=seed, std=1.0, constant=None, like=like)
                              for n, x in layouts.items()}))  # fmt: skip
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_start_equal_in_every_layout(case: Case) -> None:
    ranks = shares(case)
    _, alone = shares(Case(family=case.family, kv_heads=case.kv_heads, tied=case.tied))[0]
    assert alone.keys() == ranks[0][0].keys()
    for name, expected in alone.items():
        value, gap, padding = assemble([(layouts[name], values[name]) for layouts, values in ranks])
        assert torch.equal(value, expected), name
        assert gap == padding == 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_norm_counts_every_element_once(case: Case) -> None:
    norms = [local_norms(values, layouts) for layouts, values in shares(case)]
    _, alone = shares(Case(family=case.family, kv_heads=case.kv_heads, tied=case.tied))[0]
    expected = sum(t.square().sum() for t in alone.values()).sqrt()
    assert torch.allclose(torch.stack([n.square for n in norms]).sum().sqrt(), expected, rtol=1e-14)
    assert torch.equal(global_norm(norms[0].square, world_size=1).norm, norms[0].square.sqrt())


def test_parts_are_split_each_on_its_own() -> None:
    """Rank 1 of 2 holds the second half of the queries, the keys and the values."""
    _, layouts = split(Case(tp=2, kv_heads=2), 1)
    starts = [(p.global_start[0], p.local_start[0], p.shape[0]) for p in layouts["layers.0.attn.wqkv.weight"].pieces]
    assert starts == [(16, 0, 16), (32 + 8, 16, 8), (48 + 8, 24, 8)]


def test_key_and_value_heads_are_held_twice_when_there_are_too_few() -> None:
    for rank in range(4):
        _, layouts = split(Case(tp=4, kv_heads=2), rank)
        query, key, value = layouts["layers.0.attn.wqkv.weight"].pieces
        assert (query.global_start[0], query.replica) == (8 * rank, 0)
        assert (key.global_start[0], key.replica) == (32 + 8 * (rank // 2), rank % 2)
        assert (value.global_start[0], value.replica) == (48 + 8 * (rank // 2), rank % 2)


def test_a_rank_may_hold_padding_alone() -> None:
    layouts = [split(Case(tp=4, pad=64), rank)[1]["head.weight"] for rank in range(4)]
    assert [len(x.pieces) for x in layouts] == [1, 1, 0, 0]
    assert {x.local_shape for x in layouts} == {(64, 32)}
    assert layouts[1].pieces[0].shape == (3, 32)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_row_is_refused(family: str) -> None:
    spec = spec_of(Case(family=family))
    model = build_model(spec.model, kernels_of(spec.kernels), dtype=torch.float64)
    with_parameters = [
        row
        for row in model.placement
        if any(n.startswith(row.pattern.replace("*", "0") + ".") for n, _ in model.named_parameters())
    ]
    # of layer 0: a flat decoder's has one mixer, a parallel one one norm
    assert len(with_parameters) >= {"flat": 6, "parallel": 8}.get(family, 9)
    for row in with_parameters:
        rest = tuple(r for r in model.placement if r is not row)
        with pytest.raises(AssertionError, match="no placement row covers the parameter"):
            TensorParallel(OneRank(2, 0), True).split_model(model, rest)


def test_a_row_that_matches_nothing_and_a_module_named_twice_are_refused() -> None:
    spec = spec_of(Case())
    model = build_model(spec.model, kernels_of(spec.kernels), dtype=torch.float64)
    with pytest.raises(AssertionError, match=r"'layers\.\*\.attn\.wq' matches no module"):
        TensorParallel(OneRank(2, 0), True).split_model(model, (*model.placement, Row("layers.*.attn.wq", "columns")))
    with pytest.raises(AssertionError, match=r"layers\.1\.norm1 is named by"):
        TensorParallel(OneRank(2, 0), True).split_model(model, (*model.placement, Row("layers.1.norm1", "sequence")))


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [("embed_dropout", "Dropout"), ("positions", "LearnedPositions"), ("layers.*.mlp.dropout", "Dropout")],
)
def test_what_acts_by_places_is_told_where_its_tokens_are(pattern: str, kind: str) -> None:
    """Without the row for it, or with one that doesn't split tokens, a rank would take another's places."""
    spec = spec_of(Case(family="gpt"))
    model = build_model(spec.model, kernels_of(spec.kernels), dtype=torch.float64)
    rest = tuple(row for row in model.placement if row.pattern != pattern)
    name = pattern.replace("*", "0")
    with pytest.raises(AssertionError, match=rf"{name} \({kind}\) acts by its tokens' places, .* found heads"):
        TensorParallel(OneRank(2, 0), True).split_model(model, (*rest, Row(pattern, "heads")))
    if pattern != "positions":
        with pytest.raises(AssertionError, match=rf"{name} \({kind}\) acts by its tokens' places, .* found None"):
            TensorParallel(OneRank(2, 0), True).split_model(model, rest)


def test_a_core_that_counts_no_heads_is_refused() -> None:
    class Other(torch.nn.Module):
        pass

    spec = spec_of(Case())
    model = build_model(spec.model, kernels_of(spec.kernels), dtype=torch.float64)
    model.layers["1"].attn.core = Other()
    with pytest.raises(AssertionError, match=r"layers\.1\.attn\.core is a Other, which can't be told which heads"):
        TensorParallel(OneRank(2, 0), True).split_model(model, model.placement)


@pytest.mark.parametrize(("tp", "heads"), [(3, 4), (8, 6), (4, 3)])
def test_heads_are_not_cut(tp: int, heads: int) -> None:
    """3 heads of 8 outputs divide by 4, but not into heads."""
    linear = Linear(16, heads * 8)
    root = torch.nn.ModuleDict({"wq": linear})
    with pytest.raises(AssertionError, match=rf"{heads * 8} outputs \({heads} heads\) don't split over tp={tp}"):
        TensorParallel(OneRank(tp, 0), False).split_model(root, (Row("wq", "columns", heads_per_part=(heads,)),))
