"""Learning rates and weight decays: golden vectors, the published formulas, edges."""

import json
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from megaspec.optim.schedule import learning_rate, outline, weight_decay
from megaspec.optim.spec import AdamWSpec, PieceSpec, ScheduleSpec, WeightDecayRamp

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "lr_wd_schedules.json").read_text())
KINDS = ("constant", "linear", "cosine", "inverse_sqrt", "wsd")
WSD_DECAYS = ("linear", "cosine", "exponential", "minus_sqrt")
# (kind, shape of the wsd decay)
SHAPES = [(k, None) for k in KINDS[:-1]] + [("wsd", d) for d in WSD_DECAYS]


def schedule(kind, wsd=None, *, warmup=10, decay=100, wsd_steps=20, init_lr=0.0, min_lr=1e-4):
    extra = {"wsd_decay": wsd, "wsd_decay_steps": wsd_steps} if wsd else {}
    return ScheduleSpec(kind=kind, warmup_steps=warmup, decay_steps=decay, init_lr=init_lr, min_lr=min_lr, **extra)


@pytest.mark.parametrize("case", GOLDEN["lr"], ids=lambda c: f"{c['style']}-{c['wsd']}")
def test_golden_learning_rates(case):
    kind = {"inverse-square-root": "inverse_sqrt", "WSD": "wsd"}.get(case["style"], case["style"])
    spec = schedule(kind, case["wsd"])
    for step, expected in case["lr"]:
        assert learning_rate(spec, 1e-3, step) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("kind", GOLDEN["wd"])
def test_golden_weight_decays(kind):
    start = 0.1 if kind == "constant" else 0.01
    spec = adamw(WeightDecayRamp(kind=kind, end=0.1, steps=100), weight_decay=start)
    for step, expected in GOLDEN["wd"][kind]:
        assert weight_decay(spec, step) == pytest.approx(expected, rel=1e-12)


def adamw(ramp, *, weight_decay):
    return AdamWSpec(kind="adamw", lr=1e-3, weight_decay=weight_decay, weight_decay_ramp=ramp)


# Written in exact sample counts with a batch of 7, as the scheduler that is followed counts them.
def in_samples(kind, wsd, *, warmup, decay, wsd_steps, init_lr, min_lr, lr, step):
    t, warmup, decay, wsd_steps = 7 * step, 7 * warmup, 7 * decay, 7 * wsd_steps
    if warmup > 0 and t <= warmup:
        return init_lr + (lr - init_lr) * (t / warmup)
    if kind == "constant":
        return lr
    if t > decay:
        return min_lr
    if kind == "inverse_sqrt":
        return max(min_lr, lr * math.sqrt(max(warmup, 7) / max(t, 7)))
    r = (t - warmup) / (decay - warmup)
    q = (t - decay + wsd_steps) / wsd_steps
    heights = {
        "linear": lambda: 1 - r,
        "cosine": lambda: math.cos(math.pi * r / 2) ** 2,
        "wsd-linear": lambda: 1 - max(q, 0),
        "wsd-cosine": lambda: math.cos(math.pi * max(q, 0) / 2) ** 2,
        "wsd-exponential": lambda: 2 * math.exp2(-max(q, 0)) - 1,
        "wsd-minus_sqrt": lambda: 1 - math.sqrt(max(q, 0)),
    }
    return min_lr + heights[kind if wsd is None else f"wsd-{wsd}"]() * (lr - min_lr)


@pytest.mark.parametrize(("kind", "wsd"), SHAPES)
@pytest.mark.parametrize("warmup", [0, 1, 13])
@pytest.mark.parametrize("init_lr", [0.0, 5e-4, 2e-3])
def test_formulas_at_every_step(kind, wsd, warmup, init_lr):
    numbers = {"warmup": warmup, "decay": 57, "wsd_steps": 31, "init_lr": init_lr, "min_lr": 3e-5}
    spec = schedule(kind, wsd, **numbers)
    for step in range(80):
        expected = in_samples(kind, wsd, **numbers, lr=1e-3, step=step)
        assert learning_rate(spec, 1e-3, step) == pytest.approx(expected, rel=1e-12, abs=1e-18), step


@pytest.mark.parametrize(("kind", "wsd"), SHAPES)
def test_edges(kind, wsd):
    spec = schedule(kind, wsd, init_lr=2e-4)
    assert learning_rate(spec, 1e-3, 0) == 2e-4
    assert learning_rate(spec, 1e-3, 10) == 1e-3
    assert learning_rate(spec, 1e-3, 101) == (1e-3 if kind == "constant" else 1e-4)
    at_end = {"constant": 1e-3, "inverse_sqrt": 1e-3 * math.sqrt(10) / 10}.get(kind, 1e-4)
    assert learning_rate(spec, 1e-3, 100) == pytest.approx(at_end, rel=1e-12)
    without = schedule(kind, wsd, warmup=0)
    assert learning_rate(without, 1e-3, 0) == 1e-3


def test_warm_up_that_takes_the_whole_run():
    spec = schedule("cosine", warmup=100, decay=100)
    assert [learning_rate(spec, 1e-3, s) for s in (50, 100, 101)] == [5e-4, 1e-3, 1e-4]


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize(("start", "end"), [(0.0, 0.3), (0.3, 0.0)])
def test_weight_decay_goes_from_start_to_end(kind, start, end):
    spec = adamw(WeightDecayRamp(kind=kind, end=end, steps=8), weight_decay=start)
    values = [weight_decay(spec, s) for s in range(12)]
    assert values[0] == start
    assert values[4] == pytest.approx((start + end) / 2, rel=1e-12)
    assert values[8] == pytest.approx(end, abs=1e-16)
    assert values[9:] == [end] * 3
    assert values[:9] == sorted(values[:9], reverse=start > end)


PIECES = (
    PieceSpec(shape="constant", until=20),
    PieceSpec(shape="linear", steps=20, factor=0.5),
    PieceSpec(shape="cosine", until=60, lr=2e-4),
    PieceSpec(shape="constant", steps=5, start_factor=0.1),
    PieceSpec(shape="minus_sqrt", steps=16, lr=1e-3),
    PieceSpec(shape="exponential", until=91, start_lr=5e-4, lr=0.0),
)
# By hand: warm-up 10, then the pieces above with lr=1e-3.
BY_HAND = {
    0: 0.0,
    5: 5e-4,
    10: 1e-3,
    20: 1e-3,
    21: 1e-3 - 5e-4 / 20,
    30: 7.5e-4,
    40: 5e-4,
    45: 2e-4 + 3e-4 * (1 + math.sqrt(0.5)) / 2,
    50: 3.5e-4,
    55: 2e-4 + 3e-4 * (1 - math.sqrt(0.5)) / 2,
    60: 2e-4,
    61: 1e-4,
    65: 1e-4,
    69: 1e-4 + 9e-4 * 0.5,
    81: 1e-3,
    86: 5e-4 * (math.sqrt(2) - 1),
    91: 0.0,
    92: 0.0,
    1000: 0.0,
}


def piecewise(pieces=PIECES, *, warmup=10, first_step=0, init_lr=0.0):
    return ScheduleSpec(
        kind="piecewise", warmup_steps=warmup, decay_steps=1, pieces=pieces, first_step=first_step, init_lr=init_lr
    )


@pytest.mark.parametrize("first_step", [0, 7, 5000])
def test_pieces_by_hand(first_step):
    spec = piecewise(first_step=first_step)
    for step, expected in BY_HAND.items():
        assert learning_rate(spec, 1e-3, first_step + step) == pytest.approx(expected, rel=1e-12, abs=1e-18), step


def test_pieces_that_say_what_another_kind_says_are_that_kind():
    cosine = schedule("cosine", warmup=10, decay=100, min_lr=1e-4)
    same = piecewise((PieceSpec(shape="cosine", until=100, lr=1e-4),))
    for step in range(120):
        assert learning_rate(same, 1e-3, step) == pytest.approx(learning_rate(cosine, 1e-3, step), rel=1e-12)
    final = schedule("wsd", "exponential", warmup=10, decay=100, wsd_steps=20, min_lr=1e-4)
    same = piecewise((PieceSpec(shape="constant", until=80), PieceSpec(shape="exponential", steps=20, factor=0.1)))
    for step in range(120):
        assert learning_rate(same, 1e-3, step) == pytest.approx(learning_rate(final, 1e-3, step), rel=1e-12)


@pytest.mark.parametrize(("kind", "wsd"), SHAPES)
def test_a_schedule_counted_from_a_step_is_the_same_one_later(kind, wsd):
    spec = schedule(kind, wsd, init_lr=2e-4)
    later = spec.model_copy(update={"first_step": 300})
    for step in range(130):
        assert learning_rate(later, 1e-3, 300 + step) == learning_rate(spec, 1e-3, step)
    with pytest.raises(AssertionError, match=r"step=299 lies before optim\.schedule\.first_step=300"):
        learning_rate(later, 1e-3, 299)


def test_a_warm_up_again_by_the_formula():
    """Ibrahim et al. 2024: from the rate at the fork up to a new peak, then a cosine down."""
    spec = schedule("cosine", warmup=100, decay=1100, init_lr=3e-5, min_lr=2e-5).model_copy(update={"first_step": 5000})
    assert learning_rate(spec, 2e-4, 5000) == 3e-5
    assert learning_rate(spec, 2e-4, 5001) == pytest.approx(3e-5 + 1.7e-6, rel=1e-12)
    assert learning_rate(spec, 2e-4, 5050) == pytest.approx(1.15e-4, rel=1e-12)
    assert learning_rate(spec, 2e-4, 5100) == 2e-4
    assert learning_rate(spec, 2e-4, 5600) == pytest.approx(1.1e-4, rel=1e-12)
    assert learning_rate(spec, 2e-4, 6100) == pytest.approx(2e-5, rel=1e-12)
    assert learning_rate(spec, 2e-4, 7000) == 2e-5


def test_the_weight_decay_is_counted_from_its_own_first_step():
    spec = adamw(WeightDecayRamp(kind="linear", end=0.3, steps=10, first_step=50), weight_decay=0.1)
    values = [weight_decay(spec, step) for step in (0, 50, 55, 60, 61)]
    assert values == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.3], rel=1e-12)


@pytest.mark.parametrize(("kind", "wsd"), [*SHAPES, ("piecewise", None)])
@pytest.mark.parametrize("steps", [5, 10, 45, 100, 130])
def test_an_outline_covers_the_run_without_a_gap(kind, wsd, steps):
    spec = piecewise() if kind == "piecewise" else schedule(kind, wsd)
    spec = spec.model_copy(update={"first_step": 7})
    parts = outline(spec, 1e-3, steps=7 + steps)
    assert (parts[0].start, parts[-1].end) == (7, 7 + steps)
    for part, following in pairwise(parts):
        assert part.end == following.start
    for part in parts:
        assert part.end_lr == learning_rate(spec, 1e-3, part.end)
        just_behind = learning_rate(spec, 1e-3, part.start + 1)
        between = sorted([part.start_lr, part.end_lr])
        assert between[0] - 1e-18 <= just_behind <= between[1] + 1e-18, part


def test_schedules_do_not_import_torch():
    program = "import sys, megaspec.optim.schedule; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2], env={"PYTHONPATH": "."})
