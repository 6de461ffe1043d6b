"""Learning rates and weight decays: golden vectors, the published formulas, edges."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from megaspec.optim.schedule import learning_rate, weight_decay
from megaspec.optim.spec import AdamWSpec, ScheduleSpec, WeightDecayRamp

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


def test_schedules_do_not_import_torch():
    program = "import sys, megaspec.optim.schedule; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2], env={"PYTHONPATH": "."})
