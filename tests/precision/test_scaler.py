"""The dynamic loss scale against the rule, step by step."""

import json
import random

import pytest
import torch

from megaspec.precision.scaler import DynamicLossScaler, build_scaler
from megaspec.precision.spec import Fp16Precision, PlainPrecision

CPU = torch.device("cpu")


def spec(**numbers):
    return Fp16Precision(kind="fp16", **({"initial_scale": 64.0, "growth_interval": 3, "hysteresis": 2} | numbers))


def feed(scaler, skipped):
    scales = []
    for bad in skipped:
        scaler.update(torch.tensor(float(bad)))
        scales.append(float(scaler.scale))
    return scales


@pytest.mark.parametrize(
    ("numbers", "skipped", "scales"),
    [
        # doubles after three finite steps in a row, and counts anew
        ({}, [0, 0, 0, 0, 0, 0], [64, 64, 128, 128, 128, 256]),
        # the second non-finite step halves it, and so does each one after
        ({}, [1, 1, 1, 1], [64, 32, 16, 8]),
        # a finite step alone does not bring forgiveness back, growth does
        ({}, [1, 0, 1, 0, 1], [64, 64, 32, 32, 16]),
        ({}, [1, 0, 0, 0, 1, 1], [64, 64, 64, 128, 128, 64]),
        # a non-finite step starts the count of finite ones anew
        ({"hysteresis": 5}, [0, 0, 1, 0, 0, 0], [64, 64, 64, 64, 64, 128]),
        ({"hysteresis": 1}, [1, 1], [32, 16]),
        ({"hysteresis": 1, "min_scale": 20.0}, [1, 1, 1], [32, 20, 20]),
    ],
)
def test_scale(numbers, skipped, scales):
    assert feed(DynamicLossScaler(spec(**numbers), device=CPU), skipped) == scales


def test_rule_on_random_steps():
    rng = random.Random(5)
    for _ in range(50):
        interval, hysteresis = rng.randint(1, 5), rng.randint(1, 4)
        skipped = [rng.random() < 0.3 for _ in range(60)]
        scaler = DynamicLossScaler(spec(growth_interval=interval, hysteresis=hysteresis), device=CPU)
        scale, finite, forgiven = 64.0, 0, hysteresis
        for bad in skipped:
            if bad:
                finite, forgiven = 0, forgiven - 1
                scale = max(scale / 2, 1.0) if forgiven <= 0 else scale
            else:
                finite += 1
                if finite == interval:
                    scale, finite, forgiven = scale * 2, 0, hysteresis
            assert feed(scaler, [bad]) == [scale]


@pytest.mark.parametrize("stop", range(12))
def test_state_as_json_goes_on_where_it_was(stop):
    skipped = [1, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 0]
    whole = DynamicLossScaler(spec(), device=CPU)
    first = DynamicLossScaler(spec(), device=CPU)
    second = DynamicLossScaler(spec(initial_scale=1.0), device=CPU)
    expected = feed(whole, skipped)
    before = feed(first, skipped[:stop])
    second.load_state(json.loads(json.dumps(first.state())))
    assert before + feed(second, skipped[stop:]) == expected
    assert second.state() == whole.state()


def test_other_precisions_have_no_scale():
    scaler = build_scaler(PlainPrecision(kind="bf16"), device=CPU)
    scaler.update(torch.tensor(1.0))
    assert (float(scaler.scale), scaler.state(), scaler.may_skip) == (1.0, None, False)
    assert build_scaler(spec(), device=CPU).may_skip
