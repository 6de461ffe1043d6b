"""The global batch over the steps."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspec.train.batch_schedule import BatchSchedule
from megaspec.train.spec import BatchRamp, TrainSpec


def train_spec(global_batch, ramp=None):
    return TrainSpec(steps=1, global_batch=global_batch, batch_ramp=ramp)


@st.composite
def ramps(draw):
    start, increment, increments = (draw(st.integers(1, n)) for n in (20, 9, 12))
    ramp = BatchRamp(start=start, increment=increment, samples=draw(st.integers(1, 700)))
    return train_spec(start + increment * increments, ramp)


def walk(train, steps):
    """Batch after batch from the rule: the number of whole parts of the ramp that the consumed samples fill."""
    ramp, consumed = train.batch_ramp, 0
    n = (train.global_batch - ramp.start) // ramp.increment
    part = Fraction(ramp.samples, n)
    for _ in range(steps):
        batch = min(train.global_batch, ramp.start + int(consumed / part) * ramp.increment)
        yield batch, consumed
        consumed += batch


@given(ramps())
@settings(max_examples=300, deadline=None)
def test_ramp_is_the_rule(train):
    schedule = BatchSchedule(train)
    for step, (batch, consumed) in enumerate(walk(train, 120)):
        assert schedule.batch(step) == batch
        assert schedule.consumed(step) == consumed


@given(ramps(), st.integers(0, 10**7))
@settings(max_examples=300, deadline=None)
def test_consumed_grows_by_the_batch(train, step):
    schedule = BatchSchedule(train)
    assert schedule.consumed(step + 1) - schedule.consumed(step) == schedule.batch(step)
    assert schedule.batch(step) in schedule.batches
    assert schedule.batches[-1] == train.global_batch


def test_part_that_is_no_whole_number_of_samples():
    # parts of 33 1/3 samples: 33 consumed samples are not a whole part
    schedule = BatchSchedule(train_spec(4, BatchRamp(start=1, increment=1, samples=100)))
    assert [schedule.batch(s) for s in (32, 33, 34)] == [1, 1, 2]


def test_batch_larger_than_the_parts_skips_stages():
    schedule = BatchSchedule(train_spec(40, BatchRamp(start=10, increment=10, samples=12)))
    assert [schedule.batch(s) for s in range(4)] == [10, 30, 40, 40]
    assert schedule.batches == (10, 30, 40)


@pytest.mark.parametrize("ramp", [None, BatchRamp(start=8, increment=4, samples=100)])
def test_without_a_way_to_grow_the_batch_is_constant(ramp):
    schedule = BatchSchedule(train_spec(8, ramp))
    assert schedule.batches == (8,)
    assert [schedule.consumed(s) for s in (0, 1, 1000)] == [0, 8, 8000]


def test_a_ramp_that_begins_later_is_the_same_one_from_there():
    ramp = BatchRamp(start=10, increment=10, samples=100)
    now = BatchSchedule(train_spec(40, ramp))
    later = BatchSchedule(train_spec(40, ramp.model_copy(update={"first_step": 50})))
    assert later.batches == now.batches == (10, 20, 30, 40)
    for step in range(40):
        assert later.batch(50 + step) == now.batch(step)
        assert later.consumed(50 + step) - later.consumed(50) == now.consumed(step)
    # before it, its first batch: nothing is skipped where it begins
    assert [later.batch(step) for step in (0, 49)] == [10, 10]
    assert later.consumed(50) == 500
