"""Initial weights: published statistics, and a function of the seed, the global name and the global place."""

import math

import pytest
import torch

from megaspec.core.layout import Layout, Piece, whole
from megaspec.nn import hashing
from megaspec.nn.hashing import fill_normal_, key_of
from megaspec.nn.init import initial_value
from megaspec.parallelism.mesh import Mesh
from megaspec.runtime.build import build, initialise
from tests.parity.cases import Case, spec_of

SHAPE = (300, 70)


def draw(layout: Layout, *, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return initial_value(layout, seed=seed, std=0.02, constant=None, like=torch.empty(0, dtype=dtype))


def test_normal_with_the_given_deviation() -> None:
    x = draw(whole("w", (1000, 500))) / 0.02
    n = x.numel()
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / n)
    assert abs((x[1:] * x[:-1]).mean()) < 5 / math.sqrt(n)
    assert abs((x[:, 1:] * x[:, :-1]).mean()) < 5 / math.sqrt(n)
    ordered = x.flatten().sort().values  # Kolmogorov and Smirnov: 1.95 / √n is the 0.1 % level
    places = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    assert (torch.special.ndtr(ordered) - places).abs().max() < 1.95 / math.sqrt(n)


def test_another_name_or_seed_draws_other_weights() -> None:
    first = draw(whole("a", SHAPE)).flatten()
    for other in (draw(whole("b", SHAPE)), draw(whole("a", SHAPE), seed=2)):
        correlation = (first * other.flatten()).mean() / 0.02**2
        assert abs(correlation) < 5 / math.sqrt(first.numel())


def test_a_part_holds_the_whole_tensors_values() -> None:
    full = draw(whole("w", SHAPE))
    layout = Layout("w", SHAPE, (60, 20), (Piece((200, 50), (0, 0), (40, 20)), Piece((10, 0), (45, 3), (5, 7))))
    part = draw(layout)
    assert torch.equal(part[:40], full[200:240, 50:])
    assert torch.equal(part[45:50, 3:10], full[10:15, :7])
    part[:40] = 0
    part[45:50, 3:10] = 0
    assert (part == 0).all(), "padding must be zero"


@pytest.mark.parametrize("chunk", [1, 64, 70, 1000, 10**6])
def test_independent_of_the_pieces_that_it_is_computed_in(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = draw(whole("w", SHAPE))
    monkeypatch.setattr(hashing, "_INIT_CHUNK", chunk)
    assert torch.equal(draw(whole("w", SHAPE)), expected)


def test_lower_precision_rounds_the_same_values() -> None:
    high = draw(whole("w", SHAPE))
    low = draw(whole("w", SHAPE), dtype=torch.bfloat16)
    assert low.dtype == torch.float32
    assert torch.equal(low, high.float())


def test_any_number_of_dimensions() -> None:
    for shape in ((7,), (3, 4, 5)):
        out = torch.full(shape, float("nan"), dtype=torch.float64)
        fill_normal_(out, key=key_of(1, "w"), start=(0,) * len(shape), shape=shape, std=1.0)
        flat = torch.empty(out.numel(), dtype=torch.float64)
        fill_normal_(flat, key=key_of(1, "w"), start=(0,), shape=(out.numel(),), std=1.0)
        assert torch.equal(out.flatten(), flat)


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_every_parameter_of_a_model_starts_as_published(family: str) -> None:
    spec = spec_of(Case(family=family, pad=8))
    built = build(spec, mesh=Mesh({}, rank=0, device=torch.device("cpu")))
    initial = spec.model.facts.initial_values(std=spec.model.init_std)
    stds, fixed = initial.stds, initial.constants
    names = set(built.parameters)
    assert set(stds) | set(fixed) == names
    assert not set(stds) & set(fixed)
    initialise(built)
    for name, weight in built.parameters.items():
        valid = weight[: built.shards[name].shape[0]]
        if name in fixed:
            assert (valid == (0 if name.endswith("bias") else 1)).all(), name
            continue
        residual = name.endswith(("wo.weight", "w_down.weight"))
        std = 0.2 / math.sqrt(2 * 2) if residual else 0.2
        assert abs(valid.std() / std - 1) < 5 / math.sqrt(2 * valid.numel()), name
        assert (weight[len(valid) :] == 0).all(), name
