"""Whether a supervisor starts again, and when."""

import pytest

from megaspec.launcher.spec import RestartsSpec
from megaspec_launchers.restarts import Ended, decide

LIMITS = RestartsSpec(most=5, window_hours=1.0, without_progress=3, first_wait_seconds=2.0, longest_wait_seconds=60.0)


def changed(*, saved):
    """An attempt that the supervisor ended since devices went or came back."""
    return Ended(at=0.0, code=75, has_saved=saved, is_planned=True)


def failures(*codes, saved=True, every=10.0):
    """Attempts that end so, one after the other."""
    return [Ended(at=every * number, code=code, has_saved=saved) for number, code in enumerate(codes)]


@pytest.mark.parametrize("code", [73, 74, 75, 77])
def test_what_another_attempt_may_not_meet_again(code):
    verdict = decide(failures(code), LIMITS, spread=0.5)
    assert verdict.again
    assert verdict.wait_seconds == 2.0
    assert verdict.why == "again in 2.0 s, restart 1 of 5"


@pytest.mark.parametrize("code", [64, 65, 66, 76, 78, 1])
def test_what_another_attempt_would_meet_again(code):
    verdict = decide(failures(74, 74, code), LIMITS, spread=0.5)
    assert not verdict.again
    assert verdict.code == code


def test_a_run_that_is_done():
    verdict = decide(failures(74, 0), LIMITS, spread=0.5)
    assert (verdict.again, verdict.code) == (False, 0)


def test_an_internal_error_is_tried_once_more():
    assert decide(failures(70, saved=False), LIMITS, spread=0.5).again
    verdict = decide(failures(70, 70, saved=False), LIMITS, spread=0.5)
    assert (verdict.again, verdict.code) == (False, 70)
    # each got on by itself
    assert decide(failures(70, 70), LIMITS, spread=0.5).again
    assert decide(failures(70, 74, saved=False), LIMITS, spread=0.5).again


@pytest.mark.parametrize(("code", "end"), [(74, 70), (75, 70), (73, 73), (77, 77)])
def test_attempts_without_progress_end_the_run(code, end):
    assert decide(failures(code, code, saved=False), LIMITS, spread=0.5).again
    verdict = decide(failures(code, code, code, saved=False), LIMITS, spread=0.5)
    assert (verdict.again, verdict.code) == (False, end)
    assert "launcher.restarts.without_progress" in verdict.why
    # a step that was saved meanwhile begins the count anew
    got_on = [*failures(code, code, saved=False), *failures(code), *failures(code, code, saved=False)]
    assert decide(got_on, LIMITS, spread=0.5).again


def test_restarts_within_the_window_are_counted():
    assert decide(failures(*[74] * 5), LIMITS, spread=0.5).again
    verdict = decide(failures(*[74] * 6), LIMITS, spread=0.5)
    assert (verdict.again, verdict.code) == (False, 70)
    assert "5 restarts within 1 h" in verdict.why
    # half of them lie behind it
    assert decide(failures(*[74] * 9, every=800.0), LIMITS, spread=0.5).again
    assert not decide(failures(74), LIMITS.model_copy(update={"most": 0}), spread=0.5).again


def test_waits_double_up_to_the_longest_and_vary_by_a_half():
    patient = LIMITS.model_copy(update={"without_progress": 100, "most": 100})
    waits = [decide(failures(*[74] * n, saved=False), patient, spread=0.5).wait_seconds for n in range(1, 8)]
    assert waits == [4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert decide(failures(74), LIMITS, spread=0.0).wait_seconds == 1.0
    assert decide(failures(74), LIMITS, spread=1.0).wait_seconds == 3.0


def test_restarts_that_devices_cause_are_not_counted():
    planned = [changed(saved=True) for _ in range(20)]
    verdict = decide(planned, LIMITS, spread=0.5)
    assert (verdict.again, verdict.wait_seconds) == (True, 0.0)
    assert decide([*planned, *failures(74, 74, saved=False)], LIMITS, spread=0.5).again


def test_a_device_that_comes_and_goes_while_ranks_start_does_not_start_them_for_ever():
    waits = [decide([changed(saved=False)] * n, LIMITS, spread=0.5).wait_seconds for n in range(1, 8)]
    assert waits == [0.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    # what was saved meanwhile, or another end, begins the count anew
    for between in (changed(saved=True), *failures(74)):
        ends = [changed(saved=False)] * 5 + [between, changed(saved=False)]
        assert decide(ends, LIMITS, spread=0.5).wait_seconds == 0.0


def test_what_an_attempt_saved_that_devices_ended_is_progress():
    ends = [*failures(74, 74, saved=False), changed(saved=True), *failures(74, saved=False)]
    assert decide(ends, LIMITS, spread=0.5).wait_seconds == 4.0
    # one that saved nothing is neither a failure nor progress
    ends = [*failures(74, 74, saved=False), changed(saved=False), *failures(74, saved=False)]
    assert not decide(ends, LIMITS, spread=0.5).again
