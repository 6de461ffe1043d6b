"""Pipeline schedules, against the papers' formulas and orders written by hand."""

import tracemalloc
from itertools import product
from random import Random

import pytest

from megaspec.estimate.schedule import (
    _messages_of_a_shorter,
    bubble,
    bubble_formula,
    catch_ups,
    chart,
    held,
    held_by_chunk,
    held_later,
    makespan_formula,
    messages_held,
)
from megaspec.parallelism.passes import Pass, Shape, made, needed, orders, stage_number, window
from megaspec.parallelism.timeline import Durations, busy_per_micro_batch, receives, seconds_if_late, simulate
from tests.pace import within

SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb_h1", 1), ("zb_v", 2))
SHAPES = [
    Shape(schedule, pp, micro_batches, virtual, pp)
    for (schedule, virtual), pp, micro_batches in product(SCHEDULES, (2, 4, 8), (16, 40))
]


def equal(shape, *, transfer=0.0, backward=2.0):
    """Durations of equal stages: a whole stage's forward takes 1."""
    n, split = shape.pp * shape.virtual, shape.splits_backward
    each = 1 / shape.virtual
    own, weight = (backward / 2, backward / 2) if split else (backward, 0.0)
    return Durations((each,) * n, (each * own,) * n, (each * weight,) * n, transfer)


def held_by_counting(shape, rank):
    """Chunks between their first and last pass, at the most."""
    freed = "W" if shape.splits_backward else "B"
    now, most = 0, 0
    for one in orders(shape)[rank]:
        now += {"F": 1, freed: -1}.get(one.kind, 0)
        most = max(most, now)
    return most / shape.virtual


def test_orders_by_hand():
    def words(shape):
        return [" ".join(f"{p.kind}{p.micro}" for p in rank) for rank in orders(shape)]

    assert words(Shape("gpipe", 2, 2)) == ["F0 F1 B0 B1", "F0 F1 B0 B1"]
    assert words(Shape("1f1b", 2, 3)) == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
    assert words(Shape("zb_h1", 2, 3)) == ["F0 F1 B0 W0 F2 B1 W1 B2 W2", "F0 B0 F1 B1 W0 F2 B2 W1 W2"]
    chunks = [f"{p.kind}{p.micro}{p.chunk}" for p in orders(Shape("interleaved", 2, 2, 2, 2))[1]]
    assert chunks == ["F00", "F10", "F01", "B01", "F11", "B11", "B00", "B10"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pass_runs_once_after_what_it_needs(shape):
    kinds = "FBW" if shape.splits_backward else "FB"
    everything = {Pass(k, m, c) for k in kinds for m in range(shape.micro_batches) for c in range(shape.virtual)}
    durations = equal(shape, transfer=0.25)
    starts = simulate(shape, durations).starts
    at = {}
    for rank, order in enumerate(orders(shape)):
        assert len(order) == len(everything)
        assert set(order) == everything
        for one, start in zip(order, starts[rank], strict=True):
            at[one.kind, stage_number(rank, one.chunk, pp=shape.pp, is_v=shape.is_v), one.micro] = start, rank
    took = {"F": durations.forward[0], "B": durations.backward[0], "W": durations.weight[0]}
    last = shape.pp * shape.virtual - 1
    for (kind, stage, micro), (start, rank) in at.items():
        before = {"F": ("F", stage - 1), "B": ("B", stage + 1) if stage < last else ("F", stage), "W": ("B", stage)}[
            kind
        ]
        if (*before, micro) in at:
            earlier, other = at[(*before, micro)]
            assert start >= earlier + took[before[0]] + (0.25 if other != rank else 0) - 1e-9


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bubble_is_the_papers(shape):
    busy = 3 * shape.micro_batches
    assert simulate(shape, equal(shape)).seconds / busy - 1 == pytest.approx(bubble_formula(shape), abs=1e-12)
    assert bubble(shape, equal(shape)).ratio == pytest.approx(bubble_formula(shape), abs=1e-12)


def test_bubble_formulas_with_numbers():
    assert bubble_formula(Shape("1f1b", 8, 32)) == pytest.approx(7 / 32)
    assert bubble_formula(Shape("interleaved", 8, 32, 4, 8)) == pytest.approx(7 / 128)
    assert bubble_formula(Shape("zb_h1", 8, 32)) == pytest.approx(7 / 96)


@pytest.mark.parametrize(
    "shape", [*SHAPES, *(Shape(s, 8, n, v) for s, v in (("zb_h1", 1), ("zb_v", 2)) for n in range(1, 18))], ids=str
)
def test_what_is_held(shape):
    assert list(held(shape)) == [held_by_counting(shape, rank) for rank in range(shape.pp)]


def test_what_is_held_in_the_papers():
    assert held(Shape("1f1b", 8, 32)) == (8, 7, 6, 5, 4, 3, 2, 1)
    assert held(Shape("1f1b", 8, 3)) == (3, 3, 3, 3, 3, 3, 2, 1)
    assert held(Shape("interleaved", 8, 64, 4, 8))[0] == pytest.approx(8 * (1 + 7 / (8 * 4)))
    assert set(held(Shape("zb_h1", 8, 64))) == {8}
    assert set(held(Shape("zb_v", 8, 64, 2))) == {8}
    assert set(held(Shape("gpipe", 4, 64))) == {64}


@pytest.mark.parametrize(
    "shape",
    [
        Shape("1f1b", 4, 90),
        Shape("gpipe", 4, 90),
        Shape("interleaved", 4, 88, 3, 4),
        Shape("interleaved", 4, 100, 2, 6),
        Shape("zb_h1", 4, 90),
        Shape("zb_v", 4, 90, 2),
    ],
    ids=str,
)
def test_long_steps_are_extrapolated_exactly(shape):
    n = shape.pp * shape.virtual
    uneven = Durations(
        forward=tuple(1.0 + 0.3 * (s == n - 1) - 0.1 * (s == 0) for s in range(n)),
        backward=tuple((1.1 if shape.splits_backward else 2.1) + 0.4 * (s == n - 1) for s in range(n)),
        weight=(0.9 if shape.splits_backward else 0.0,) * n,
        transfer=0.05,
    )
    busy = max(busy_per_micro_batch(shape, uneven)) * shape.micro_batches
    whole = simulate(shape, uneven).seconds
    assert bubble(shape, uneven).seconds == pytest.approx(whole - busy, rel=1e-9, abs=1e-9)
    late = seconds_if_late(shape, uneven)
    # the order of messages of one more round is not quite that of the round before
    assert bubble(shape, uneven, overlap=False).seconds == pytest.approx(late - busy, rel=0.03)


def in_time(shape, durations):
    """Ranks that do one after the other what `receives` says without overlap."""
    seconds = {"F": durations.forward, "B": durations.backward, "W": durations.weight}
    programs, posted, sent = [], {}, {}
    for rank in range(shape.pp):
        program = []
        for one, due in zip(orders(shape)[rank], receives(shape, rank, overlap=False), strict=True):
            program += [*(("post", message) for message in due.before), ("run", one)]
            program += [("post", message) for message in due.behind]
            program += [("send", message) for message in [made(shape, rank, one)] if message is not None]
        programs.append(program[::-1])
    clock = [0.0] * shape.pp
    while any(programs):
        left = sum(map(len, programs))
        for rank, program in enumerate(programs):
            while program:
                kind, what = program[-1]
                need = needed(shape, rank, what) if kind == "run" else None
                if need is not None and need not in sent:
                    break
                if kind == "run":
                    stage = stage_number(rank, what.chunk, pp=shape.pp, is_v=shape.is_v)
                    there = 0.0 if need is None else sent[need]
                    if need in posted:
                        there = max(there, posted[need]) + durations.transfer
                    clock[rank] = max(clock[rank], there) + seconds[what.kind][stage]
                else:
                    (posted if kind == "post" else sent)[what] = clock[rank]
                program.pop()
        assert sum(map(len, programs)) < left
    return max(clock)


@pytest.mark.parametrize("shape", [one for one in SHAPES if one.micro_batches == 16], ids=str)
def test_messages_that_are_begun_late(shape):
    n, random = shape.pp * shape.virtual, Random(0)
    for transfer in (0.0, 0.05, 0.4):
        some = [tuple(random.uniform(0.8, 1.2) for _ in range(n)) for _ in range(3)]
        durations = Durations(some[0], some[1], some[2] if shape.splits_backward else (0.0,) * n, transfer)
        late = seconds_if_late(shape, durations)
        assert late == pytest.approx(in_time(shape, durations))
        assert late >= simulate(shape, durations).seconds - 1e-9


def test_only_passes_that_start_before():
    whole = simulate(Shape("1f1b", 6, 6), equal(Shape("1f1b", 6, 6))).starts
    some = simulate(Shape("1f1b", 6, 6), equal(Shape("1f1b", 6, 6)), until=9.0).starts
    assert some == tuple(tuple(start for start in rank if start < 9) for rank in whole)
    forward = simulate(Shape("1f1b", 2, 2), equal(Shape("1f1b", 2, 2)), until=100.0, backward=False)
    assert forward == simulate(Shape("1f1b", 2, 2), equal(Shape("1f1b", 2, 2)), backward=False)


@pytest.mark.parametrize("pp", [2, 4, 8, 16])
def test_an_evaluation_in_a_v_waits_little(pp):
    shape = Shape("zb_v", pp, window("zb_v", pp), 2)
    assert simulate(shape, equal(shape), backward=False).seconds < 1.15 * shape.micro_batches


def test_a_slow_stage_holds_up_the_others():
    shape = Shape("1f1b", 4, 8)
    even = bubble(shape, Durations((1.0,) * 4, (2.0,) * 4, (0.0,) * 4)).seconds
    slow_end = simulate(shape, Durations((1.0, 1, 1, 2), (2.0, 2, 2, 4), (0.0,) * 4)).seconds
    assert even == pytest.approx(9)
    assert slow_end == pytest.approx(8 * 6 + 3 * 3)


def test_how_often_no_weight_gradient_is_deferred():
    # rank r of zb_h1 is r micro batches late from the first to the last; the last ranks of zb_v at the end
    assert [catch_ups(Shape("zb_h1", 4, 8), rank) for rank in range(4)] == [(8,), (1,), (1,), (1,)]
    assert catch_ups(Shape("zb_v", 2, 6, 2), 0) == (6, 6)
    # its two last gradients of chunk 0 come before either weight gradient
    assert catch_ups(Shape("zb_v", 2, 6, 2), 1) == (5, 6)
    assert catch_ups(Shape("interleaved", 2, 6, 2, 2), 1) == (6, 6)
    assert catch_ups(Shape("1f1b", 1, 3), 0) == (3,)
    # long steps are extrapolated
    assert catch_ups(Shape("zb_v", 4, 10**9, 2), 3) == (10**9 - 3, 10**9 - 2)
    assert catch_ups(Shape("zb_h1", 4, 10**9), 0) == (10**9,)


def test_what_is_held_behind_the_first_backward_passes():
    # a forward pass comes between two backward passes, or none is left
    assert held_later(Shape("1f1b", 4, 9), 0) == (4, 3)
    assert held_later(Shape("1f1b", 4, 9), 2).behind == 2
    assert held_later(Shape("1f1b", 4, 3), 0) == (2, 2)
    assert held_later(Shape("gpipe", 4, 6), 0) == (5, 5)
    # all chunks of the last stages have run backward when the embedding does
    assert held_later(Shape("interleaved", 4, 4, 2, 4), 0) == (1.5, 1.5)
    # a long step is cut behind whole groups, where as much is held as at the peak
    for group in (2, 50):
        long = Shape("interleaved", 2, 400, 2, group)
        assert held_later(long, 0).behind == held(long)[0]


def test_what_is_held_of_each_chunk():
    def at_layers(*shape):
        return held_by_chunk(Shape(*shape[:-1]), shape[-1]).at_layers

    # of one chunk: micro batches before their backward pass, and before their weight gradients
    assert at_layers("zb_h1", 4, 8, 0) == (((4, 0),),)
    assert at_layers("zb_h1", 4, 8, 3) == (((1, 3),),)
    # two kinds of moments, of which either may take more
    assert at_layers("zb_h1", 4, 3, 1) == (((2, 1),), ((3, 0),))
    # the last rank of a V is late with weight gradients of both chunks
    assert ((1, 3), (0, 3)) in at_layers("zb_v", 4, 8, 2, 3)
    assert held_by_chunk(Shape("zb_v", 4, 800, 2), 2) == held_by_chunk(Shape("zb_v", 4, 16, 2), 2)


@pytest.mark.parametrize("group", [4, 6])
def test_what_is_held_of_interleaved_chunks_adds_up(group):
    shape = Shape("interleaved", 4, 3 * group, 2, group)
    for rank in range(4):
        moments = held_by_chunk(shape, rank)
        for moment in moments.at_layers:
            assert sum(one.for_backward for one in moment) == 2 * held(shape)[rank]
            assert not any(one.for_weights for one in moment)
        # more of the first chunk than of the second, which is behind
        assert max(moment[0].for_backward - moment[1].for_backward for moment in moments.at_layers) > 0
    # at the head as many, of other chunks
    at_head = held_by_chunk(shape, 3).at_head
    assert {sum(one.for_backward for one in moment) for moment in at_head} == {2 * held(shape)[3]}


def test_chart():
    assert chart(Shape("1f1b", 2, 2)) == ["   0 01..aa.bb", "   1 .0aa1bb"]
    assert chart(Shape("zb_h1", 2, 2)) == ["   0 01.a+b+", "   1 .0a1b++"]
    lines = chart(Shape("1f1b", 64, 128), width=40)
    assert len(lines) == 16
    assert lines[-2] == " ..."
    assert lines[-1].startswith("  63 ")
    assert all(len(line) <= 46 for line in lines)


@pytest.mark.parametrize(("schedule", "virtual"), [*SCHEDULES, ("interleaved", 4)])
def test_the_formula_of_long_pipelines_is_near_the_simulation(schedule, virtual):
    """Around the size from which on it stands alone: equal, noisy and uneven stages, few and many micro batches."""
    pp, noise = (24 if virtual > 1 else 64), Random(1)
    off = []
    for micro_batches, transfer in product((pp // 4, pp, 2 * pp, 8 * pp), (0.0, 0.02)):
        if schedule == "interleaved" and micro_batches < pp:
            continue
        shape = Shape(schedule, pp, micro_batches, virtual, pp)
        n, split = pp * virtual, shape.splits_backward
        heads = [1.0] * (n - 1) + [1.8], [0.5] + [1.0] * (n - 2) + [1.3], [noise.uniform(0.8, 1.2) for _ in range(n)]
        for own in ([1.0] * n, *heads):
            each = tuple(one / virtual for one in own)
            twice = tuple(2 * one for one in each)
            weight = each if split else (0.0,) * n
            durations = Durations(each, each if split else twice, weight, transfer)
            took = simulate(shape, durations).seconds
            off.append(abs(makespan_formula(shape, durations) / took - 1))
    assert max(off) < 0.08
    assert sum(off) / len(off) < 0.03


def test_pipelines_of_any_length_take_little_time_and_memory():
    tracemalloc.start()
    # for twelve, traced: several times slower than untraced
    with within(12.0):
        for (schedule, virtual), pp in product(SCHEDULES, (1024, 8192)):
            shape = Shape(schedule, pp, 100_000, virtual, 10_000)
            assert bubble(shape, equal(shape)).ratio == pytest.approx(bubble_formula(shape), rel=0.01)
            assert len(held(shape)) == pp
            assert len(chart(shape)) == 16
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 50e6


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_messages_and_layers_held_are_weighed_at_once_in_the_longest_pipelines(schedule, virtual):
    """A search met such shapes, and took all memory there was."""
    for pp, group in ((2048, 2048), (8, 100_000), (2048, 10**8)):
        shape = Shape(schedule, pp, 10**9, virtual, group)
        with within(1.0):
            for rank in (0, 1, pp // 2, pp - 1):
                found = messages_held(shape, rank, overlap=True)
                assert found < 10 or (schedule == "interleaved" and group - pp < found <= group)
                assert held_later(shape, rank).behind <= held(shape)[rank]
                held_by_chunk(shape, rank)


@pytest.mark.parametrize("overlap", [True, False])
def test_messages_of_many_chunks_are_those_of_three(overlap):
    def of(chunks, group):
        shape = Shape("interleaved", 4, 2 * group, chunks, group)
        return [messages_held(shape, rank, overlap=overlap) for rank in range(4)]

    for group in (4, 6, 16):
        assert of(3, group) == of(5, group) == of(12, group)
    for pp in (16, 64):
        assert messages_held(Shape("interleaved", pp, 8 * pp, 300, 4 * pp), 0, overlap=overlap) > 0


def test_messages_of_shorter_pipelines_and_groups_are_about_as_many():
    for (schedule, virtual), (pp, group) in product(SCHEDULES, ((24, 24), (32, 40), (8, 50))):
        shape = Shape(schedule, pp, 2 * group, virtual, group if schedule == "interleaved" else pp)
        for rank in range(pp if pp > 16 or schedule == "interleaved" else 0):
            exact = messages_held(shape, rank, overlap=True)
            assert _messages_of_a_shorter(shape, rank, overlap=True) == pytest.approx(exact, abs=0.15 * exact)


def test_charts_of_long_pipelines_are_those_of_shorter_ones():
    """80 ranks are simulated in full; more look the same in the columns that are shown."""
    for schedule, virtual in SCHEDULES:
        full, cut = (chart(Shape(schedule, pp, 200, virtual, 200), width=width) for pp, width in ((80, 40), (120, 40)))
        assert full[:14] == cut[:14]
        assert full[-1].split()[1:] == cut[-1].split()[1:]
