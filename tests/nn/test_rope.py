"""Rotary angles against Megatron's vectors, and what a rotation must keep."""

import json
import math
from pathlib import Path

import pytest
import torch

from megaspec.nn.decoder import document_positions
from megaspec.nn.rope.frequencies import inverse_frequencies
from megaspec.nn.rope.module import Rope
from megaspec.nn.rope.spec import (
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    NoRopeScaling,
    ProportionalRopeScaling,
    RopeScaling,
    RotarySpec,
    YarnRopeScaling,
)
from megaspec_kernels.rope.reference import rotate

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
    found = inverse_frequencies(RotarySpec(base=base, scaling=scaling), d_head)
    assert found.dtype == torch.float64
    assert ((found - expected).abs() / expected).max() < 4 * torch.finfo(torch.float32).eps


def yarn(factor: float, original: int, **more: float | bool) -> YarnRopeScaling:
    return YarnRopeScaling(kind="yarn", factor=factor, original_max_seq_len=original, **more)


# Of published models, by other code: the frequency in the middle, the last one, their sum, and the attention factor.
PUBLISHED = {
    "DeepSeek-V3": (64, 1e4, yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0), 0.0055, 3.33380358e-06, 3.94893627, 1.0),
    "gpt-oss": (
        64,
        150_000.0,
        yarn(32.0, 4096, truncate=False),
        0.000456483919,
        3.02351143e-07,
        3.18043828,
        1.34657359,
    ),
    "Qwen": (128, 1e6, yarn(4.0, 32768), 0.000602941176, 3.1023444e-07, 5.14403472, 1.13862944),
    "OLMo 3": (128, 5e5, yarn(8.0, 8192), 0.000395147907, 3.06892599e-07, 5.36472946, 1.20794415),
    "Llama 3.1": (128, 5e5, Llama3RopeScaling(kind="llama3"), 0.000524846161, 3.06892599e-07, 5.3860582, 1.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_frequencies_are_those_of_published_models(name: str) -> None:
    d_rotary, base, scaling, middle, last, total, factor = PUBLISHED[name]
    found = inverse_frequencies(RotarySpec(base=base, scaling=scaling), d_rotary)
    # nine digits are written down
    assert float(found[d_rotary // 4]) == pytest.approx(middle, rel=1e-8)
    assert float(found[-1]) == pytest.approx(last, rel=1e-8)
    assert float(found.sum()) == pytest.approx(total, rel=1e-8)
    assert scaling.angle_factor() == pytest.approx(factor, rel=1e-8)


LONG = LongRopeScaling(
    kind="longrope", short_factor=(1.0, 2.0), long_factor=(4.0, 5.0), original_max_seq_len=8, factor=4.0
)


@pytest.mark.parametrize(
    ("scaling", "length", "expected"),
    [
        (LinearRopeScaling(kind="linear", factor=4.0), 64, [0.25, 0.025]),
        # 4 · 16 / 8 - 3 = 5, to the power of 4 / 2
        (DynamicRopeScaling(kind="dynamic", factor=4.0, original_max_seq_len=8), 16, [1.0, 2500.0**-0.5]),
        (DynamicRopeScaling(kind="dynamic", factor=4.0, original_max_seq_len=8), 8, [1.0, 0.1]),
        (LONG, 8, [1.0, 0.05]),
        (LONG, 9, [0.25, 0.02]),
        (ProportionalRopeScaling(kind="proportional", fraction=0.5, factor=2.0), 64, [0.5, 0.0]),
    ],
)
def test_frequencies_by_hand(scaling: RopeScaling, length: int, expected: list[float]) -> None:
    found = inverse_frequencies(RotarySpec(base=100.0, scaling=scaling), 4, length=length)
    assert found.tolist() == pytest.approx(expected, rel=1e-14)


def test_the_table_follows_the_length_of_the_sequence() -> None:
    """Its cosines and sines carry the attention factor, and change where the frequencies do."""
    rope = Rope(4, 32, RotarySpec(base=100.0, scaling=LONG)).double()
    factor = (1 + math.log(4) / math.log(8)) ** 0.5
    for length, frequency in ((8, 1.0), (9, 0.25), (32, 0.25), (4, 1.0)):
        cos, sin = rope.angles(torch.tensor([3]), length=length)
        assert float(cos[0, 0]) == pytest.approx(factor * math.cos(3 * frequency), rel=1e-14)
        assert float(sin[0, 0]) == pytest.approx(factor * math.sin(3 * frequency), rel=1e-14)


def test_a_fraction_of_a_head_turns() -> None:
    rope = Rope(4, 32, RotarySpec(base=100.0)).double()
    x = torch.randn(2, 32, 3, 10, dtype=torch.float64)
    angles = rope.angles(torch.arange(32), length=32)
    found = rotate(x, *angles)
    assert torch.equal(found[..., 4:], x[..., 4:])
    assert torch.equal(found[..., :4], rotate(x[..., :4], *angles))


def test_rotation_multiplies_pairs_as_complex_numbers() -> None:
    rope = Rope(8, 32, RotarySpec(base=100.0))
    rope.cos_TH, rope.sin_TH = rope.cos_TH.double(), rope.sin_TH.double()
    rope.fill_buffers()
    x = torch.randn(2, 32, 3, 8, dtype=torch.float64)
    found = rotate(x, *rope.angles(torch.arange(32), length=32))
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

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(x, *rope.angles(torch.tensor([position]), length=64))

    def score(m: int, n: int) -> torch.Tensor:
        return (turned(q, m) * turned(k, n)).sum()

    assert torch.allclose(score(5, 2), score(61, 58), rtol=1e-12)
    assert not torch.allclose(score(5, 2), score(5, 3), rtol=1e-3)


def test_low_precision_is_rotated_in_fp32() -> None:
    rope = Rope(64, 4096, RotarySpec())
    rope.fill_buffers()
    x = torch.randn(1, 4096, 1, 64)
    low = rotate(x.bfloat16(), *rope.angles(torch.arange(4096), length=4096))
    high = rotate(x.bfloat16().float(), *rope.angles(torch.arange(4096), length=4096))
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, high.bfloat16())


def test_positions_start_again_in_each_document() -> None:
    documents = torch.tensor([[0, 0, 0, 0, 0], [3, 3, 4, 4, 4], [0, 1, 2, 3, 3]], dtype=torch.int32)
    found = document_positions(documents)
    assert found.dtype == torch.int64
    assert found.tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 1, 2], [0, 0, 0, 0, 1]]
