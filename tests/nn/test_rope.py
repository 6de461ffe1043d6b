"""Rotary angles against Megatron's vectors, and what a rotation must keep."""

import json
from pathlib import Path

import pytest
import torch

from megaspec.nn.attention.module import document_positions
from megaspec.nn.rope.module import Rope, inverse_frequencies, rotate
from megaspec.nn.rope.spec import Llama3RopeScaling, NoRopeScaling, RotarySpec

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "rope.json").read_text())["rope"]


@pytest.mark.parametrize(
    ("name", "d_head", "base", "scaling"),
    [
        ("plain_d64_b10000", 64, 10_000.0, NoRopeScaling()),
        ("llama3_d128_b500000_f8", 128, 500_000.0, Llama3RopeScaling(kind="llama3", factor=8.0)),
    ],
)
def test_frequencies_equal_the_golden_ones(
    name: str, d_head: int, base: float, scaling: NoRopeScaling | Llama3RopeScaling
) -> None:
    """The vectors were computed in fp32: 4 roundings."""
    expected = torch.tensor(GOLDEN[name], dtype=torch.float64)
    found = inverse_frequencies(d_head, base, scaling)
    assert found.dtype == torch.float64
    assert ((found - expected).abs() / expected).max() < 4 * torch.finfo(torch.float32).eps


def test_rotation_multiplies_pairs_as_complex_numbers() -> None:
    rope = Rope(8, 32, RotarySpec(base=100.0))
    rope.cos_TH, rope.sin_TH = rope.cos_TH.double(), rope.sin_TH.double()
    rope.fill_buffers()
    x = torch.randn(2, 32, 3, 8, dtype=torch.float64)
    found = rotate(x, *rope.angles(torch.arange(32)))
    pairs = torch.complex(x[..., :4], x[..., 4:])
    frequency = torch.tensor([100.0 ** (-2 * i / 8) for i in range(4)], dtype=torch.float64)
    turn = torch.polar(torch.ones(32, 4, dtype=torch.float64), torch.arange(32.0)[:, None] * frequency)
    expected = pairs * turn[:, None]
    assert torch.allclose(torch.complex(found[..., :4], found[..., 4:]), expected, rtol=0, atol=1e-14)


def test_scores_depend_on_the_distance_alone() -> None:
    rope = Rope(16, 64, RotarySpec(scaling=Llama3RopeScaling(kind="llama3", original_max_seq_len=32)))
    rope.cos_TH, rope.sin_TH = rope.cos_TH.double(), rope.sin_TH.double()
    rope.fill_buffers()
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def score(m: int, n: int) -> torch.Tensor:
        return (rotate(q, *rope.angles(torch.tensor([m]))) * rotate(k, *rope.angles(torch.tensor([n])))).sum()

    assert torch.allclose(score(5, 2), score(61, 58), rtol=1e-12)
    assert not torch.allclose(score(5, 2), score(5, 3), rtol=1e-3)


def test_low_precision_is_rotated_in_fp32() -> None:
    rope = Rope(64, 4096, RotarySpec())
    rope.fill_buffers()
    x = torch.randn(1, 4096, 1, 64)
    low = rotate(x.bfloat16(), *rope.angles(torch.arange(4096)))
    high = rotate(x.bfloat16().float(), *rope.angles(torch.arange(4096)))
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, high.bfloat16())


def test_positions_start_again_in_each_document() -> None:
    documents = torch.tensor([[0, 0, 0, 0, 0], [3, 3, 4, 4, 4], [0, 1, 2, 3, 3]], dtype=torch.int32)
    found = document_positions(documents)
    assert found.dtype == torch.int64
    assert found.tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 1, 2], [0, 0, 0, 0, 1]]
