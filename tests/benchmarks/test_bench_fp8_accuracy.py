"""Signal to noise by layer, of gradients whose noise is known; means over seeds, of losses that are known."""

import math

import pytest
import torch

from tests.benchmarks.bench_fp8_accuracy import decibels, summary


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


def test_the_table_compares_seed_by_seed():
    def line(run: str, seed: int, loss: float, noise: float | None = None) -> dict:
        layers = {"layers.0": noise, "norm": 40.0} if noise else {}
        return {"run": run, "seed": seed, "last_loss": loss, "decibels": {"1": layers} if noise else {}}

    lines = [
        line("bf16", 1, 2.0),
        line("bf16", 2, 4.0),
        line("delayed", 1, 2.02, 21.0),
        line("delayed", 2, 4.0, 20.0),
        # from a seed that bf16 has no run of
        line("delayed", 3, 9.0, 22.0),
        line("bf16, another seed", 5, 3.0),
    ]
    bf16, delayed, other = summary(lines).splitlines()[2:]
    assert bf16 == "| bf16 | 2 | 3.0000 | +0.00% | 0.00% |  |"
    # +1 % and 0 %: a mean of 0.5 %, and 0.71 / sqrt(2) % of standard error
    assert delayed == "| delayed | 3 | 5.0067 | +0.50% | 0.50% | step 1: 20.0 (layers.0) |"
    assert other == "| bf16, another seed | 1 | 3.0000 |  |  |  |"
