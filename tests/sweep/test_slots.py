"""Places for points: disjoint GPUs, never more than there are."""

import pytest

from megaspec.core.errors import RecipeError
from megaspec.estimate.target import Target
from megaspec.sweep.slots import Slots, make_slots, point_target, visible_gpus
from megaspec.sweep.spec import SweepSpec

EIGHT = Target(gpus=8, gpu="NVIDIA H200", sm=90, gpu_memory=140 * 10**9, cores=64)


def test_points_of_different_sizes_are_packed_without_sharing_a_gpu():
    slots = make_slots(SweepSpec(), EIGHT, {})
    a, b, c = slots.take(4), slots.take(2), slots.take(1)
    assert [a, b, c] == [("0", "1", "2", "3"), ("4", "5"), ("6",)]
    assert slots.fits(1)
    assert not slots.fits(2)
    slots.give(b)
    assert slots.fits(3)
    assert slots.take(3) == ("4", "5", "7")
    assert not slots.fits(1)


def test_gpus_are_those_that_the_process_sees():
    assert visible_gpus(EIGHT.model_copy(update={"gpus": 3}), {"CUDA_VISIBLE_DEVICES": "5, 2,7"}) == ["5", "2", "7"]
    slots = make_slots(SweepSpec(gpus=2), EIGHT.model_copy(update={"gpus": 3}), {"CUDA_VISIBLE_DEVICES": "5,2,7"})
    assert slots.take(2) == ("5", "2")
    assert not slots.fits(1)


def test_slots_share_the_gpus_out():
    spec = SweepSpec(slots=4)
    assert point_target(spec, EIGHT).gpus == 2
    slots = make_slots(spec, EIGHT, {})
    for _ in range(4):
        slots.take(1)
    assert not slots.fits(1)


def test_without_a_gpu_there_is_one_slot_for_two_cores():
    assert [make_slots(SweepSpec(), Target(cores=n), {}).most for n in (1, 2, 3, 8)] == [1, 1, 1, 4]
    slots = Slots(most=2)
    assert slots.take(16) == ()
    slots.take(1)
    assert not slots.fits(1)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (SweepSpec(gpus=9), "sweep.gpus=9 must be at most the 8 GPUs"),
        (SweepSpec(slots=3, gpus=2), "sweep.slots=3 must be at most the 2 GPUs"),
    ],
)
def test_more_than_there_is_is_refused(spec, text):
    with pytest.raises(RecipeError, match=text):
        point_target(spec, EIGHT)
