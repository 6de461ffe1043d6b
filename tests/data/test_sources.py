from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspec.core.errors import DataError
from megaspec.data.facts import FACTS, data_facts
from megaspec.data.indexed import IndexedFile
from megaspec.data.loader import SOURCES, open_source
from megaspec.data.spec import BlendPart, DataSource, IndexedSpec, RandomSpec, StreamSpec, SyntheticSpec
from tests.data.helpers import stream_spec, write_dataset, write_texts


def synthetic(**fields) -> SyntheticSpec:
    return SyntheticSpec(kind="synthetic", **{"seq_len": 64, "vocab_size": 17, **fields})


def indexed(*prefixes, **fields) -> IndexedSpec:
    blend = tuple(BlendPart(prefix=str(prefix)) for prefix in prefixes)
    return IndexedSpec(kind="indexed", blend=blend, **{"seq_len": 8, **fields})


def source_of(spec, *, split="train", seed=3, segments=(100,), vocab_size=1000):
    return open_source(spec, split=split, seed=seed, segments=segments, vocab_size=vocab_size)


KINDS = get_args(get_args(DataSource)[0])
# A source of each kind; that of files is given a folder of them.
EXAMPLES = {
    IndexedSpec: lambda folder: indexed(folder / "d", split=(1.0, 0.0, 0.0), seq_len=64),
    SyntheticSpec: lambda folder: synthetic(),
    RandomSpec: lambda folder: RandomSpec(kind="random", seq_len=64, vocab_size=17),
    StreamSpec: lambda folder: stream_spec(write_texts(folder / "d.jsonl", 50), seq_len=64),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_source_and_facts_and_an_example_here(kind):
    assert kind in SOURCES, "add it to SOURCES in megaspec/data/loader.py"
    assert kind in FACTS, "add it to FACTS in megaspec/data/facts.py"
    assert kind in EXAMPLES, "add it to EXAMPLES here"


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_source_that_is_opened_again_reads_the_same(kind, tmp_path):
    """What a resume rests on: the sequence at a position, whatever was read before it and by whom."""
    write_dataset(tmp_path / "d", [40] * 50, vocab_size=100)
    spec = EXAMPLES[kind](tmp_path)
    first, again = source_of(spec), source_of(spec)
    assert len(first) == len(again) == 100
    backwards = {position: again.read(position) for position in reversed(range(20))}
    for position in range(20):
        one, other = first.read(position), backwards[position]
        assert all(np.array_equal(x, y) for x, y in zip(vars(one).values(), vars(other).values(), strict=True))
        assert (one.tokens.dtype, one.tokens.shape) == (np.dtype(np.int64), (65,))
        assert (one.mask.dtype, one.mask.shape) == (np.dtype(bool), (64,))
        assert (one.documents.dtype, one.documents.shape) == (np.dtype(np.int32), (64,))
    vocab_size = data_facts(spec).vocab_size
    assert all(0 <= one.tokens.min() <= one.tokens.max() < vocab_size for one in backwards.values())


@pytest.mark.parametrize("spec", [synthetic(), RandomSpec(kind="random", seq_len=64, vocab_size=17)], ids=str)
def test_made_sources_are_functions_of_seed_split_and_position(spec):
    first = source_of(spec)
    base = first.read(7).tokens.tolist()
    assert first.read(8).tokens.tolist() != base
    assert source_of(spec, seed=4).read(7).tokens.tolist() != base
    assert source_of(spec, split="valid").read(7).tokens.tolist() != base


def test_synthetic_tokens_are_the_same_on_every_machine():
    assert source_of(synthetic()).read(5).tokens[:12].tolist() == FIRST_TOKENS


FIRST_TOKENS = [14, 8, 10, 3, 13, 12, 9, 1, 4, 11, 6, 7]


@pytest.mark.parametrize("order", [1, 3])
def test_synthetic_text_can_be_learned(order):
    """The rule is the same in both splits, and holds for all tokens but the noise."""
    spec = synthetic(order=order, noise=0.25, seq_len=400, vocab_size=7)
    rule: dict[tuple, list[int]] = {}
    for position in range(100):
        tokens = source_of(spec).read(position).tokens.tolist()
        for t in range(order, len(tokens)):
            rule.setdefault(tuple(tokens[t - order : t]), []).append(tokens[t])
    best = {context: max(set(seen), key=seen.count) for context, seen in rule.items()}
    tokens = source_of(spec, split="valid").read(0).tokens.tolist()
    hits = [best.get(tuple(tokens[t - order : t])) == tokens[t] for t in range(order, len(tokens))]
    assert 0.72 < np.mean(hits) < 0.85  # 0.75 + 0.25 / 7, give or take three deviations


def test_synthetic_masks_are_uneven():
    spec = synthetic(masked=0.3, seq_len=256)
    source = source_of(spec)
    shares = [1 - source.read(position).mask.mean() for position in range(100)]
    assert abs(np.mean(shares) - 0.3) < 0.06
    assert np.std(shares) > 0.1
    assert source_of(synthetic()).read(0).mask.all()


def test_no_loss_crosses_synthetic_documents():
    sample = source_of(synthetic(document_mask=True, seq_len=400)).read(0)
    bounds = np.flatnonzero(np.diff(sample.documents))
    assert len(bounds) > 3
    assert set(bounds) <= set(np.flatnonzero(~sample.mask))
    assert sample.documents[0] == 0


@given(
    lengths=st.lists(st.integers(0, 30), min_size=4, max_size=30),
    seq_len=st.integers(1, 20),
    position=st.integers(0, 39),
    document_mask=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_indexed_samples_are_whole_stretches_of_documents(tmp_path_factory, lengths, seq_len, position, document_mask):
    folder = tmp_path_factory.mktemp("d")
    lengths = [1, 1, *lengths]
    write_dataset(folder / "d", lengths)
    spec = indexed(folder / "d", seq_len=seq_len, split=(1.0, 0.0, 0.0), document_mask=document_mask)
    sample = source_of(spec, segments=(40,)).read(position)
    assert sample.tokens.shape == (seq_len + 1,)
    file = IndexedFile(folder / "d")
    texts = ["," + ",".join(map(str, file.read(i).tolist())) + "," for i in range(len(file))]
    documents = np.append(sample.documents, sample.documents[-1])
    if not document_mask:
        assert sample.mask.all()
    else:
        assert np.array_equal(sample.mask[:-1], np.diff(sample.documents) == 0)
        # The last label belongs to the next document exactly when it is masked.
        documents[-1] += not sample.mask[-1]
        for number in range(documents[-1] + 1):
            piece = sample.tokens[documents == number]
            assert len(piece)
            assert any("," + ",".join(map(str, piece.tolist())) + "," in text for text in texts)
    assert sample.documents[0] == 0
    assert set(np.diff(sample.documents).tolist()) <= {0, 1}


def test_ids_outside_the_vocabulary_are_named(tmp_path):
    write_dataset(tmp_path / "d", [40] * 50, vocab_size=1000, manifest=False)
    source = source_of(indexed(tmp_path / "d"), vocab_size=10)
    with pytest.raises(DataError, match=r"d\.bin: token id=\d+ in the train sequence at position 3"):
        source.read(3)


def test_a_manifest_with_a_larger_vocabulary_is_refused_at_once(tmp_path):
    write_dataset(tmp_path / "d", [40] * 50, vocab_size=1000)
    with pytest.raises(DataError, match=r"data\.blend\.0\.prefix=.* model\.vocab_size=999 must be at least 1000"):
        source_of(indexed(tmp_path / "d"), vocab_size=999)


def test_bytes_that_look_like_negative_ids_are_refused(tmp_path):
    write_dataset(tmp_path / "d", [40] * 50, vocab_size=65000, manifest=False)
    idx = bytearray((tmp_path / "d.idx").read_bytes())
    idx[17] = 3
    (tmp_path / "d.idx").write_bytes(idx)
    source = source_of(indexed(tmp_path / "d"), vocab_size=65000)

    def read_all():
        for position in range(100):
            source.read(position)

    with pytest.raises(DataError, match="token id=-"):
        read_all()
