"""Flat buffers that are cut between rows: everything lies in one shard, once, and nothing overlaps."""

from math import lcm, prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspec.parallelism.flat import divide
from megaspec.parallelism.places import places_of, together

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
    """Also of widths that have no factor in common: no buffer is mostly padding."""
    named = {str(i): shape for i, shape in enumerate(shapes[:8])}
    runs = together(named, shards=shards)
    assert [name for run in runs for name in run] == list(named)
    for run in runs:
        division = check({name: named[name] for name in run}, shards)
        elements = sum(prod(named[name]) for name in run)
        # rows are whole, so that one alone is rounded up to this
        longest = max(prod(named[name][1:]) for name in run)
        # shards are rounded up once, and what lies across a border may begin later, once for each border
        allowed = max(elements / 16, longest * shards, 1 << 16)
        assert division.numel <= elements + 64 * len(run) + 3 * allowed


def test_widths_without_a_common_factor_lie_apart():
    """A shard of all of them would have 64 · 31 · 37 · 41 · 43 · 47 · 53 elements: terabytes."""
    primes = {str(prime): (40, prime) for prime in (31, 37, 41, 43, 47, 53)}
    runs = together(primes, shards=8)
    assert len(runs) > 1
    wanted = sum(map(prod, primes.values()))
    assert sum(check({name: primes[name] for name in run}, 8).numel for run in runs) < 16 * wanted
    assert together(primes, shards=1) == [list(primes)]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(500, 9000), st.integers(500, 9000)), min_size=1, max_size=8),
    st.sampled_from([2, 7, 8, 64, 256]),
)
def test_large_matrices_of_any_widths_are_padded_by_a_share(shapes, shards):
    """Buffers are not made here: widths have no factor in common, matrices are those of large models."""
    named = {str(number): shape for number, shape in enumerate(shapes)}
    elements = sum(map(prod, shapes))
    held = sum(
        places_of({name: named[name] for name in run}, shards=shards).numel for run in together(named, shards=shards)
    )
    # each of a parameter's shards may lack a row, which is what equal shards of whole rows need
    rows = sum(width * shards for _, width in shapes)
    assert elements <= held <= 1.2 * elements + rows + 64 * len(shapes)


@pytest.mark.parametrize(
    ("width", "shards", "most"), [(509, 64, 1.01), (509, 256, 1.01), (4099, 64, 1.02), (4099, 256, 1.07)]
)
def test_seven_coprime_widths(width, shards, most):
    """Of as many rows as columns. On lines of 64 elements 256 shards of 509 were 32 times as much as there is."""
    primes = [n for n in range(width, 2 * width) if all(n % one for one in range(2, int(n**0.5) + 1))][:7]
    assert lcm(*primes) == prod(primes)
    named = {str(prime): (width, prime) for prime in primes}
    elements = sum(map(prod, named.values()))
    runs = together(named, shards=shards)
    assert sum(places_of({name: named[name] for name in run}, shards=shards).numel for run in runs) <= most * elements


def layer_of(d_model, heads, d_ffn, vocabulary):
    """Shapes of a layer and the table, as they lie in a buffer. `heads`: width of all queries."""
    layer = {"wq": (heads, d_model), "wo": (d_model, heads), "gate_up": (2 * d_ffn, d_model)}
    return layer | {"down": (d_model, d_ffn), "norm": (d_model,), "embed": (vocabulary, d_model)}


# Llama 3 8B, Llama 2 13B, Qwen 2.5 7B, Qwen 3 32B
REAL = (
    (4096, 4096, 14336, 128256),
    (5120, 5120, 13824, 32000),
    (3584, 3584, 18944, 152064),
    (5120, 8192, 25600, 151936),
)


# Elements of a shard of those layers among 8 ranks and among 64, and where their parameters start among 64: where
# numbers lie decides in which order ranks add them up, so these stay as they are.
PLACES = (
    ((91_893_760, 11_497_472), (0, 16_777_216, 33_554_432, 151_001_088, 209_721_344, 209_727_488)),
    ((53_637_120, 6_773_760), (0, 26_214_400, 52_428_800, 193_992_192, 264_771_072, 264_780_800)),
    ((96_803_840, 12_199_936), (0, 12_845_056, 25_690_112, 161_497_600, 229_392_896, 229_397_504)),
    ((157_081_600, 19_660_800), (0, 41_943_040, 83_886_080, 346_035_200, 477_107_200, 477_112_320)),
)


@pytest.mark.parametrize(("widths", "places"), list(zip(REAL, PLACES, strict=True)), ids=str)
def test_real_models_lie_where_they_lay(widths, places):
    shards, starts = places
    layer = layer_of(*widths)
    assert tuple(places_of(layer, shards=ranks).shard for ranks in (8, 64)) == shards
    assert tuple(places_of(layer, shards=64).starts.values()) == starts


@pytest.mark.parametrize("widths", REAL, ids=str)
def test_widths_of_real_models_lie_together(widths):
    layer = layer_of(*widths)
    for shards in (2, 8, 64):
        assert together(layer, shards=shards) == [list(layer)]


def test_attention_beside_experts_of_gpt_oss_on_many_ranks_lies_apart():
    """Widths of 2,880 and 4,096: in one buffer on 64 ranks a quarter of it would be padding."""
    layer = {"wqkv": (5120, 2880), "wo": (2880, 4096), "norm": (2880,)}
    wanted = sum(map(prod, layer.values()))
    assert together(layer, shards=8) == [list(layer)]
    assert divide(layer, shards=64).numel > 1.3 * wanted
    runs = together(layer, shards=64)
    assert runs == [["wqkv"], ["wo", "norm"]]
    assert sum(divide({name: layer[name] for name in run}, shards=64).numel for run in runs) < 1.05 * wanted


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
