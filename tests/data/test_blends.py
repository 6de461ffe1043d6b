"""Blends are those of megatron-core 0.16.1, sample for sample.

The golden file holds what the package itself made (tests/data/megatron_blends.py). Where the package is,
in the folder that MEGATRON_CORE names or that of `make bench`, it is asked again.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megaspec.core.errors import DataError
from megaspec.data import order as order_module
from megaspec.data.index_cache import IndexCache
from megaspec.data.indexed import IndexedFile
from megaspec.data.indexed_source import IndexedSource
from megaspec.data.indices import blend_indices, normalized
from megaspec.data.order import DataOrder
from megaspec.data.spec import BlendPart, IndexedSpec
from tests.data.helpers import write_dataset
from tests.data.megatron_blends import FORMS, GOLDEN, SEQ_LEN, Case, kept, write_datasets

ROOT = Path(__file__).parents[2]
# Where `make bench` installs the package.
PACKAGE = Path(os.environ.get("MEGATRON_CORE", ROOT / ".venv" / "megatron"))
CASES = json.loads(GOLDEN.read_text())["cases"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blends")
    write_datasets(folder)
    return folder


@pytest.fixture
def no_cache(monkeypatch):
    """Indices are made anew each time: hundreds of them on a disk would take longer than making them."""

    class Nothing:
        def __init__(self, folder):
            pass

        def get(self, key, build):
            return build()

    monkeypatch.setattr(order_module, "IndexCache", Nothing)


def spec_of(folder: Path, case: Case) -> IndexedSpec:
    """What a recipe says for the words of a command line; --train-data-path makes nothing of the weight of one."""
    names = [word for word in case.words if word.startswith("d")]
    weights = [float(word) for word in case.words if not word.startswith("d")] or [None] * len(names)
    if case.of_train_only and len(names) == 1:
        weights = [None]
    blend = tuple(BlendPart(prefix=str(folder / n), weight=w) for n, w in zip(names, weights, strict=True))
    return IndexedSpec(kind="indexed", blend=blend, split=(1.0, 0.0, 0.0), seq_len=SEQ_LEN)


def by_us(folder: Path, case: Case) -> dict[str, str]:
    spec = spec_of(folder, case)
    source = IndexedSource(spec, split="train", seed=case.seed, segments=(case.samples,), vocab_size=1000)
    order = DataOrder(
        spec, [IndexedFile(p.prefix) for p in spec.blend], split="train", seed=case.seed, segments=(case.samples,)
    )
    datasets = [order.location(position).dataset for position in range(case.samples)]
    return kept(datasets, [source.read(position).tokens for position in range(case.samples)])


def test_orders_are_megatron_cores(folder, no_cache):
    differs = []
    for line in CASES:
        case = Case(tuple(line["words"]), line["samples"], line["seed"], line["of_train_only"])
        found = by_us(folder, case)
        if found != {name: line[name] for name in found}:
            differs.append(case)
    assert not differs, f"{len(differs)} of {len(CASES)}: {differs[:5]}"
    assert len(CASES) > 200 + len(FORMS)


def test_the_golden_cases_hold_what_they_are_for():
    """Ties that a last bit decides, and data sets whose weight changes the order at the end of an epoch."""
    moved = 0
    for line in CASES:
        weights = [float(word) for word in line["words"] if not word.startswith("d")]
        if len(weights) > 1:
            once = normalized(weights)
            moved += bool((blend_indices(once, 400)[0] != blend_indices(normalized(once), 400)[0]).any())
    assert moved >= 5
    tokens = {(tuple(line["words"]), line["samples"]): line["tokens"] for line in CASES}
    bare = {samples: found for (words, samples), found in tokens.items() if words == ("d8",)}
    weighted = {samples: found for (words, samples), found in tokens.items() if words == ("1.0", "d8")}
    assert 0 < sum(bare[samples] != weighted[samples] for samples in bare) < len(bare)


@pytest.mark.slow
@pytest.mark.skipif(not PACKAGE.is_dir(), reason="no folder with megatron-core")
def test_the_golden_file_is_what_megatron_core_makes(tmp_path):
    code = "import sys; from pathlib import Path; from tests.data import megatron_blends as m; "
    code += "m.GOLDEN = Path(sys.argv[2]); m.main(sys.argv[1])"
    command = [sys.executable, "-c", code, str(PACKAGE), str(tmp_path / "golden.json")]
    subprocess.run(command, cwd=ROOT, check=True)
    assert (tmp_path / "golden.json").read_text() == GOLDEN.read_text()


@pytest.mark.parametrize("weights", [("0.7", "0.2", "0.1"), ("7", "2", "1"), ("0.59", "0.8", "0.5")])
def test_an_index_of_once_divided_weights_is_not_taken(folder, tmp_path, weights):
    """A cache that an earlier version filled holds the order of weights that were divided once."""
    words = []
    for number, weight in enumerate(weights):
        words += [weight, f"d{number}"]
    spec = spec_of(folder, Case(tuple(words), 400)).model_copy(update={"cache": str(tmp_path)})
    once = normalized([float(weight) for weight in weights])
    dataset, sample = blend_indices(once, 400)
    IndexCache(tmp_path).get(
        {"kind": "blend", "weights": once, "samples": 400}, lambda: {"dataset": dataset, "sample": sample}
    )
    order = DataOrder(spec, [IndexedFile(p.prefix) for p in spec.blend], split="train", seed=1, segments=(400,))
    found = [order.location(position).dataset for position in range(400)]
    assert found == blend_indices(normalized(once), 400)[0].tolist()
    assert found != dataset.tolist()


def order_of(spec: IndexedSpec, *, split="train", segments=(10,)) -> DataOrder:
    return DataOrder(spec, [IndexedFile(p.prefix) for p in spec.blend], split=split, seed=1, segments=segments)


def in_one_pass(spec: IndexedSpec) -> int:
    """Whole sequences, as the evaluation order counts them."""
    return len(order_of(spec.model_copy(update={"split": (0.0, 1.0, 0.0)}), split="valid"))


def test_a_blend_without_weights_is_one_pass(folder):
    spec = spec_of(folder, Case(("d0", "d1"), 1))
    total = in_one_pass(spec)
    assert total > in_one_pass(spec_of(folder, Case(("d0",), 1)))
    whole = order_of(spec, segments=(total,))
    read = [str(whole.pieces(position)) for position in range(total)]
    assert len(set(read)) == total, "no sequence twice"
    with pytest.raises(DataError, match=f"one pass of {total} sequences, {total + 1} are needed; give the data sets"):
        order_of(spec, segments=(total + 1,))


def test_a_blend_without_weights_has_a_sequence_of_each(folder, tmp_path):
    write_dataset(tmp_path / "d9", [3], manifest=False)
    write_datasets(tmp_path)
    with pytest.raises(DataError, match=r"d9: no whole sequence of data\.seq_len=8 tokens"):
        order_of(spec_of(tmp_path, Case(("d0", "d9"), 1)))


def test_evaluation_is_one_pass_whatever_the_weights(folder):
    for words in (("d0", "d1"), ("3", "d0", "1", "d1")):
        spec = spec_of(folder, Case(words, 1)).model_copy(update={"split": (0.0, 1.0, 0.0)})
        order = order_of(spec, split="valid")
        counts = np.bincount([order.location(position).dataset for position in range(len(order))])
        in_a_pass = [in_one_pass(spec.model_copy(update={"blend": (part,)})) for part in spec.blend]
        assert len(order) == sum(in_a_pass)
        if words[0] == "d0":
            assert counts.tolist() == in_a_pass


def test_an_evaluation_takes_no_sequence_twice_whatever_the_weights(folder):
    for words in (("d0", "d1"), ("3", "d0", "1", "d1"), ("1", "d0", "30", "d1"), ("1", "d1")):
        spec = spec_of(folder, Case(words, 1)).model_copy(update={"split": (0.0, 1.0, 0.0)})
        order = order_of(spec, split="valid")
        source = IndexedSource(spec, split="valid", seed=1, segments=(), vocab_size=1000)
        n_taken = source.count(10**9)
        taken = {str(order.pieces(position)) for position in range(n_taken)}
        assert len(taken) == n_taken
        assert source.count(2) == 2
        # it ends where one of the data sets does: the next sequence is one that was taken, or there is none
        assert n_taken == len(order) or str(order.pieces(n_taken)) in taken
