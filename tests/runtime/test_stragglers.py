"""Who is slow is named within 50 steps, and nobody else: simulated steps of a noisy machine.

Real ranks: tests/faults/test_slow_rank.py.
"""

import random
from statistics import median

import pytest

from megaspec.runtime.stragglers import BACKWARD, DATA, DEVICE, FORWARD, OPTIMIZER, REDUCE, SAVE, WINDOW, Stragglers

STEP = {DATA: 0.0005, FORWARD: 0.03, BACKWARD: 0.06, REDUCE: 0.001, OPTIMIZER: 0.009}


def windows(world, steps, *, seed, slow=None, begin=0, phases=(FORWARD, BACKWARD, OPTIMIZER), factor=1.2, usual=None):
    """Tables of a noisy machine: 5 % in every phase, a neighbour that takes a core for some steps (up to twice as
    slow), and single pauses of tens of milliseconds."""
    chance = random.Random(seed)
    load = [1.0] * world
    usual = usual or [STEP] * world
    for first in range(0, steps, WINDOW):
        table = []
        for rank in range(world):
            seconds = {phase: [] for phase in STEP}
            for step in range(first, first + WINDOW):
                if chance.random() < 0.01:
                    load[rank] = chance.uniform(1.1, 2.0)
                elif chance.random() < 0.4:
                    load[rank] = 1.0
                for phase, base in usual[rank].items():
                    one = base * load[rank] * chance.lognormvariate(0, 0.05)
                    if chance.random() < 0.01:
                        one += chance.expovariate(20)
                    if rank == slow and step >= begin and phase in phases:
                        one *= factor
                    seconds[phase].append(one)
            table.append({phase: median(values) for phase, values in seconds.items()})
        yield first + WINDOW, table


def named(world, steps, *, groups=None, **how):
    """(step, what) of everybody who was named."""
    stragglers = Stragglers(groups or [range(world)])
    found = []
    for step, table in windows(world, steps, **how):
        found += [(step, slow) for slow in stragglers.add(table)]
    return found


@pytest.mark.parametrize("world", [2, 3, 8, 64])
def test_nobody_is_named_in_a_thousand_steps_of_a_noisy_machine(world):
    for seed in range(3 if world > 8 else 10):
        assert named(world, 1000, seed=seed) == []


@pytest.mark.parametrize("world", [2, 3, 8, 64])
@pytest.mark.parametrize("begin", [200, 203, 209])
def test_a_rank_that_becomes_a_fifth_slower_is_named_within_fifty_steps(world, begin):
    (step, slow), *more = named(world, 400, seed=500 + begin % 10, slow=1, begin=begin)
    assert more == []
    assert (slow.rank, slow.phase) == (1, BACKWARD)
    assert begin < step <= begin + 50
    assert 0.1 < slow.share < 0.3
    assert slow.usual_seconds == pytest.approx(STEP[BACKWARD], rel=0.2)


def test_the_phase_that_is_slow_is_named():
    (_, slow), *_ = named(4, 400, seed=1, slow=2, begin=200, phases=(DATA,), factor=100)
    assert (slow.rank, slow.phase) == (2, DATA)
    assert slow.seconds == pytest.approx(0.05, rel=0.5)


def test_stages_of_a_pipeline_that_do_different_work_are_no_stragglers():
    """The last stage has the head, and takes half as long again: its ranks are held against each other."""
    heavy = {phase: 1.5 * seconds for phase, seconds in STEP.items()}
    usual = [STEP, STEP, heavy, heavy]
    groups = [[0, 1], [2, 3]]
    assert named(4, 1000, seed=2, groups=groups, usual=usual) == []
    # all four as one group would name the heavy ones
    assert {slow.rank for _, slow in named(4, 400, seed=2, usual=usual)} == {2, 3}
    found = named(4, 400, seed=3, groups=groups, usual=usual, slow=3, begin=200)
    assert [slow.rank for _, slow in found] == [3]


def test_a_stage_of_one_rank_is_held_against_its_own_past():
    heavy = {phase: 1.5 * seconds for phase, seconds in STEP.items()}
    groups = [[0], [1], [2]]
    usual = [STEP, STEP, heavy]
    assert named(3, 1000, seed=4, groups=groups, usual=usual) == []
    (step, slow), *more = named(3, 400, seed=5, groups=groups, usual=usual, slow=2, begin=200)
    assert more == []
    assert slow.rank == 2
    assert step <= 250


def test_all_that_become_slower_together_are_no_stragglers():
    """Longer sequences, a filter of the data: every rank takes twice as long from then on."""
    for groups in ([range(3)], [[0], [1], [2]]):
        stragglers = Stragglers(groups)
        found = []
        for step, table in windows(3, 600, seed=6):
            factor = 2.0 if step > 300 else 1.0
            found += stragglers.add([{phase: factor * one for phase, one in row.items()} for row in table])
        assert found == []


def test_one_that_recovers_and_falls_back_is_named_twice():
    stragglers = Stragglers([range(4)])
    found = []
    for step, table in windows(4, 900, seed=7):
        if 200 < step <= 400 or step > 600:
            table[1] = {phase: 1.5 * one for phase, one in table[1].items()}
        found += [(step, slow.rank) for slow in stragglers.add(table)]
    assert [rank for _, rank in found] == [1, 1]
    assert 200 < found[0][0] <= 250
    assert 600 < found[1][0] <= 650


def test_a_slow_gpu_is_told_though_steps_take_as_long_on_each():
    """Where collectives inside of a phase make all ranks wait for the slow one, the product of matrices tells it."""
    stragglers = Stragglers([range(4)])
    found = []
    for number, (_, table) in enumerate(windows(4, 300, seed=8)):
        for rank, row in enumerate(table):
            row[DEVICE] = 30e-6 * (1.25 if rank == 2 and number >= 10 else 1.0) * (1 + 0.03 * ((number + rank) % 3))
        found += stragglers.add(table)
    assert [(slow.rank, slow.phase) for slow in found] == [(2, DEVICE)]


def test_windows_without_a_save_break_no_streak():
    stragglers = Stragglers([range(2)])
    found = []
    for number, (_, table) in enumerate(windows(2, 200, seed=9)):
        if number % 3 == 0:
            table[0][SAVE] = 2.0
            table[1][SAVE] = 20.0
        found += stragglers.add(table)
    assert [(slow.rank, slow.phase) for slow in found] == [(1, SAVE)]
    assert found[0].seconds == pytest.approx(18.0)
