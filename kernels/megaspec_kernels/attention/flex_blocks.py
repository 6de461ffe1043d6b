"""Which blocks of keys each block of queries sees, and the other way round, as torch's flex_attention takes it.

The keys that a query sees begin at its window's or its document's start, whichever is later, and end with itself.
Starts only grow along a row. So the blocks that a block of queries sees lie side by side, and so do those that each of
its queries sees whole; and the same of the blocks of queries that see a block of keys.

Note "Memory". torch's kernels for flex_attention read these numbers as if they lay one behind the other, and its
compiler lays out as it likes what it computes itself. Where nothing is kept for a backward pass it put the rows of a
batch innermost, and the kernels read beyond the end (torch 2.11, and the same code in 2.13; pytorch/pytorch#172225 is
of the same kind). What an operation returns lies as the operation says.
"""

# B sequences, T tokens; I blocks of queries, J blocks of keys, of which there are as many

from typing import NamedTuple

import torch
from torch import Tensor

from megaspec.core.divisors import ceil_div
from megaspec_kernels.grid import next_power_of_2
from megaspec_kernels.operation import fake_of, operation

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without GPU
    triton = None

# Queries and keys of a block. Triton's tiles divide it.
BLOCK = 128


class Blocks(NamedTuple):
    """int32: how many blocks, [B, 1, I], and which ones, [B, 1, I, J]; behind the count any block is named. The names
    are those of BlockMask: `q_*` are the blocks of queries that see a block of keys, `full_*` those that are seen whole
    by each query, the others those that are seen in part."""

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor


def blocks_of(starts_BT: Tensor) -> Blocks:
    """int32 [B, T]: the first key that each query sees, at most itself and never less than the one before it."""
    return Blocks(*flex_blocks(starts_BT))


@operation("megaspec::flex_blocks")
def flex_blocks(starts: Tensor) -> list[Tensor]:
    """[B, T] -> the fields of Blocks."""
    if starts.is_cuda:
        return blocks_by_kernel(starts)
    return blocks_by_torch(starts)


@fake_of(flex_blocks)
def _(starts: Tensor) -> list[Tensor]:
    return _empty(starts)


def blocks_by_torch(starts_BT: Tensor) -> list[Tensor]:
    """The fields of Blocks, as formulas."""
    T = starts_BT.shape[1]
    last = ceil_div(T, BLOCK) - 1
    number = torch.arange(last + 1, device=starts_BT.device, dtype=torch.int32)
    first_query_I = number * BLOCK
    last_query_I = (first_query_I + BLOCK - 1).clamp(max=T - 1)
    # the block in which the first key lies that any of the block's queries sees
    first_BI = starts_BT[:, first_query_I] // BLOCK
    # the first block that all of them see whole; at most their own, of which the causal mask hides a part
    whole_BI = torch.minimum((starts_BT[:, last_query_I] + BLOCK - 1) // BLOCK, number)
    n_part_BI = whole_BI - first_BI + 1
    # first, first + 1, ... and, last, the block of the queries themselves
    part_BIJ = torch.where(number == n_part_BI[..., None] - 1, number[:, None], first_BI[..., None] + number)
    whole_BIJ = whole_BI[..., None] + number

    # blocks of queries behind a block of keys: first those that see it whole, then those that see it in part
    is_behind_IJ = number[:, None] > number
    n_whole_BJ = (is_behind_IJ & (whole_BI[..., None] <= number)).sum(dim=1, dtype=torch.int32)
    n_all_BJ = (is_behind_IJ & (first_BI[..., None] <= number)).sum(dim=1, dtype=torch.int32)
    whole_by_key_1JI = (number[:, None] + 1 + number)[None]
    part_by_key_BJI = torch.where(number == 0, number[:, None], number[:, None] + n_whole_BJ[..., None] + number)

    found = _empty(starts_BT)
    values = (
        n_part_BI,
        part_BIJ.clamp(max=last),
        number - whole_BI,
        whole_BIJ.clamp(max=last),
        1 + n_all_BJ - n_whole_BJ,
        part_by_key_BJI.clamp(max=last),
        n_whole_BJ,
        whole_by_key_1JI.clamp(max=last),
    )
    for out, value in zip(found, values, strict=True):
        # of all heads
        out.copy_(value[:, None])
    return found


if triton is not None:

    @triton.jit
    def flex_blocks_kernel(
        starts_ptr,
        n_part_ptr, part_ptr, n_whole_ptr, whole_ptr,
        n_part_by_key_ptr, part_by_key_ptr, n_whole_by_key_ptr, whole_by_key_ptr,
        T, blocks, b_block: tl.constexpr, b_n: tl.constexpr,
    ):  # fmt: skip
        """One program a sequence and block, of which it takes both directions; see blocks_by_torch."""
        row = tl.program_id(0).to(tl.int64)
        this = tl.program_id(1)
        starts_ptr += row * T
        number = tl.arange(0, b_n)
        there = number < blocks
        at = row * blocks + this
        many = at * blocks + number

        first = tl.load(starts_ptr + this * b_block) // b_block
        last_start = tl.load(starts_ptr + tl.minimum(this * b_block + b_block, T) - 1)
        whole = tl.minimum((last_start + b_block - 1) // b_block, this)
        n_part = whole - first + 1
        part = tl.where(number == n_part - 1, this, first + number)
        tl.store(n_part_ptr + at, n_part)
        tl.store(part_ptr + many, tl.minimum(part, blocks - 1), mask=there)
        tl.store(n_whole_ptr + at, this - whole)
        tl.store(whole_ptr + many, tl.minimum(whole + number, blocks - 1), mask=there)

        behind = there & (number > this)
        firsts = tl.load(starts_ptr + number * b_block, mask=behind, other=0) // b_block
        last_queries = tl.minimum(number * b_block + b_block, T) - 1
        last_starts = tl.load(starts_ptr + last_queries, mask=behind, other=0)
        wholes = tl.minimum((last_starts + b_block - 1) // b_block, number)
        n_whole = tl.sum((behind & (wholes <= this)).to(tl.int32), axis=0)
        n_all = tl.sum((behind & (firsts <= this)).to(tl.int32), axis=0)
        part = tl.where(number == 0, this, this + n_whole + number)
        tl.store(n_part_by_key_ptr + at, 1 + n_all - n_whole)
        tl.store(part_by_key_ptr + many, tl.minimum(part, blocks - 1), mask=there)
        tl.store(n_whole_by_key_ptr + at, n_whole)
        tl.store(whole_by_key_ptr + many, tl.minimum(this + 1 + number, blocks - 1), mask=there)


def blocks_by_kernel(starts_BT: Tensor) -> list[Tensor]:
    """The same in one kernel."""
    B, T = starts_BT.shape
    found = _empty(starts_BT)
    blocks = ceil_div(T, BLOCK)
    flex_blocks_kernel[(B, blocks)](starts_BT.contiguous(), *found, T, blocks, BLOCK, next_power_of_2(blocks))
    return found


def _empty(starts_BT: Tensor) -> list[Tensor]:
    """In memory as torch's kernels read it, see note "Memory"."""
    B, T = starts_BT.shape
    blocks = ceil_div(T, BLOCK)
    found = []
    for _ in range(4):
        found.append(starts_BT.new_empty(B, 1, blocks, dtype=torch.int32))
        found.append(starts_BT.new_empty(B, 1, blocks, blocks, dtype=torch.int32))
    return found
