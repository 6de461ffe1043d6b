"""Checksums over raw bits: every flip is found, in any format and shape."""

import random

import pytest
import torch

from megaspec.runtime.checksums import ROW, Checksums, Summed, checksum

FORMATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.int64)


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Flips a bit, counted from the first byte; twice is as it was."""
    raw = tensor.view(-1).view(torch.uint8) if tensor.is_contiguous() else None
    assert raw is not None
    raw[bit // 8] ^= 1 << (bit % 8)


def noise(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    n = 1
    for one in shape:
        n *= one
    draw = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (n * size,), generator=draw, dtype=torch.int64).to(torch.uint8)
    return raw.view(dtype).view(shape)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (7, 5), (ROW, 8), (1000, 13), (63, 1000)], ids=str)
def test_every_flip_is_found(dtype, shape):
    tensor = noise(shape, dtype)
    before = int(checksum(tensor))
    assert before == int(checksum(tensor.clone()))
    bits = tensor.numel() * tensor.element_size() * 8
    draw = random.Random(0)
    for bit in sorted({0, bits - 1, *(draw.randrange(bits) for _ in range(200))}):
        flip(tensor, bit)
        assert int(checksum(tensor)) != before, bit
        flip(tensor, bit)
    assert int(checksum(tensor)) == before


def test_rows_that_change_places_are_found():
    tensor = noise((4 * ROW, 2), torch.float32)
    moved = torch.cat([tensor[ROW:], tensor[:ROW]])
    assert int(checksum(tensor)) != int(checksum(moved))


def test_where_a_tensor_lies_does_not_matter():
    """Shares begin anywhere in a flat buffer, and pieces may be columns."""
    tensor = noise((37, 24), torch.bfloat16)
    flat = torch.zeros(3 + tensor.numel(), dtype=tensor.dtype)
    flat[3:].copy_(tensor.view(-1))
    assert int(checksum(flat[3:].view(37, 24))) == int(checksum(tensor))
    wide = torch.cat([tensor, tensor], dim=1)
    assert int(checksum(wide[:, 24:])) == int(checksum(tensor))


def test_many_at_once_are_those_of_each():
    tensors = {"a": noise((5,), torch.float32), "b": noise((ROW * 9,), torch.float64), "none": torch.zeros(0)}
    pieces = []
    for name, tensor in tensors.items():
        pieces.append(Summed(name, "here", name, tuple(slice(0, size) for size in tensor.shape)))
    pieces.append(Summed("part", "here", "b", (slice(3, 700),)))
    sums = Checksums(pieces, lambda: {"here": tensors}, device=torch.device("cpu"))
    expected = [*tensors.values(), tensors["b"][3:700]]
    assert sums.take().tolist() == [int(checksum(tensor)) for tensor in expected]
    assert sums.bytes_read == 20 + 8 * ROW * 9 + 8 * 697
    flip(tensors["b"], 12345)
    assert sums.take().tolist() == [int(checksum(tensor)) for tensor in expected]


def test_it_is_the_sum_that_the_note_says():
    tensor = noise((ROW * 3 + 5,), torch.int64)
    expected = 0
    for row in range(4):
        words = tensor[row * ROW : (row + 1) * ROW].tolist()
        expected += sum(words) * (2 * row + 1) * 0x9E3779B97F4A7C15
    assert int(checksum(tensor)) % 2**64 == expected % 2**64
