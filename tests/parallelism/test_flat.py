"""Flat buffers that are cut between rows: everything lies in one shard, once, and nothing overlaps."""

from math import lcm, prod

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megaspec.parallelism.flat import divide

SHAPES = {
    "a layer": {"norm": (32,), "wqkv": (96, 32), "wo": (32, 32), "down": (32, 48), "bias": (32,)},
    "odd rows": {"embed": (67, 30), "a": (7, 11), "b": (5, 13), "c": (3,)},
    "one row": {"row": (1, 50)},
    "fewer elements than shards": {"scalar": (1,)},
    "long rows": {"wide": (3, 200), "bias": (200,), "other": (2, 199)},
}


def check(shapes, shards):
    division = divide(shapes, shards=shards)
    flat = torch.zeros(division.numel, dtype=torch.int64)
    for i, name in enumerate(shapes, start=1):
        view = division.view(flat, name)
        assert tuple(view.shape) == shapes[name]
        assert not view.any(), f"{name} overlaps another"
        view.fill_(i)
    assert int((flat > 0).sum()) == sum(map(prod, shapes.values()))
    for i, (name, shape) in enumerate(shapes.items(), start=1):
        last = 0
        for index in range(shards):
            rows = division.rows(name, index)
            own = division.own(flat, index)
            part = division.part(own, name, index)
            assert tuple(part.shape) == (rows.stop - rows.start, *shape[1:])
            assert bool((part == i).all())
            assert part.numel() == int((own == i).sum()), f"{name}: shard {index} holds more than rows"
            if part.numel():
                assert part.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
                assert part.data_ptr() == division.view(flat, name)[rows.start :].data_ptr()
                assert rows.start == last
                last = rows.stop
        assert last == shape[0]
    return division


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_rows_lie_in_one_shard_each(shapes, shards):
    check(shapes, shards)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.one_of(st.tuples(st.integers(1, 300)), st.tuples(st.integers(1, 40), st.integers(1, 40))), min_size=1),
    st.integers(1, 9),
)
def test_any_shapes(shapes, shards):
    # a shard is a multiple of all row lengths: of seven that have no factor in common it would not fit into memory
    assume(lcm(*(prod(shape[1:]) for shape in shapes[:8])) < 1 << 20)
    check({str(i): shape for i, shape in enumerate(shapes[:8])}, shards)


def test_every_parameter_starts_on_a_line():
    for shapes in SHAPES.values():
        assert all(start % 64 == 0 for start in divide(shapes, shards=4).starts.values())


def test_a_layer_of_a_large_model_wastes_next_to_nothing():
    layer = {"wqkv": (6144, 4096), "wo": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336), "norm": (4096,)}
    wanted = sum(map(prod, layer.values()))
    for shards in (2, 4, 8, 64):
        assert divide(layer, shards=shards).numel <= 1.01 * wanted


def test_one_shard_holds_everything():
    division = divide({"a": (5, 3), "b": (2,)}, shards=1)
    assert [division.rows(name, 0) for name in "ab"] == [slice(0, 5), slice(0, 2)]
