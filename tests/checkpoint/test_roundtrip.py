"""What is saved comes back bit for bit, in any rectangle, from any rectangles, and safetensors reads the files too."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from megaspec.checkpoint import reader as reader_module
from megaspec.checkpoint.reader import Reader
from megaspec.checkpoint.rectangles import Rectangle, not_held_once
from megaspec.checkpoint.shard import TORCH_DTYPES, SavedPiece
from megaspec.checkpoint.store import Store
from megaspec.core.errors import CheckpointError
from tests.checkpoint.checkpoint_cases import CHUNK, SOLO, assert_holds, no_rank_failed, on_ranks, save, values

DTYPES = sorted(TORCH_DTYPES)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits: NaN, infinities and denormals among them."""
    source = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=source).bool()
    itemsize = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape, itemsize), generator=source, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def split(whole: Rectangle, cuts: int, rnd: random.Random) -> list[Rectangle]:
    """A random partition; some parts may be empty."""
    parts = [whole]
    for _ in range(cuts):
        one = parts.pop(rnd.randrange(len(parts)))
        if not one.shape:
            return [one]
        d = rnd.randrange(len(one.shape))
        at = rnd.randint(0, one.shape[d])
        parts.append(Rectangle(one.start, (*one.shape[:d], at, *one.shape[d + 1 :])))
        start = (*one.start[:d], one.start[d] + at, *one.start[d + 1 :])
        parts.append(Rectangle(start, (*one.shape[:d], one.shape[d] - at, *one.shape[d + 1 :])))
    return parts


def cut_out(t: torch.Tensor, r: Rectangle) -> torch.Tensor:
    return t[tuple(slice(s, e) for s, e in zip(r.start, r.stop, strict=True))]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=3),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=3, max_size=3),
    seed=st.integers(0, 2**32),
    size=st.integers(1, 3),
    chunk=st.sampled_from([8, 24, 64, 1 << 20]),
    block=st.sampled_from([32, 256 << 20]),
)
def test_any_rectangle_from_any_rectangles(tmp_path_factory, shapes, dtypes, seed, size, chunk, block) -> None:
    rnd = random.Random(seed)
    tensors = {
        f"t{i}": random_tensor(shape, TORCH_DTYPES[dtype], seed + i)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    owned: list[list[SavedPiece]] = [[] for _ in range(size)]
    for name, t in tensors.items():
        for part in split(Rectangle((0,) * t.ndim, tuple(t.shape)), rnd.randint(0, 5), rnd):
            rnd.choice(owned).append(SavedPiece(name, tuple(t.shape), part.start, cut_out(t, part)))
    store = Store(tmp_path_factory.mktemp("run"), chunk_bytes=chunk)
    no_rank_failed(on_ranks(size, lambda c: store.save(7, owned[c.rank], spec={}, state={}, comm=c)))
    rows, blocks = reader_module.ROW_BYTES, reader_module.BLOCK_BYTES
    reader_module.ROW_BYTES, reader_module.BLOCK_BYTES = block // 4, block
    try:
        with store.open(7, SOLO) as reader:
            assert reader.names() == sorted(tensors)
            for name, t in tensors.items():
                assert reader.shape(name) == tuple(t.shape)
                assert reader.dtype(name) == t.dtype
                assert torch.equal(bits(reader.read(name)), bits(t))
                for _ in range(4):
                    start = tuple(rnd.randint(0, n) for n in t.shape)
                    shape = tuple(rnd.randint(0, n - s) for n, s in zip(t.shape, start, strict=True))
                    got = reader.read(name, start, shape)
                    assert tuple(got.shape) == shape
                    assert torch.equal(bits(got), bits(cut_out(t, Rectangle(start, shape))))
    finally:
        reader_module.ROW_BYTES, reader_module.BLOCK_BYTES = rows, blocks


@pytest.mark.parametrize("ranks", [1, 3])
def test_safetensors_reads_every_file(tmp_path, ranks) -> None:
    store = Store(tmp_path, chunk_bytes=CHUNK)
    path = no_rank_failed(on_ranks(ranks, lambda c: save(store, 5, c)))[0]
    truth, found = values(5), {}
    for file in sorted(path.glob("*.safetensors")):
        for key, part in load_file(file).items():
            found.setdefault(key.partition("[")[0], []).append(part)
        with safe_open(file, "pt") as opened:
            assert opened.metadata()["step"] == "5"
    assert sorted(found) == sorted(truth)
    for name, t in truth.items():
        assert torch.equal(torch.cat(found[name]) if t.ndim else found[name][0], t)


def test_a_read_touches_only_the_chunks_it_needs(tmp_path) -> None:
    t = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64)
    store = Store(tmp_path, chunk_bytes=256)
    path = store.save(1, [SavedPiece("t", (64, 64), (0, 0), t)], spec={}, state={}, comm=SOLO)
    file = path / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    with Reader(path) as reader:
        file.write_bytes(data)
        assert torch.equal(reader.read("t", (0, 0), (60, 64)), t[:60])
        with pytest.raises(CheckpointError, match=r"rank-00000.safetensors: bytes .*: crc32 expected .*, found"):
            reader.read("t", (63, 63), (1, 1))


def test_strided_and_empty_pieces_and_ranks_that_own_nothing(tmp_path) -> None:
    t = torch.arange(24.0).reshape(4, 6)
    store = Store(tmp_path, chunk_bytes=CHUNK)
    pieces = [
        [SavedPiece("t", (6, 4), (0, 0), t.T), SavedPiece("none", (0, 3), (0, 0), torch.empty(0, 3))],
        [SavedPiece("t", (6, 4), (6, 0), torch.empty(0, 4))],
        [],
    ]
    path = no_rank_failed(on_ranks(3, lambda c: store.save(1, pieces[c.rank], spec={}, state={}, comm=c)))[0]
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "rank-00000.safetensors"]
    with store.open(1, SOLO) as reader:
        assert torch.equal(reader.read("t"), t.T)
        assert reader.read("none").shape == (0, 3)
        assert "t" in reader
        assert "x" not in reader
        with pytest.raises(CheckpointError, match="holds no tensor 'x'"):
            reader.read("x")
        with pytest.raises(AssertionError, match="outside"):
            reader.read("t", (5, 0), (2, 4))


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([((0, 0), (2, 4))], "w: saved pieces hold 8 elements of 16; each must be held once"),
        ([((0, 0), (4, 2)), ((2, 1), (2, 3))], "w: saved pieces hold 14 elements of 16"),
        ([((0, 0), (4, 2)), ((0, 1), (4, 2))], "w: saved pieces hold 16 elements of 16; each must be held once"),
        ([((0, 0), (4, 4)), ((0, 0), (4, 4))], "given twice"),
    ],
)
def test_pieces_that_leave_out_or_repeat_elements_are_the_callers_mistake(tmp_path, pieces, said) -> None:
    store = Store(tmp_path)
    saved = [SavedPiece("w", (4, 4), start, torch.zeros(shape)) for start, shape in pieces]
    with pytest.raises(AssertionError, match=said):
        store.save(1, saved, spec={}, state={}, comm=SOLO)
    assert list(store.folder.glob("*")) == [] if store.folder.exists() else True
    assert store.newest_good(SOLO) is None


def test_pieces_that_no_store_can_hold_are_refused_when_made() -> None:
    ok = torch.zeros(2)
    for name in ("../x", "a b", "", "/a"):
        with pytest.raises(AssertionError, match="letters, digits"):
            SavedPiece(name, (2,), (0,), ok)
    with pytest.raises(AssertionError, match="outside"):
        SavedPiece("a", (2,), (1,), ok)
    with pytest.raises(AssertionError, match="no safetensors name"):
        SavedPiece("a", (2,), (0,), torch.zeros(2, dtype=torch.complex64))


def test_nan_in_the_state_is_refused_before_anything_is_written(tmp_path) -> None:
    store = Store(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        store.save(1, [], spec={}, state={"loss": float("nan")}, comm=SOLO)
    assert not store.folder.exists()


def held_once(whole: tuple[int, ...], parts: list[Rectangle]) -> bool:
    """The truth: counts how often each element is held."""
    count = np.zeros(whole, dtype=np.int64)
    for part in parts:
        count[tuple(slice(s, e) for s, e in zip(part.start, part.stop, strict=True))] += 1
    return bool((count == 1).all())


def a_part(whole: tuple[int, ...], rnd: random.Random) -> Rectangle:
    start = tuple(rnd.randrange(n) for n in whole)
    return Rectangle(start, tuple(rnd.randint(1, n - s) for n, s in zip(whole, start, strict=True)))


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32), n_dims=st.integers(0, 4), n_wholes=st.integers(1, 3))
def test_rectangles_that_hold_each_element_once(seed, n_dims, n_wholes) -> None:
    """Against counting: partitions, and what comes of them when a part is lost, repeated, moved, or all are random."""
    rnd = random.Random(seed)
    wholes = [tuple(rnd.randint(1, 4) for _ in range(n_dims)) for _ in range(n_wholes)]
    owners, rectangles, wrong = [], [], []
    for number, whole in enumerate(wholes):
        parts = [p for p in split(Rectangle((0,) * n_dims, whole), rnd.randint(0, 6), rnd) if p.numel]
        match rnd.randrange(5):
            case 1:
                parts.pop(rnd.randrange(len(parts)))
            case 2:
                parts.append(rnd.choice(parts))
            case 3:
                parts[rnd.randrange(len(parts))] = a_part(whole, rnd)
            case 4:
                parts = [a_part(whole, rnd) for _ in range(rnd.randint(0, 5))]
        rnd.shuffle(parts)
        if not held_once(whole, parts):
            wrong.append(number)
        owners += [number] * len(parts)
        rectangles += parts

    def numbers(rows: list[tuple[int, ...]]) -> np.ndarray:
        return np.array(rows, dtype=np.int64).reshape(len(rows), n_dims)

    starts, shapes = numbers([r.start for r in rectangles]), numbers([r.shape for r in rectangles])
    assert not_held_once(numbers(wholes), np.array(owners, dtype=np.int64), starts, shapes) == wrong


def test_prune_keeps_the_newest_and_what_was_published_last(tmp_path) -> None:
    store = Store(tmp_path, chunk_bytes=CHUNK)
    for step in (1, 2, 3, 4):
        save(store, step)
    assert store.prune(2) == [2, 1]
    assert store.steps() == [3, 4]
    (store.folder / "step-00000004" / "rank-00000.safetensors").write_bytes(b"")
    save(store, 2)
    assert store.prune(1) == []
    assert store.steps() == [2, 3, 4], "step 4 is bad and counts for nothing, step 2 was published last"
    with store.newest_good(SOLO) as reader:
        assert_holds(reader, 3)


def test_generations_count_the_publications_of_a_run(tmp_path) -> None:
    for expected, step in enumerate((1, 2, 2, 1), start=1):
        store = Store(tmp_path, chunk_bytes=CHUNK)
        save(store, step, salt=expected)
        with store.open(step, SOLO) as reader:
            assert reader.manifest.generation == expected
            assert_holds(reader, step, expected)
    assert sorted(p.name for p in Path(store.folder).iterdir()) == ["step-00000001", "step-00000002"]
