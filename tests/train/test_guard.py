"""What a run does about NaN, infinities and spikes: skip, go back, stop; the same from any checkpoint on."""

import json
from itertools import pairwise
from math import inf
from random import Random

import pytest

from megaspec.train.guard import NO_LIMITS, Guard, Window, sampled
from megaspec.train.spec import NumbersSpec, SkippedSteps, SpikesSpec

SPIKES = SpikesSpec(window=8, threshold=10.0)


def steady(guard: Guard, steps: range, *, draw: Random | None = None) -> None:
    draw = draw or Random(3)
    for step in steps:
        guard.note_applied(step, loss=3.0 + draw.gauss(0, 0.05), grad_norm=1.0 + draw.gauss(0, 0.1))


def test_without_a_budget_the_first_one_ends_the_run():
    verdict = Guard(NumbersSpec()).judge(5, is_finite=False)
    assert (verdict.action, verdict.kind, verdict.window) == ("stop", "nonfinite", Window(5, 5))


def test_skips_then_goes_back_then_stops():
    guard = Guard(NumbersSpec(skips=2, within=10, rollbacks=1, before=2))
    actions = []
    for step in (20, 25, 28):
        verdict = guard.judge(step, is_finite=False)
        actions.append(verdict.action)
        if verdict.action == "skip":
            guard.note_skipped(verdict)
    assert actions == ["skip", "skip", "roll_back"]
    # from two steps before the first of the three
    assert verdict.window == Window(18, 28)
    guard.roll_back(verdict.window, to={})
    assert [guard.leaves_out(step) for step in (17, 18, 28, 29)] == [False, True, True, False]
    for step in (40, 41):
        guard.note_skipped(guard.judge(step, is_finite=False))
    assert guard.judge(42, is_finite=False).action == "stop"


def test_the_last_skips_are_those_of_the_steps_that_were_trained_on():
    guard = Guard(NumbersSpec(skips=2, within=10), told=[SkippedSteps(first=29, last=29)])
    guard.note_skipped(guard.judge(27, is_finite=False))
    assert guard.last_skips(27) == [], "26 was not skipped"
    guard.note_skipped(guard.judge(28, is_finite=False))
    assert guard.last_skips(28) == [27, 28]
    assert guard.last_skips(29) == [27, 28], "29 was left out"
    assert guard.last_skips(30) == [], "30 was applied"
    assert Guard(NumbersSpec()).last_skips(30) == [], "nothing may be skipped"


def test_one_last_step_alone_says_nothing():
    guard = Guard(NumbersSpec(skips=1, within=10))
    guard.note_skipped(guard.judge(27, is_finite=False))
    assert guard.last_skips(27) == []


def test_what_is_long_ago_does_not_count():
    guard = Guard(NumbersSpec(skips=1, within=10))
    for step in (10, 20, 30):
        verdict = guard.judge(step, is_finite=False)
        assert verdict.action == "skip"
        guard.note_skipped(verdict)
    assert guard.judge(39, is_finite=False).action == "stop"


def test_limits_are_of_the_steps_up_to_the_last_but_one():
    """A GPU's host has read no more by then; a value behind it must change nothing."""
    guard = Guard(NumbersSpec(spikes=SPIKES))
    steady(guard, range(1, 9))
    assert guard.limits(9) == NO_LIMITS, "7 values up to step 7"
    before = guard.limits(10)
    assert before != NO_LIMITS
    guard.note_applied(9, loss=1e6, grad_norm=1e6)
    assert guard.limits(10) == before
    assert guard.limits(11) != before


def test_a_limit_is_robust():
    guard = Guard(NumbersSpec(spikes=SPIKES))
    steady(guard, range(1, 9))
    plain = guard.limits(10)
    tainted = Guard(NumbersSpec(spikes=SPIKES))
    steady(tainted, range(1, 9))
    tainted._values[2] = (3, 1e9, 1e9)
    for limits in (plain, tainted.limits(10)):
        assert 3.1 < limits.loss < 4.5
        assert 1.1 < limits.grad_norm < 4.0


def test_equal_values_have_a_limit_above_them():
    guard = Guard(NumbersSpec(spikes=SPIKES))
    for step in range(1, 9):
        guard.note_applied(step, loss=2.0, grad_norm=0.5)
    limits = guard.limits(10)
    assert (limits.loss, limits.grad_norm) == pytest.approx((2.2, 0.55))


@pytest.mark.parametrize(("watch", "open_one"), [("loss", "grad_norm"), ("grad_norm", "loss")])
def test_what_is_watched(watch, open_one):
    guard = Guard(NumbersSpec(spikes=SPIKES.model_copy(update={"watch": watch})))
    steady(guard, range(1, 9))
    limits = guard.limits(10)
    assert getattr(limits, open_one) == inf
    assert getattr(limits, watch) < inf


def test_the_warm_up_is_not_judged():
    guard = Guard(NumbersSpec(spikes=SPIKES.model_copy(update={"warmup_steps": 20})))
    steady(guard, range(1, 20))
    assert guard.limits(20) == NO_LIMITS
    assert guard.limits(21) != NO_LIMITS


@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_that_goes_on_judges_alike_wherever_it_began_again(lag):
    """Through JSON, after any step, whether the host is a step behind or not."""
    spec = NumbersSpec(skips=3, within=20, spikes=SPIKES)
    draw = Random(5)
    rows = []
    for step in range(1, 61):
        factor = 9.0 if draw.random() < 0.1 else 1.0
        rows.append((step, factor * (3 + draw.gauss(0, 0.05)), 1 + draw.gauss(0, 0.1)))

    def run(guard: Guard, first: int) -> list:
        found = []
        pending = []
        for step, loss, norm in rows[first:]:
            limits = guard.limits(step)
            found.append(limits)
            pending.append((step, loss, norm, limits))
            while len(pending) > lag:
                report(guard, *pending.pop(0))
        return found

    def report(guard, step, loss, norm, limits):
        if loss > limits.loss or norm > limits.grad_norm:
            guard.note_skipped(guard.judge(step, is_finite=True))
        else:
            guard.note_applied(step, loss=loss, grad_norm=norm)

    whole = run(Guard(spec), 0)
    assert sum(one != NO_LIMITS for one in whole) > 40
    for stop in range(1, 60):
        first = Guard(spec)
        for step, loss, norm in rows[:stop]:
            report(first, step, loss, norm, first.limits(step))
        again = Guard(spec)
        again.load_state(json.loads(json.dumps(first.state())))
        assert run(again, stop) == whole[stop:], stop


def test_what_is_told_is_left_out_from_the_start():
    guard = Guard(NumbersSpec(), [SkippedSteps(first=3, last=4), SkippedSteps(first=9, last=9)])
    assert [step for step in range(1, 12) if guard.leaves_out(step)] == [3, 4, 9]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 1.0])
def test_a_share_of_steps_is_spread_evenly(share):
    taken = [step for step in range(1, 10_001) if sampled(step, share)]
    assert abs(len(taken) - 10_000 * share) <= 3
    if share:
        gaps = [b - a for a, b in pairwise(taken)]
        assert max(gaps) <= 3 / share
