import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megaspec.core.errors import DataError, WriteError
from megaspec.data.index_cache import IndexCache
from megaspec.data.indexed import IndexedFile
from megaspec.data.indices import gpt_indices, split_bounds
from megaspec.data.order import DataOrder
from megaspec.data.spec import BlendPart, IndexedSpec
from tests.data.helpers import write_dataset


def spec_for(*prefixes: Path, weights: tuple[float | None, ...] = (), **fields) -> IndexedSpec:
    """Without weights a single data set has none, several have equal ones."""
    weights = weights or ((None,) if len(prefixes) == 1 else (1.0,) * len(prefixes))
    blend = tuple(BlendPart(prefix=str(p), weight=w) for p, w in zip(prefixes, weights, strict=True))
    return IndexedSpec(kind="indexed", blend=blend, **{"seq_len": 8, **fields})


def order_of(spec: IndexedSpec, *, split="train", seed=1, segments=(50,)) -> DataOrder:
    files = [IndexedFile(part.prefix) for part in spec.blend]
    return DataOrder(spec, files, split=split, seed=seed, segments=segments)


@pytest.fixture
def data(tmp_path):
    write_dataset(tmp_path / "a", [30] * 100, seed=1)
    write_dataset(tmp_path / "b", [5, 50] * 60, seed=2)
    return tmp_path


def listed(order: DataOrder) -> list:
    return [order.pieces(position) for position in range(len(order))]


def test_first_segment_is_megatrons(data):
    spec = spec_for(data / "a")
    order = order_of(spec, seed=7, segments=(500,))
    stop = split_bounds(spec.split, 100)[1]
    lengths = IndexedFile(data / "a").index.lengths
    index = gpt_indices(lengths, np.arange(stop), seq_len=8, seed=7, n_samples=500)
    for position in (0, 1, 17, 499):
        row = index.shuffle_index[position]
        (first, start), (last, end) = index.sample_index[row : row + 2].tolist()
        pieces = order.pieces(position)[1]
        assert pieces[0][0] == index.document_index[first]
        assert pieces[0][1] == start
        assert pieces[-1][0] == index.document_index[last]
        assert pieces[-1][2] == end + 1
    assert {order.location(position).dataset for position in range(500)} == {0}


@pytest.mark.parametrize("prefixes", [["a"], ["a", "b"]])
def test_appending_a_segment_changes_nothing_before(data, prefixes):
    spec = spec_for(*[data / p for p in prefixes], weights=(0.7, 0.3) if len(prefixes) == 2 else ())
    short, long = order_of(spec, segments=(40,)), order_of(spec, segments=(40, 25, 1))
    assert len(long) == 66
    assert listed(long)[:40] == listed(short)
    assert listed(long)[40:65] == listed(order_of(spec, seed=2, segments=(25,)))


def test_a_pure_function_of_what_it_depends_on(data):
    spec = spec_for(data / "a", data / "b", weights=(0.7, 0.3))
    base = listed(order_of(spec))
    assert listed(order_of(spec.model_copy(update={"cache": str(data / "other")}))) == base
    (data / "moved").mkdir()
    for name in ("a", "b"):
        for path in data.glob(f"{name}.*"):
            (data / "moved" / path.name).write_bytes(path.read_bytes())
    moved = spec_for(data / "moved" / "a", data / "moved" / "b", weights=(7.0, 3.0))
    assert listed(order_of(moved)) == base
    assert listed(order_of(spec, seed=2)) != base
    assert listed(order_of(spec.model_copy(update={"seq_len": 9}))) != base
    assert listed(order_of(spec_for(data / "a", data / "b", weights=(0.6, 0.4)))) != base


def test_shares_of_a_blend(data):
    order = order_of(spec_for(data / "a", data / "b", weights=(3.0, 1.0)), segments=(400,))
    counts = np.bincount([order.location(p).dataset for p in range(400)])
    assert counts.tolist() == [300, 100]


def test_splits_share_no_document(data):
    spec = spec_for(data / "a", split=(8.0, 1.0, 1.0))
    seen = {
        split: {piece[0] for _, pieces in listed(order_of(spec, split=split)) for piece in pieces}
        for split in ("train", "valid", "test")
    }
    assert seen["train"] <= set(range(80))
    assert seen["valid"] <= set(range(80, 90))
    assert seen["test"] <= set(range(90, 100))


def test_evaluation_order_begins_again_and_ignores_the_seed(data):
    spec = spec_for(data / "a", data / "b", split=(8.0, 1.0, 1.0))
    order = order_of(spec, split="valid")
    n = len(order)
    assert n > 10
    assert [order.pieces(n + p) for p in range(n)] == listed(order)
    assert listed(order_of(spec, split="valid", seed=99)) == listed(order)


def test_empty_splits_say_what_to_do(data):
    with pytest.raises(DataError, match="valid split") as error:
        order_of(spec_for(data / "a", split=(1.0, 0.0, 0.0)), split="valid")
    assert "larger share" in str(error.value)
    with pytest.raises(DataError, match="training split"):
        order_of(spec_for(data / "a", split=(0.0, 1.0, 0.0)))


def test_a_damaged_cache_is_made_again(data):
    spec = spec_for(data / "a")
    base = listed(order_of(spec))
    for victim in (data / "index-cache").glob("*/*"):
        whole = victim.read_bytes()
        for damage in (whole[:-1], b"", bytes([whole[0] ^ 1]) + whole[1:], whole[:-1] + bytes([whole[-1] ^ 1])):
            victim.write_bytes(damage)
            assert listed(order_of(spec)) == base
        victim.unlink()
        assert listed(order_of(spec)) == base


def test_no_pickle_in_the_cache(data):
    order_of(spec_for(data / "a", data / "b"))
    arrays = list((data / "index-cache").glob("*/*.npy"))
    assert len(arrays) == 8
    for path in arrays:
        np.load(path, allow_pickle=False)


def test_a_cache_that_cannot_be_written(data):
    (data / "file").write_text("")
    with pytest.raises(WriteError, match=r"data\.cache names"):
        order_of(spec_for(data / "a", cache=str(data / "file" / "cache")))


BUILDER = """
import sys, time
import numpy as np
from pathlib import Path
from megaspec.data.index_cache import IndexCache
folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
def build():
    (folder / f"building-{time.time_ns()}").touch()
    time.sleep(seconds)
    return {"x": np.arange(1000)}
print(int(IndexCache(folder / "cache").get({"k": 1}, build)["x"].sum()))
"""


def builder(folder: Path, seconds: float) -> subprocess.Popen:
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(folder), str(seconds)],
        env=os.environ | {"PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for_builder(folder: Path, count: int) -> None:
    for _ in range(600):
        if len(list(folder.glob("building-*"))) >= count:
            return
        time.sleep(0.05)
    raise AssertionError("no builder began")


def test_concurrent_builders_build_once(tmp_path):
    running = [builder(tmp_path, 0.5) for _ in range(3)]
    assert [process.communicate(timeout=60)[0].strip() for process in running] == ["499500"] * 3
    assert len(list(tmp_path.glob("building-*"))) == 1


def test_a_killed_builder_holds_nobody_up(tmp_path):
    first = builder(tmp_path, 600)
    wait_for_builder(tmp_path, 1)
    second = builder(tmp_path, 0)
    time.sleep(0.2)
    first.kill()
    first.communicate()
    assert second.communicate(timeout=60)[0].strip() == "499500"
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_keys_are_told_apart(tmp_path):
    cache = IndexCache(tmp_path)
    for k in range(3):
        assert cache.get({"k": k}, lambda k=k: {"x": np.full(3, k)})["x"].tolist() == [k] * 3
    names = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert len(names) == 3
    assert all(len(name) == 40 for name in names)
    assert hashlib.sha256(b'{"format":1,"k":0}').hexdigest()[:40] in names
