"""Who is slow is named within 50 steps, and nobody else: simulated steps of a noisy machine.

Real ranks: tests/faults/test_slow_rank.py.
"""

import numpy as np
import pytest

from megaspec.runtime.stragglers import (
    BACKWARD,
    DATA,
    DEVICE,
    FORWARD,
    LOOK_BACK,
    NOISE,
    OPTIMIZER,
    REDUCE,
    SAVE,
    STEADY,
    WINDOW,
    Stragglers,
    steady_time,
)

STEP = {DATA: 0.0005, FORWARD: 0.03, BACKWARD: 0.06, REDUCE: 0.001, OPTIMIZER: 0.009}
PHASES = (FORWARD, BACKWARD, OPTIMIZER)


def gaussian(chance, steps, world):
    """5 % in every phase of every step."""
    return 1 + 0.05 * chance.standard_normal((steps, world, len(STEP)))


def heavy_tailed(chance, steps, world):
    """Student's t with two degrees of freedom, whose variance is infinite, times 3 % in every phase."""
    return np.exp(0.03 * chance.standard_t(2, (steps, world, len(STEP))))


def bursty(chance, steps, world):
    """A neighbour takes a core from a rank: with 1 % in each step it comes, with 40 % it leaves, and steps take 1.1 to
    2 times as long meanwhile. Single pauses of tens of milliseconds."""
    load = np.ones((steps, world))
    now = np.ones(world)
    for step in range(steps):
        comes = chance.random(world) < 0.01
        leaves = chance.random(world) < 0.4
        now = np.where(comes, chance.uniform(1.1, 2.0, world), np.where(leaves, 1.0, now))
        load[step] = now
    pauses = chance.exponential(0.05, (steps, world)) * (chance.random((steps, world)) < 0.02)
    noise = chance.lognormal(0, 0.05, (steps, world, len(STEP))) * load[:, :, None]
    noise[:, :, 1] += pauses / STEP[FORWARD]
    return noise


def long_bursts(chance, steps, world):
    """As bursty, but a neighbour stays for 5 to 15 steps, and comes every 200 on average."""
    noise = chance.lognormal(0, 0.05, (steps, world, len(STEP)))
    for rank in range(world):
        step = int(chance.exponential(200))
        while step < steps:
            stays = int(chance.integers(5, 16))
            noise[step : step + stays, rank] *= chance.uniform(1.1, 2.0)
            step += stays + int(chance.exponential(200))
    return noise


def drifting(chance, steps, world):
    """Ranks become faster and slower over hundreds of steps, 1.5 % each around what is usual, beside 5 % a step: clocks
    under a limit of power."""
    keeps = np.exp(-1 / 200)
    drift = np.empty((steps, world))
    drift[0] = chance.standard_normal(world)
    for step in range(1, steps):
        drift[step] = keeps * drift[step - 1] + np.sqrt(1 - keeps**2) * chance.standard_normal(world)
    return gaussian(chance, steps, world) * np.exp(0.015 * drift)[:, :, None]


NOISES = (gaussian, heavy_tailed, bursty, long_bursts, drifting)


def windows(world, steps, *, seed, slow=None, begin=0, phases=PHASES, factor=1.2, usual=None, noise=bursty):
    """Tables of a noisy machine, as `Pace` makes them."""
    chance = np.random.default_rng(seed)
    base = np.array([[row[phase] for phase in STEP] for row in usual or [STEP] * world])
    seconds = base * noise(chance, steps, world)
    for number, phase in enumerate(STEP):
        if slow is not None and phase in phases:
            seconds[begin:, slow, number] *= factor
    yield from tables(seconds)


def tables(seconds):
    """`seconds`: [steps, ranks, phases]. -> step and rows of each window."""
    for step in range(WINDOW, len(seconds) + 1, WINDOW):
        usual = np.median(seconds[step - WINDOW : step], axis=0)
        whole = seconds[max(0, step - LOOK_BACK) : step].sum(axis=2)
        table = []
        for rank, row in enumerate(usual.tolist()):
            table.append(dict(zip(STEP, row, strict=True)) | steady_time(whole[:, rank].tolist()))
        yield step, table


def named(world, steps, *, groups=None, **how):
    """(step, what) of everybody who was named."""
    stragglers = Stragglers(groups or [range(world)])
    found = []
    for step, table in windows(world, steps, **how):
        found += [(step, slow) for slow in stragglers.add(table)]
    return found


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.__name__)
@pytest.mark.parametrize(
    "world", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow), 64]
)
def test_nobody_is_named_in_a_thousand_steps_of_a_noisy_machine(world, noise):
    """200 runs, half of them by default: ten of each number of ranks and each kind of noise."""
    for seed in range(10):
        assert named(world, 1000, seed=seed, noise=noise) == []


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.__name__)
@pytest.mark.parametrize("world", [2, 4, 8, 64])
def test_a_rank_that_becomes_a_fifth_slower_is_named_within_fifty_steps(world, noise):
    """Wherever it begins. Two ranks that have drifted apart by six percent before hide a fifth for some looks more."""
    on_time = 0
    for begin in range(200, 220, 2):
        found = named(world, 400, seed=500 + begin, slow=1, begin=begin, noise=noise)
        assert {slow.rank for _, slow in found} == {1}
        step, slow = found[0]
        assert begin < step <= begin + 100
        assert slow.phase == BACKWARD
        assert 0.1 < slow.share < 0.35
        assert slow.usual_seconds == pytest.approx(STEP[BACKWARD], rel=0.2)
        on_time += step <= begin + 50
    assert on_time >= (9 if noise is drifting else 10)


def strong(chance, steps, world):
    """30 % in every phase of every step."""
    return chance.lognormal(0, 0.3, (steps, world, len(STEP)))


@pytest.mark.parametrize("world", [2, 8])
def test_noise_that_hides_a_fifth_names_nobody(world):
    """What a rank's own steps say of its noise, and how many ranks there are, raise what it takes."""
    fooled = 0
    for seed in range(10):
        stragglers = Stragglers([range(world)])
        careless = Stragglers([range(world)])
        for _, table in windows(world, 1000, seed=seed, noise=strong):
            assert stragglers.add(table) == []
            fooled += len(careless.add([row | {NOISE: 0.0} for row in table]))
    assert fooled > 0, "noise is not as strong as this test needs it"


@pytest.mark.parametrize(("steps", "is_named"), [(34, False), (41, True)])
def test_a_burst_has_to_last_as_long_as_a_slow_rank(steps, is_named):
    """Where it begins at a look, so that the next ones see all of it."""
    seconds = np.tile(np.array(list(STEP.values())), (200, 8, 1))
    seconds[100 : 100 + steps, 3] *= 1.5
    stragglers = Stragglers([range(8)])
    found = [slow.rank for _, table in tables(seconds) for slow in stragglers.add(table)]
    assert found == ([3] if is_named else [])


def test_steady_time_is_what_a_step_takes_undisturbed():
    assert steady_time([1.0] * (LOOK_BACK - 1)) == {}
    rising = [float(n) for n in range(1, LOOK_BACK + 1)]
    # six of forty are a share of 0.15; that is binomial
    assert steady_time([99.0, *rising]) == {STEADY: 6.0, NOISE: pytest.approx((40 * 0.15 * 0.85) ** 0.5)}


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
