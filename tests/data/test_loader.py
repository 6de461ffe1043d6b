import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspec.core.errors import DataError
from megaspec.data.loader import Loader, eval_batches, open_source
from megaspec.data.source import Sample
from megaspec.data.spec import SyntheticSpec
from megaspec.train.batch_schedule import BatchSchedule
from megaspec.train.spec import BatchRamp, TrainSpec

T = 6
CPU = torch.device("cpu")


class Counting:
    """Sequence p is p, p + 1, ..."""

    def __init__(self, bad_at: int = -1):
        self.bad_at = bad_at

    def __len__(self) -> int:
        return 10**9

    def read(self, position: int) -> Sample:
        if position == self.bad_at:
            raise DataError(f"bad at {position}")
        return Sample(
            tokens=np.arange(position, position + T + 1),
            mask=np.ones(T, dtype=bool),
            documents=np.zeros(T, dtype=np.int32),
        )


def schedule(*, ramp: bool = False, global_batch: int = 24) -> BatchSchedule:
    batch_ramp = BatchRamp(start=36, increment=36, samples=40) if ramp else None
    return BatchSchedule(TrainSpec(steps=100, global_batch=global_batch, batch_ramp=batch_ramp))


def loader(source=None, plan=None, **fields) -> Loader:
    fields = {"start_step": 0, "steps": 3, "micro_batch": 2, "dp_rank": 0, "dp_size": 1, "device": CPU, **fields}
    return Loader(source or Counting(), plan or schedule(), **fields)


@given(
    dp_size=st.sampled_from([1, 2, 3, 4]),
    micro_batch=st.sampled_from([1, 3]),
    prefetch=st.integers(0, 4),
    start_step=st.integers(0, 5),
    ramp=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_the_order_is_the_same_on_any_layout(dp_size, micro_batch, prefetch, start_step, ramp):
    plan = schedule(ramp=ramp, global_batch=72)
    per_rank = []
    for dp_rank in range(dp_size):
        with loader(
            plan=plan,
            start_step=start_step,
            micro_batch=micro_batch,
            dp_rank=dp_rank,
            dp_size=dp_size,
            prefetch=prefetch,
        ) as batches:
            per_rank.append(list(batches))
    for number, steps in enumerate(zip(*per_rank, strict=True)):
        first, count = plan.consumed(start_step + number), plan.batch(start_step + number)
        assert {step.ids for step in steps} == {(first, count)}
        rows = [
            row
            for micro_batches in zip(*[step.micro_batches for step in steps], strict=True)
            for batch in micro_batches
            for row in batch.ids.tolist()
        ]
        assert rows == list(range(first, first + count))
        for step in steps:
            for batch in step.micro_batches:
                assert batch.tokens.tolist() == [list(range(p, p + T)) for p in batch.ids.tolist()]
                assert torch.equal(batch.labels, batch.tokens + 1)
                assert batch.mask.all()
                assert batch.documents is None
    assert len(per_rank[0]) == 3


def test_types_and_shapes():
    with loader(document_mask=True, steps=1) as batches:
        (step,) = batches
    assert len(step.micro_batches) == 12
    batch = step.micro_batches[0]
    documents = batch.documents
    assert (documents.most, documents.longest) == (32, T)
    tensors = vars(batch) | {"documents": documents.number, "starts": documents.starts}
    assert {id(value) for value in tensors.values()} == {id(value) for value in batch.tensors()}
    assert {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()} == {
        "tokens": (torch.int64, (2, T)),
        "labels": (torch.int64, (2, T)),
        "mask": (torch.bool, (2, T)),
        "ids": (torch.int64, (2,)),
        "documents": (torch.int32, (2, T)),
        "starts": (torch.int32, (2 * 32 + 1,)),
    }
    assert all(value.is_contiguous() for value in tensors.values())


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "loader"]


def test_an_error_reaches_the_consumer_at_its_step():
    batches = iter(loader(Counting(bad_at=30)))
    assert next(batches).ids == (0, 24)
    with pytest.raises(DataError, match="bad at 30"):
        next(batches)
    assert threads() == []


def test_closing_early_stops_the_thread():
    unread = loader(steps=10**6, prefetch=1)
    begun = loader(steps=10**6, prefetch=1)
    next(iter(begun))
    assert len(threads()) == 2
    for batches in (unread, begun):
        batches.close()
        batches.close()
    assert threads() == []
    assert list(begun) == []


def test_closing_wakes_a_consumer():
    class Slow(Counting):
        def read(self, position: int) -> Sample:
            time.sleep(0.3)
            return super().read(position)

    batches = loader(Slow())
    got = []
    consumer = threading.Thread(target=lambda: got.extend(batches))
    consumer.start()
    time.sleep(0.05)
    batches.close()
    consumer.join(timeout=20)
    assert not consumer.is_alive()


def test_reading_runs_ahead_of_the_consumer():
    read = []

    class Watched(Counting):
        def read(self, position: int) -> Sample:
            read.append(position)
            return super().read(position)

    with loader(Watched(), steps=50, prefetch=2) as batches:
        next(iter(batches))
        for _ in range(200):
            if len(read) >= 3 * 24:
                break
            time.sleep(0.01)
        time.sleep(0.05)
        assert 3 * 24 <= len(read) <= 4 * 24


@given(samples=st.integers(1, 23), micro_batch=st.integers(1, 4), dp_size=st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_evaluation_counts_every_sample_once(samples, micro_batch, dp_size):
    ranks = [
        list(eval_batches(Counting(), samples, micro_batch=micro_batch, dp_rank=r, dp_size=dp_size, device=CPU))
        for r in range(dp_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    rows = [(int(i), bool(m.any())) for batches in ranks for b in batches for i, m in zip(b.ids, b.mask, strict=True)]
    assert sorted(i for i, counts in rows if counts) == list(range(samples))
    assert {i for i, counts in rows if not counts} <= {-1}
    assert all(tuple(b.tokens.shape) == (micro_batch, T) for batches in ranks for b in batches)


def test_masks_of_the_source_arrive():
    spec = SyntheticSpec(kind="synthetic", seq_len=32, vocab_size=11, masked=0.5, document_mask=True)
    source = open_source(spec, split="train", seed=1, segments=(100,), vocab_size=11)
    with loader(source, steps=1, document_mask=True) as batches:
        (step,) = batches
    for batch in step.micro_batches:
        for row, position in enumerate(batch.ids.tolist()):
            sample = source.read(position)
            assert batch.mask[row].tolist() == sample.mask.tolist()
            assert batch.documents.number[row].tolist() == sample.documents.tolist()


@pytest.mark.gpu
def test_batches_arrive_on_the_gpu():
    with loader(device=torch.device("cuda"), steps=2) as batches:
        for step in batches:
            assert all(batch.tokens.is_cuda for batch in step.micro_batches)
            assert step.micro_batches[0].ids.tolist() == [step.ids[0], step.ids[0] + 1]
