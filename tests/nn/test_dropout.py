"""Dropout masks: right in number, without pattern, and the same wherever a token is computed."""

import pytest
import torch

from megaspec.nn.attention.module import drop_attention
from megaspec.nn.dropout import Dropout, Noise
from megaspec.nn.hashing import keep_mask, site_key


def masks(
    *, ids: tuple[int, ...] = (0, 1), site: str = "here", seed: int = 1, p: float = 0.1, T: int = 64, D: int = 96
):
    return Dropout(p, site)(
        torch.ones(len(ids), T, D, dtype=torch.float64), Noise(seed, torch.tensor(ids), torch.arange(T))
    )


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_share_and_scale(p: float) -> None:
    out = masks(p=p, ids=tuple(range(8)), T=128, D=128)
    kept = out != 0
    n = kept.numel()
    assert abs(kept.double().mean() - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5
    assert torch.equal(out[kept], torch.full((int(kept.sum()),), 1 / (1 - p), dtype=torch.float64))


def test_no_pattern_along_any_dimension() -> None:
    """Shares along each dimension and correlations of neighbours stay within 5 standard deviations."""
    p = 0.3
    dropped = (masks(p=p, ids=tuple(range(16)), T=128, D=128) == 0).double() - p
    std = (p * (1 - p)) ** 0.5
    for dim in range(3):
        others = [d for d in range(3) if d != dim]
        means = dropped.mean(dim=others)
        assert means.abs().max() < 5 * std / (dropped.numel() / dropped.shape[dim]) ** 0.5
        pairs = dropped.narrow(dim, 1, dropped.shape[dim] - 1) * dropped.narrow(dim, 0, dropped.shape[dim] - 1)
        assert abs(pairs.mean()) < 5 * std**2 / pairs.numel() ** 0.5


@pytest.mark.parametrize("other", [{"ids": (2, 3)}, {"site": "there"}, {"seed": 2}])
def test_another_name_draws_another_mask(other: dict) -> None:
    p = 0.1
    same = ((masks() == 0) == (masks(**other) == 0)).double().mean()
    expected = p**2 + (1 - p) ** 2
    assert abs(same - expected) < 0.02


def test_same_mask_on_every_part_of_sequence_and_batch() -> None:
    whole = masks(ids=(4, 9), T=24, D=8)
    for parts in (2, 3, 4):
        pieces = []
        for index in range(parts):
            drop = Dropout(0.1, "here")
            drop.part = (index, parts)
            pieces.append(
                drop(
                    torch.ones(2, 24 // parts, 8, dtype=torch.float64), Noise(1, torch.tensor([4, 9]), torch.arange(24))
                )
            )
        assert torch.equal(torch.cat(pieces, dim=1), whole)
    assert torch.equal(masks(ids=(9,), T=24, D=8)[0], whole[1])


def test_same_attention_mask_on_every_part_of_the_heads() -> None:
    weights = torch.ones(2, 6, 5, 5)
    key, ids = site_key("core"), torch.tensor([3, 8])
    places = {"queries": torch.arange(5), "keys": torch.arange(5)}
    whole = drop_attention(weights, 0.2, key=key, ids=ids, first_head=0, **places)
    assert 0 < (whole == 0).double().mean() < 0.5
    for first in range(0, 6, 2):
        part = drop_attention(weights[:, first : first + 2], 0.2, key=key, ids=ids, first_head=first, **places)
        assert torch.equal(part, whole[:, first : first + 2])
    assert not torch.equal(whole[:, 0], whole[:, 1])


def test_off() -> None:
    x = torch.randn(2, 3, 4)
    assert Dropout(0.5, "here")(x, None) is x
    assert Dropout(0.0, "here")(x, Noise(1, torch.tensor([0, 1]), torch.arange(4))) is x


def test_the_order_of_counters_matters() -> None:
    a, b = torch.arange(64)[:, None], torch.arange(64)[None, :]
    mask = keep_mask(site_key("x"), (a, b), 0.5)
    assert not torch.equal(mask, mask.t())
