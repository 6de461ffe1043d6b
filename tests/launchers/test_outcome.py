"""One exit code and the first cause, whatever the order in which ranks are heard of."""

import itertools
import signal

import pytest

from megaspec_launchers.outcome import CAUSES, MEMORY, RankEnd, judge
from megaspec_launchers.standing import Frame, Standing, main_stack

ALL_REDUCE = Frame("/venv/site-packages/torch/distributed/distributed_c10d.py", 3000, "all_reduce")
WAITS = (ALL_REDUCE, Frame("run.py", 7, "go"))
WORKS = (Frame("plugin.py", 3, "loss"), Frame("run.py", 7, "go"))


def killed(rank, number=signal.SIGKILL):
    return RankEnd(rank, None, number)


def by_launcher(rank, number=signal.SIGKILL, **standing):
    return RankEnd(rank, None, number, by_launcher=True, standing=Standing(**standing))


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
        # a rank that crashed takes its time to end; those that miss it are gone before
        ([RankEnd(0, 74), RankEnd(1, 1)], 70, 1),
        ([RankEnd(0, 75), by_launcher(1)], 74, 1),
        ([by_launcher(1), by_launcher(0)], 74, 0),
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


# What happened first, at rank 9, and what the others make of it.
FIRST = {
    "killed, memory or by hand": (killed(9), 74),
    "a crash in C": (killed(9, signal.SIGSEGV), 74),
    "ended by somebody else": (killed(9, signal.SIGTERM), 74),
    "an IndexError": (RankEnd(9, 1), 70),
    "bad data": (RankEnd(9, 65), 65),
    "halted": (by_launcher(9, is_halted=True), 74),
    "stuck, and so killed": (by_launcher(9, stack=WORKS), 74),
    "only its signal is known": (by_launcher(9), 74),
}
AFTER_A_DEATH = [RankEnd(0, 74), by_launcher(1, signal.SIGTERM), by_launcher(2, stack=WAITS), RankEnd(3, 75)]


@pytest.mark.parametrize("what", FIRST)
def test_the_first_cause_is_named_in_every_order(what):
    first, code = FIRST[what]
    others = AFTER_A_DEATH
    if first.by_launcher and not first.standing.is_halted:
        others = others[1:]  # a rank that says that a collective failed knows more than one that did not end
    for ends in itertools.permutations([first, *others]):
        assert judge(ends).cause == first
        assert judge(ends).code == code


def test_of_several_causes_the_first_is_named():
    """By the time at which it ended, whatever its rank and the order in which it is heard of."""
    ends = [
        RankEnd(0, 76, ended_at=5.2),
        RankEnd(3, 65, ended_at=5.1),
        RankEnd(1, 73, ended_at=5.3),
        # a survivor that was asked to end, and is found at the first look
        RankEnd(2, None, signal.SIGTERM, by_launcher=True, ended_at=5.1),
        killed(4),
    ]
    for order in itertools.permutations(ends):
        assert judge(order).cause == RankEnd(3, 65, ended_at=5.1)
        assert judge(order).code == 65


@pytest.mark.parametrize("kind", ["named", "crash", "killed", "aborted", "collective"])
def test_where_times_do_not_order_causes_the_lowest_rank_is_named(kind):
    code = {"named": 66, "crash": 1, "collective": 74}.get(kind)
    number = {"killed": signal.SIGKILL, "aborted": signal.SIGABRT}.get(kind)
    causes = [RankEnd(rank, code, number, ended_at=7.0) for rank in (1, 2, 3)]
    survivor = RankEnd(0, None, signal.SIGTERM, by_launcher=True, ended_at=7.0)
    for order in itertools.permutations([*causes, survivor]):
        assert judge(order).cause.rank == 1


def test_ranks_that_were_killed_because_they_hung_are_not_ordered_by_when_they_were_killed():
    ends = [
        RankEnd(2, None, signal.SIGKILL, by_launcher=True, ended_at=1.0),
        RankEnd(1, None, signal.SIGKILL, by_launcher=True, ended_at=2.0),
    ]
    for order in itertools.permutations(ends):
        assert judge(order).cause.rank == 1


def test_what_a_death_makes_others_do_is_no_cause():
    """Aborted by NCCL, told by a collective, crashed because a store was gone: all behind a SIGKILL."""
    ends = [killed(9), killed(0, signal.SIGABRT), RankEnd(1, 70), RankEnd(2, 74), by_launcher(3, signal.SIGTERM)]
    for order in itertools.permutations(ends):
        assert judge(order).cause == killed(9)
    told_by_others = [RankEnd(9, 1), RankEnd(0, 70), killed(1, signal.SIGABRT), RankEnd(2, 74)]
    for order in itertools.permutations(told_by_others):
        assert judge(order).cause == RankEnd(9, 1)


def test_memory_is_what_the_kernel_counted():
    for order in itertools.permutations([killed(1), RankEnd(0, 74), by_launcher(2, signal.SIGTERM)]):
        outcome = judge(order, memory_kills=1)
        assert (outcome.code, outcome.cause.rank) == (MEMORY, 1)
        assert "rank 1 was killed because memory ran out" in str(outcome.cause)
        assert judge(order).code == 74
        assert "by hand or because memory ran out" in str(judge(order).cause)
    # somebody's process was killed for memory, but no rank
    assert judge([RankEnd(0, 1), by_launcher(1, signal.SIGTERM)], memory_kills=1).code == 70
    assert judge([killed(0), RankEnd(1, 73)], memory_kills=1).code == 73


def test_a_rank_that_did_not_end_is_told_with_what_it_did():
    assert "did not end in time and was killed: it was stopped" in str(by_launcher(1, is_halted=True))
    assert "it was in loss (plugin.py:3)" in str(by_launcher(1, stack=WORKS))
    assert "it waited, in go (run.py:7)" in str(by_launcher(1, stack=WAITS))
    assert "it wrote no stack" in str(by_launcher(1))


STACKS = """a line of the program's own
Thread 0x00007f4f1acfc6c0 (most recent call first):
  File "/python3.11/threading.py", line 331 in wait
  File "/megaspec/runtime/position.py", line 158 in _watch

Current thread 0x00007f4f4b67cb80 [python] (most recent call first):
  File "/a folder/plugin.py", line 9 in loss
  File "/megaspec/step.py", line 97 in <lambda>
"""


def test_the_main_threads_stack_is_found_in_what_a_rank_wrote():
    expected = (Frame("/a folder/plugin.py", 9, "loss"), Frame("/megaspec/step.py", 97, "<lambda>"))
    assert main_stack(STACKS) == expected
    assert main_stack("nothing\n") == ()


def test_a_line_that_waits_is_no_work(tmp_path):
    (tmp_path / "code.py").write_text("work.wait()\nx = y @ z\nseconds = mark.item()\n")
    waits = [Standing(stack=(Frame(str(tmp_path / "code.py"), n, "f"),)).is_waiting for n in (1, 2, 3)]
    assert waits == [True, False, True]
