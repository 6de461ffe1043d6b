"""Text that is tokenized as it is read: the order, the place, and what is said of bad files."""

import json
import os
import re
import signal
from collections import Counter

import numpy as np
import pytest

from megaspec.core.errors import CheckpointError, DataError
from megaspec.data.facts import data_facts
from megaspec.data.loader import Loader, open_source
from megaspec.data.spec import StreamSpec
from megaspec.data.stream_files import check_unchanged
from megaspec.data.stream_lane import StreamOrder, initial_turns, next_turn
from megaspec.data.stream_source import StreamSource
from megaspec.data.tokenizer import train_bpe
from megaspec.data.workers import WorkerDied
from megaspec.train.batch_schedule import BatchSchedule
from megaspec.train.spec import TrainSpec
from tests.data.helpers import stream_spec, text_of, write_texts

EOD = 256


def source_of(spec: StreamSpec, *, split: str = "train", vocab_size: int = 257) -> StreamSource:
    return open_source(spec, split=split, seed=spec.seed, segments=(10_000,), vocab_size=vocab_size)


def lane_tokens(spec: StreamSpec, n_samples: int, *, split: str = "train") -> list[list[int]]:
    """The tokens of each lane in a row, put together from its samples."""
    source = source_of(spec, split=split)
    n_lanes = spec.lanes if split == "train" else 1
    lanes: list[list[int]] = [[] for _ in range(n_lanes)]
    for position in range(n_samples * n_lanes):
        tokens = source.read(position).tokens.tolist()
        row = lanes[position % n_lanes]
        # the first of a sample is the last of the one before it
        assert not row or row[-1] == tokens[0], position
        row += tokens[1:] if row else tokens
    source.close()
    return lanes


def documents_in(tokens: list[int]) -> list[str]:
    """The whole documents of a row of tokens."""
    texts = bytes(one if one < 256 else 0 for one in tokens).decode().split("\0")
    return texts[:-1]


def read_all(spec: StreamSpec, positions, *, place: np.ndarray | None = None) -> list[tuple]:
    source = source_of(spec)
    try:
        if place is not None:
            source.go_to(place)
        return [as_plain(source.read(position)) for position in positions]
    finally:
        source.close()


def as_plain(sample) -> tuple:
    return tuple(value.tobytes() for value in vars(sample).values())


def test_a_pass_takes_every_document_once_and_the_next_one_in_another_order(tmp_path):
    for name in ("a", "b"):
        write_texts(tmp_path / f"{name}.jsonl", 200)
    spec = stream_spec(f"{tmp_path}/*.jsonl", lanes=1, seq_len=50)
    expected = {text_of(name, number) for name in "ab" for number in range(200)}
    (row,) = lane_tokens(spec, 1000)
    found = documents_in(row)
    assert len(found) > 1000
    first, second = found[:400], found[400:800]
    assert set(first) == set(second) == expected
    assert first != second
    # neither as they lie in the files, nor file by file
    assert first != sorted(first)
    assert {text[1] for text in first[:100]} == {"a", "b"}


def test_lanes_share_a_pass_among_them(tmp_path):
    write_texts(tmp_path / "a.jsonl", 4000)
    spec = stream_spec(tmp_path / "a.jsonl", lanes=4, seq_len=64)
    order = StreamOrder(spec, seed=3, shuffled=True)
    n_stretches = order.groups[0].n_stretches
    assert n_stretches >= 4 * 8
    found = Counter()
    for number in range(n_stretches):
        found.update(document.text for document in order.read(order.groups[0].stretch(number)))
    assert found == Counter(text_of("a", number) for number in range(4000))
    # what the lanes read first is of different stretches
    heads = {documents_in(row)[0] for row in lane_tokens(spec, 8)}
    assert len(heads) == 4


@pytest.mark.parametrize("n_columns_each", [1, 7, 1000])
def test_parquet_rows_are_cut_wherever_row_groups_end(tmp_path, n_columns_each):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    texts = [text_of("p", number) + "x" * 300 for number in range(100)]
    table = pyarrow.table({"text": texts, "other": list(range(100))})
    parquet.write_table(table, tmp_path / "p.parquet", row_group_size=n_columns_each, compression="none")
    order = StreamOrder(stream_spec(tmp_path / "p.parquet", lanes=1), seed=3, shuffled=True)
    (group,) = order.groups
    assert group.n_stretches > 3
    found = [document.text for number in range(group.n_stretches) for document in order.read(group.stretch(number))]
    assert sorted(found) == sorted(texts)


def test_seed_window_and_lanes_are_the_order_and_workers_are_not(tmp_path):
    write_texts(tmp_path / "a.jsonl", 500)
    base = stream_spec(tmp_path / "a.jsonl")
    expected = read_all(base, range(40))
    assert read_all(base.model_copy(update={"workers": 3}), range(40)) == expected
    for other in ({"seed": 4}, {"lanes": 2}):
        assert read_all(base.model_copy(update=other), range(40)) != expected, other
    write_texts(tmp_path / "large.jsonl", 3000)
    large = stream_spec(tmp_path / "large.jsonl", lanes=1)
    narrow = large.model_copy(update={"window": 5000})
    assert read_all(narrow, range(40)) != read_all(large, range(40))


@pytest.mark.parametrize("workers", [0, 2])
def test_every_place_leads_to_the_samples_that_follow_it(tmp_path, workers):
    write_texts(tmp_path / "a.jsonl", 60)
    write_texts(tmp_path / "b.jsonl", 40)
    spec = stream_spec(tmp_path / "a.jsonl", tmp_path / "b.jsonl", weights=(3, 1), workers=workers, seq_len=100)
    n_samples = 120
    expected = read_all(spec, range(n_samples))
    source = source_of(spec)
    places = [source.place()]
    for position in range(n_samples):
        source.read(position)
        places.append(source.place())
    source.close()
    for done in (0, 60) if workers else range(0, n_samples, 5):
        rest = range(done, min(done + 12, n_samples))
        assert read_all(spec, rest, place=places[done]) == expected[done : rest.stop], done
    # more documents than a pass has were read
    assert places[-1][:, 2].max() * spec.lanes > StreamOrder(spec, seed=3, shuffled=True).groups[0].n_stretches


def loader_of(spec: StreamSpec, *, rank: int, ranks: int, micro_batch: int, start: int, steps: int, place=None):
    source = source_of(spec)
    if place is not None:
        source.go_to(place)
    schedule = BatchSchedule(TrainSpec(steps=100, global_batch=24))
    arguments = {"micro_batch": micro_batch, "dp_rank": rank, "dp_size": ranks, "device": "cpu"}
    with Loader(source, schedule, start_step=start, steps=steps, document_mask=True, **arguments) as batches:
        found = list(batches)
    source.close()
    return found


def by_id(steps) -> dict[int, bytes]:
    found = {}
    for step in steps:
        for batch in step.micro_batches:
            for row, number in enumerate(batch.ids.tolist()):
                tensors = (batch.tokens, batch.labels, batch.mask, batch.documents.number)
                found[number] = b"".join(tensor[row].numpy().tobytes() for tensor in tensors)
    return found


# 24 sequences a step. With 6 lanes ranks share some, with 5 a rank comes to another lane at every step.
@pytest.mark.parametrize("lanes", [24, 6, 5])
def test_stopped_and_gone_on_with_on_another_layout(tmp_path, lanes):
    write_texts(tmp_path / "a.jsonl", 300)
    spec = stream_spec(tmp_path / "a.jsonl", lanes=lanes, document_mask=True)
    expected = by_id(loader_of(spec, rank=0, ranks=1, micro_batch=24, start=0, steps=6))
    assert sorted(expected) == list(range(6 * 24))
    for ranks, micro_batch in ((2, 3), (4, 6), (3, 1)):
        found = {}
        places = []
        for rank in range(ranks):
            steps = loader_of(spec, rank=rank, ranks=ranks, micro_batch=micro_batch, start=0, steps=3)
            found |= by_id(steps)
            places.append(steps[-1].place)
        # what the ranks of a run agree on in runtime/data_place.py
        furthest = np.stack(places)[:, :, 0].argmax(axis=0)
        place = np.stack([places[rank][lane] for lane, rank in enumerate(furthest)])
        for rank in range(2):
            found |= by_id(loader_of(spec, rank=rank, ranks=2, micro_batch=4, start=3, steps=3, place=place))
        assert found == expected, (ranks, micro_batch)


def test_a_rank_tokenizes_its_own_lanes_alone(tmp_path, monkeypatch):
    write_texts(tmp_path / "a.jsonl", 3000)
    spec = stream_spec(tmp_path / "a.jsonl", lanes=24)
    counted = Counter()
    tokens_of = StreamOrder.tokens_of

    def count(self, document, file):
        counted[rank] += 1
        return tokens_of(self, document, file)

    monkeypatch.setattr(StreamOrder, "tokens_of", count)
    for rank in range(4):
        loader_of(spec, rank=rank, ranks=4, micro_batch=3, start=0, steps=5)
    rank = "alone"
    loader_of(spec, rank=0, ranks=1, micro_batch=24, start=0, steps=5)
    assert sum(counted[rank] for rank in range(4)) == counted["alone"] > 100


def test_weights_hold_in_a_batch_and_along_a_lane(tmp_path):
    write_texts(tmp_path / "a.jsonl", 300)
    write_texts(tmp_path / "b.jsonl", 50)
    spec = stream_spec(tmp_path / "a.jsonl", tmp_path / "b.jsonl", weights=(2, 1), lanes=6, seq_len=120)
    source = source_of(spec)
    turns = []
    for position in range(6 * 30):
        text = bytes(one % 256 for one in source.read(position).tokens.tolist()).decode(errors="replace")
        turns.append("a" if "<a " in text else "b")
    table = np.array(turns).reshape(30, 6)
    assert ((table == "b").sum(axis=1) == 2).all()
    assert ((table == "b").sum(axis=0) == 10).all()


def test_turns_are_megatrons():
    """Of 5:3:2, by hand: the largest error first."""
    taken = [0, 0, 0]
    found = []
    for _ in range(10):
        turn = next_turn(taken, (0.5, 0.3, 0.2))
        found.append(turn)
        taken[turn] += 1
    assert found == [0, 1, 2, 0, 0, 1, 0, 2, 1, 0]
    assert initial_turns(10, (0.5, 0.3, 0.2)) == [5, 3, 2]


def test_evaluation_reads_file_after_file_from_the_start(tmp_path):
    for name in "ab":
        write_texts(tmp_path / f"{name}.jsonl", 30)
    spec = stream_spec(f"{tmp_path}/*.jsonl", workers=2)
    (row,) = lane_tokens(spec, 100, split="valid")
    in_order = [text_of(name, number) for name in "ab" for number in range(30)]
    found = documents_in(row)
    assert len(found) > 70
    assert found == (in_order * 2)[: len(found)]
    source = source_of(spec, split="valid")
    first = as_plain(source.read(0))
    source.read(5)
    assert as_plain(source.read(0)) == first


def test_document_bounds(tmp_path):
    write_texts(tmp_path / "a.jsonl", 80)
    plain = source_of(stream_spec(tmp_path / "a.jsonl", seq_len=90))
    masked = source_of(stream_spec(tmp_path / "a.jsonl", seq_len=90, document_mask=True))
    for position in range(30):
        sample = masked.read(position)
        ends = np.flatnonzero(sample.tokens == EOD)
        assert plain.read(position).mask.all()
        # the label behind the token that ends a document is the next one's first
        assert set(np.flatnonzero(~sample.mask)) == {end for end in ends if end < 90}
        assert np.array_equal(sample.documents, np.cumsum(np.append(0, sample.tokens[:-2] == EOD)))


def test_a_tokenizer_json_and_its_vocabulary(tmp_path):
    write_texts(tmp_path / "a.jsonl", 100)
    tokenizer = train_bpe([text_of("a", number) for number in range(100)], 300)
    (tmp_path / "tok.json").write_bytes(tokenizer.text)
    spec = stream_spec(tmp_path / "a.jsonl", tokenizer=str(tmp_path / "tok.json"), lanes=1)
    source = source_of(spec, split="valid", vocab_size=300)
    tokens = np.concatenate([source.read(position).tokens[:-1] for position in range(8)]).tolist()
    first = tokenizer.encode_batch([text_of("a", 0), text_of("a", 1)])
    assert tokens[: len(first[0]) + 1 + len(first[1])] == [*first[0], tokenizer.eod, *first[1]]
    assert data_facts(spec).vocab_size == 300
    with pytest.raises(DataError, match=r"token ids up to 299, model.vocab_size=299 must be at least 300"):
        source_of(spec, vocab_size=299)


BAD = {
    "broken JSON: Expecting property name enclosed in double quotes at character 2": "{",
    'missing key: no "text"; the line has "other"; data.key=text must name a text': json.dumps({"other": "x"}),
    'wrong type: "text" must be a string, found a number (3); data.key=text must name a text': json.dumps({"text": 3}),
    "empty document": json.dumps({"text": " "}),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("what", BAD)
def test_a_bad_line_is_named_or_left_out_and_counted(tmp_path, what, workers, capfd):
    if workers and not what.startswith("broken JSON"):
        pytest.skip("the worker's errors are of one kind")
    path = write_texts(tmp_path / "a.jsonl", 900, line=lambda number: BAD[what] if number == 700 else None)
    spec = stream_spec(path, lanes=1, workers=workers)
    assert data_facts(spec).problems == ()
    with pytest.raises(DataError, match=rf"a\.jsonl:701: {re.escape(what)}; mend it, or set data.bad_lines=skip"):
        read_all(spec, range(900))
    skipped = spec.model_copy(update={"bad_lines": "skip"})
    assert len(read_all(skipped, range(700))) == 700
    kind = what.partition(":")[0]
    told = f"data.bad_lines=skip: left out 1 so far in this process, the last {path}:701: {kind}"
    assert f"{told} (a line counts whenever it is read, in each pass anew)" in capfd.readouterr().err


def test_who_ended_at_a_bad_line_goes_on_with_skip(tmp_path):
    path = write_texts(tmp_path / "a.jsonl", 3000, line=lambda number: "{" if number == 2900 else None)
    spec = stream_spec(path, lanes=2, window=5000)
    source = source_of(spec)
    taken = []

    def take_all():
        while True:
            taken.append(as_plain(source.read(len(taken))))

    with pytest.raises(DataError, match=r"a\.jsonl:2901: "):
        take_all()
    place = source.place()
    source.close()
    assert len(taken) > 10
    skipped = spec.model_copy(update={"bad_lines": "skip"})
    behind = range(len(taken), len(taken) + 20)
    expected = read_all(skipped, range(behind.stop))
    assert expected[: len(taken)] == taken
    assert read_all(skipped, behind, place=place) == expected[len(taken) :]


def problems(spec: StreamSpec) -> str:
    return "\n".join(str(problem) for problem in data_facts(spec).problems)


def test_what_is_seen_before_a_run(tmp_path):
    good = write_texts(tmp_path / "good.jsonl", 5)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "other.jsonl").write_text('{"body": "x"}\n')
    assert problems(stream_spec(good)) == ""
    told = problems(stream_spec(f"{tmp_path}/*.jsonl"))
    assert "empty.jsonl: an empty file; remove it, or set data.bad_lines=skip" in told
    assert 'other.jsonl:1: missing key: no "text"; the line has "body"; data.key=text must name a text' in told
    assert problems(stream_spec(f"{tmp_path}/*.jsonl", bad_lines="skip")) == ""
    assert "data.files.0.path=nowhere/*.jsonl: no file has such a name" in problems(stream_spec("nowhere/*.jsonl"))
    assert "no such file or folder" in problems(stream_spec(tmp_path / "absent.jsonl"))
    assert "is read for data.files.0 already" in problems(stream_spec(good, f"{tmp_path}/g*.jsonl"))
    assert "data.tokenizer=gpt2: no such file or folder" in problems(stream_spec(good, tokenizer="gpt2"))
    assert "data prepare python" in problems(stream_spec("python"))
    files = stream_spec(good, tmp_path / "other.jsonl", weights=(1, 1)).files
    mixed = (files[0], files[1].model_copy(update={"weight": None}))
    assert "has no weight, other entries have one" in problems(stream_spec(good).model_copy(update={"files": mixed}))


def test_parquet_without_the_column(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "p.parquet")
    assert "no column text; data.key names one of body" in problems(stream_spec(tmp_path / "p.parquet"))


def read_on(source: StreamSource) -> None:
    for position in range(1, 500):
        source.read(position)


def test_changed_files_are_refused(tmp_path):
    path = write_texts(tmp_path / "a.jsonl", 500)
    spec = stream_spec(path, lanes=1)
    said = data_facts(spec).fingerprint
    check_unchanged(spec, said)
    source = source_of(spec)
    source.read(0)
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match="other than those that the run began with"):
        check_unchanged(spec, said)
    with pytest.raises(DataError, match=r"a\.jsonl: size or time of change is another than when the run began"):
        read_on(source)


def test_a_file_in_which_no_document_begins(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n" * 20_000)
    spec = stream_spec(path, lanes=2, bad_lines="skip")
    with pytest.raises(DataError, match=r"data\.files: no document in [\d,]+ stretches of files"):
        read_all(spec, range(2))


def test_a_worker_that_dies_is_an_error(tmp_path):
    write_texts(tmp_path / "a.jsonl", 500)
    source = source_of(stream_spec(tmp_path / "a.jsonl", workers=1))
    source.read(0)
    (worker,) = source._workers
    os.kill(worker._process.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"data\.workers: the worker with pid \d+ was killed by SIGKILL; when memory"):
        read_on(source)
    source.close()
    source.close()
    assert worker._process.returncode == -signal.SIGKILL


def test_a_place_of_another_stream_is_refused(tmp_path):
    write_texts(tmp_path / "a.jsonl", 50)
    source = source_of(stream_spec(tmp_path / "a.jsonl"))
    place = source.place()
    # a lane that took a sample of no group
    uneven = place.copy()
    uneven[1, 0] += 1
    for wrong in (place[:2], place.astype(np.int32), place - 1, uneven):
        with pytest.raises(CheckpointError, match="the place in the stream is"):
            source.go_to(wrong)
    source.go_to(place)
