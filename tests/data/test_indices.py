import hashlib
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaspec.data.indices import blend_indices, gpt_indices, n_epochs, normalized, split_bounds

GOLDEN = Path(__file__).parents[1] / "golden"
MEGATRON = json.loads((GOLDEN / "gpt_indices.json").read_text())
MEGATRON_CORE = json.loads((GOLDEN / "gpt_indices_megatron_core.json").read_text())


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(str(array.dtype).encode() + np.ascontiguousarray(array).tobytes()).hexdigest()


@pytest.mark.parametrize("case", MEGATRON["gpt"], ids=lambda case: str(case["num_samples"]))
def test_gpt_indices_equal_megatrons(case):
    lengths = np.array(MEGATRON["doc_lengths"], dtype=np.int32)
    found = gpt_indices(
        lengths, np.arange(12), seq_len=case["seq_length"], seed=case["seed"], n_samples=case["num_samples"]
    )
    arrays = (found.document_index, found.sample_index, found.shuffle_index)
    assert [array.tolist() for array in arrays] == [
        case["document_index"],
        case["sample_index"],
        case["shuffle_index"],
    ]
    assert [array.dtype.name for array in arrays] == case["dtypes"]
    assert n_epochs(int(lengths.sum()), case["seq_length"], case["num_samples"]) == case["num_epochs"]


@pytest.mark.parametrize("case", MEGATRON["blend"], ids=str)
def test_blend_equals_megatrons(case):
    dataset, sample = blend_indices(normalized(case["weights"]), case["size"])
    assert dataset.tolist() == case["dataset_index"]
    assert sample.tolist() == case["dataset_sample_index"]


def test_gpt_indices_equal_megatron_cores():
    """Empty documents, ranges of documents, up to hundreds of epochs, one epoch: 40 cases."""
    for case in MEGATRON_CORE["gpt"]:
        found = gpt_indices(
            np.array(case["doc_lengths"], dtype=np.int32),
            np.arange(case["first"], case["stop"]),
            seq_len=case["seq_length"],
            seed=case["seed"],
            n_samples=case["num_samples"],
        )
        arrays = (found.document_index, found.sample_index, found.shuffle_index)
        assert [digest(array) for array in arrays] == case["sha256"]
    assert {case["separate_final_epoch"] for case in MEGATRON_CORE["gpt"]} == {False, True}


def test_blends_equal_megatron_cores():
    for case in MEGATRON_CORE["blend"]:
        found = blend_indices(case["weights"], case["size"])
        assert [digest(array) for array in found] == case["sha256"]


def one_by_one(weights: list[float], size: int) -> list[int]:
    counts, chosen = [0] * len(weights), []
    for n in range(size):
        errors = [w * max(n, 1) - count for w, count in zip(weights, counts, strict=True)]
        best = errors.index(max(errors))
        counts[best] += 1
        chosen.append(best)
    return chosen


@given(
    weights=st.lists(st.one_of(st.integers(1, 9), st.floats(1e-4, 1)), min_size=1, max_size=9),
    size=st.integers(1, 3000),
)
def test_blend_is_the_sequential_rule(weights, size):
    weights = normalized(weights)
    dataset, sample = blend_indices(weights, size)
    assert dataset.tolist() == one_by_one(weights, size)
    for number in range(len(weights)):
        assert sample[dataset == number].tolist() == list(range(int((dataset == number).sum())))


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=20),
    seq_len=st.integers(1, 32),
    seed=st.integers(0, 2**32 - 1),
    n_samples=st.integers(1, 60),
)
def test_every_token_is_used_once_per_epoch(lengths, seq_len, seed, n_samples):
    """The samples in the order of the sample index are the documents in theirs, overlapping by one token."""
    lengths = np.array(lengths, dtype=np.int32)
    if not lengths.sum():
        return
    found = gpt_indices(lengths, np.arange(len(lengths)), seq_len=seq_len, seed=seed, n_samples=n_samples)
    assert len(found.shuffle_index) >= n_samples
    assert sorted(found.shuffle_index.tolist()) == list(range(len(found.shuffle_index)))
    epochs, rest = divmod(len(found.document_index), len(lengths))
    assert rest == 0
    assert np.array_equal(np.bincount(found.document_index, minlength=len(lengths)), np.full(len(lengths), epochs))
    begins = np.concatenate([[0], np.cumsum(lengths[found.document_index], dtype=np.int64)])
    at = [int(begins[place]) + offset for place, offset in found.sample_index.tolist()]
    assert at == [i * seq_len for i in range(len(at))]
    for (place, offset), (last, stop) in pairwise(found.sample_index.tolist()):
        assert (place, offset) < (last, stop)


def test_default_split_of_a_thousand():
    assert split_bounds((969, 30, 1), 1000) == (0, 969, 999, 1000)
    assert split_bounds((969, 30, 1), 10) == (0, 10, 10, 10)
    assert split_bounds((1, 1, 0), 7) == (0, 4, 7, 7)
    assert split_bounds((1, 0, 0), 5) == (0, 5, 5, 5)
