import itertools
import signal

import pytest

from megaspec_launchers.outcome import CAUSES, RankEnd, judge


def killed(rank, number=signal.SIGKILL):
    return RankEnd(rank, None, number)


def by_launcher(rank):
    return RankEnd(rank, None, signal.SIGKILL, killed_by_launcher=True)


@pytest.mark.parametrize(
    ("ends", "code", "cause"),
    [
        ([RankEnd(0, 0), RankEnd(1, 0)], 0, None),
        ([RankEnd(0, 75), RankEnd(1, 75)], 75, None),
        ([RankEnd(1, 0), RankEnd(0, 75)], 75, None),
        ([killed(1), RankEnd(0, 74)], 74, 1),
        # a rank that failed because of a dead neighbour may be heard of before the dead one
        ([RankEnd(0, 1), killed(1)], 74, 1),
        ([killed(1, signal.SIGSEGV), RankEnd(0, 70)], 74, 1),
        ([RankEnd(2, 1), RankEnd(0, 74), RankEnd(1, 74)], 70, 2),
        ([RankEnd(2, 3), by_launcher(0)], 70, 2),
        ([RankEnd(0, 74), RankEnd(1, 1)], 74, 0),
        ([RankEnd(0, 75), by_launcher(1)], 74, 1),
        ([by_launcher(1), by_launcher(0)], 74, 1),
        ([RankEnd(0, 74), RankEnd(1, 66)], 66, 1),
        ([killed(0), RankEnd(1, 73)], 73, 1),
    ],
)
def test_one_code_for_all_ranks(ends, code, cause):
    outcome = judge(ends)
    assert outcome.code == code
    assert (outcome.cause.rank if outcome.cause else None) == cause


@pytest.mark.parametrize("named", CAUSES)
def test_a_named_cause_wins_in_any_order(named):
    others = [RankEnd(0, 74), killed(1), RankEnd(2, 1), by_launcher(3), RankEnd(4, 0), RankEnd(5, 75)]
    for at in range(len(others) + 1):
        ends = [*others[:at], RankEnd(9, named), *others[at:]]
        assert judge(ends).code == named
    for pair in itertools.permutations([RankEnd(0, named), RankEnd(1, 74)]):
        assert judge(pair).code == named
