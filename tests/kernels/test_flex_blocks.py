"""Blocks for torch's flex_attention: by the formula, and by the kernel in Triton's interpreter and on a GPU. That they
are those of a mask is held in test_attention.py, by what attention computes with them in test_attention_flex.py."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from megaspec_kernels.attention import flex_blocks
from megaspec_kernels.attention.flex_blocks import BLOCK, Blocks, blocks_by_kernel, blocks_by_torch, blocks_of

INTERPRETED = flex_blocks.triton is not None and flex_blocks.triton.knobs.runtime.interpret
# Of 1, 1, 2, 3 and 8 blocks: numbers of them that are no power of two leave a part of a program idle.
LENGTHS = [1, 128, 129, 300, 897]


def starts(T: int, rate: float, window: int | None, device: torch.device) -> Tensor:
    """Of three rows of documents that begin with some probability."""
    draw = torch.Generator().manual_seed(T)
    place = torch.arange(T, dtype=torch.int32)
    begins = torch.rand(3, T, generator=draw) < rate
    found = torch.where(begins, place, 0).cummax(dim=1).values
    if window is not None:
        found = torch.maximum(found, place - (window - 1))
    return found.to(device)


@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize("rate", [0.0, 0.004, 0.02, 1.0])
@pytest.mark.parametrize("T", LENGTHS)
def test_blocks_of_queries_are_those_that_see_the_keys(T: int, rate: float, window: int | None) -> None:
    """As torch turns the lists of keys round."""
    found = blocks_of(starts(T, rate, window, torch.device("cpu")))
    turned = BlockMask.from_kv_blocks(*found[:4], BLOCK_SIZE=BLOCK, seq_lengths=(T, T))
    assert torch.equal(found.q_num_blocks, turned.q_num_blocks)
    assert torch.equal(found.full_q_num_blocks, turned.full_q_num_blocks)
    for ours, theirs, count in (
        (found.q_indices, turned.q_indices, found.q_num_blocks),
        (found.full_q_indices, turned.full_q_indices, found.full_q_num_blocks),
    ):
        is_told = torch.arange(ours.shape[3]) < count[..., None]
        assert torch.equal(ours[is_told], theirs[is_told])


@pytest.mark.parametrize("rate", [0.0, 0.02])
@pytest.mark.parametrize("T", LENGTHS)
def test_they_lie_one_behind_the_other_and_as_the_compiler_is_told(T: int, rate: float) -> None:
    """torch's kernels take the stride of a dimension of one for the distance of what lies in front of it."""
    blocks = -(-T // BLOCK)
    # column by column, as a compiler may lay them
    mine = starts(T, rate, None, torch.device("cpu")).t().contiguous().t()
    fake = blocks_of(mine.to("meta"))
    for name, found, told in zip(Blocks._fields, blocks_of(mine), fake, strict=True):
        assert found.dtype == told.dtype == torch.int32, name
        assert found.shape == told.shape, name
        expected = (blocks, blocks, 1) if found.dim() == 3 else (blocks * blocks, blocks * blocks, blocks, 1)
        assert found.stride() == told.stride() == expected, name
        assert found.min() >= 0, name
        assert found.max() <= blocks, name


@pytest.mark.parametrize("implementation", ["triton"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("rate", [0.0, 0.004, 0.02, 1.0])
@pytest.mark.parametrize("T", LENGTHS)
def test_the_kernel_equals_the_formula(
    T: int, rate: float, window: int | None, implementation: str, device: torch.device
) -> None:
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("runs under TRITON_INTERPRET=1: test_triton_interpreted.py")
    mine = starts(T, rate, window, device)
    for name, found, truth in zip(Blocks._fields, blocks_by_kernel(mine), blocks_by_torch(mine), strict=True):
        assert torch.equal(found, truth), name
