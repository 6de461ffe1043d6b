"""Signal to noise by layer, of gradients whose noise is known."""

import math

import pytest
import torch

from tests.benchmarks.bench_fp8_accuracy import decibels


def test_noise_of_a_hundredth_is_forty_decibels():
    torch.manual_seed(1)
    names = ("layers.0.attn.wqkv.weight", "layers.0.mlp.w_down.weight", "layers.1.norm1.weight", "embed.weight")
    truth = {name: torch.randn(50, 40, dtype=torch.float64) for name in names}
    noisy = dict(truth)
    noisy["layers.0.mlp.w_down.weight"] = 1.01 * truth["layers.0.mlp.w_down.weight"]
    noisy["embed.weight"] = torch.zeros_like(truth["embed.weight"])
    found = decibels(truth, noisy)
    assert set(found) == {"layers.0", "layers.1", "embed"}
    # all of a layer is one signal, of which one matrix has noise
    squares = [truth[name].square().sum().item() for name in names[:2]]
    assert found["layers.0"] == pytest.approx(40 + 10 * math.log10(sum(squares) / squares[1]))
    # a gradient that is lost is all noise, one that is equal has none
    assert found["embed"] == pytest.approx(0)
    assert found["layers.1"] > 1000
    with pytest.raises(AssertionError):
        decibels(truth, {name: noisy[name] for name in names[:3]})
