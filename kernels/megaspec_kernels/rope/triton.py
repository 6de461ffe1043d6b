"""Rotary positions in one kernel for each direction: forward from the product of queries, keys and values to heads that
are turned; backward from the gradients of all three to that of their product.

Note "Units". A program takes some tokens of one unit, and a unit's features in two halves, low ones and high ones. Of a
query or key head it is what turns, whose halves turn together; of a value head all of it; and where a part of each head
turns, the rest of each query and key head is a unit behind those.
"""

# B sequences, T tokens, M = B T; N query heads, K key and value heads, H head size, R features of a head that turn,
# C features of a token in the product of all three

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megaspec.core.divisors import ceil_div
from megaspec_kernels.fp8_cast.formats import Known
from megaspec_kernels.fp8_cast.tile import Written, empty_pair, format_constants
from megaspec_kernels.fp8_cast.tiles import grid_of_tiles
from megaspec_kernels.grid import next_power_of_2
from megaspec_kernels.operation import fake_of, operation
from megaspec_kernels.rope.form import Heads, Turned, values_of

try:
    import triton
    import triton.language as tl

    from megaspec_kernels.fp8_cast.tile import (
        INTERPRETED,
        columns_of_rows,
        four_in_fp8,
        in_fp8,
        inverse_of,
        largest_size,
        load_four_rows,
        load_known,
        load_pairs,
        record,
        recounted,
        size_of_four_rows,
        split,
        store_four_rows,
        store_two_columns,
        tile_of_program,
    )
except ImportError:  # a machine without GPU: the resolver never picks this file's kernels there
    triton = None

# Elements of each half that one program takes where it writes the model's format.
BLOCK = 1024
WARPS = 4
# Where it writes fp8, an element at a time; larger ones spill.
SMALL_BLOCK = 4096
SMALL_WARPS = 8

if triton is not None:

    @triton.jit
    def unit_of(unit, heads, turned_heads, d_head: tl.constexpr, d_rotary: tl.constexpr):
        """Of a unit its head, its first feature there, how many are low and high ones, and whether they turn."""
        is_rest = unit >= heads
        turns = unit < turned_heads
        head = tl.where(is_rest, unit - heads, unit)
        first = tl.where(is_rest, d_rotary, 0)
        low = tl.where(turns, d_rotary // 2, (d_head + 1) // 2)
        low = tl.where(is_rest, (d_head - d_rotary + 1) // 2, low)
        high = tl.where(turns, d_rotary // 2, d_head // 2)
        high = tl.where(is_rest, (d_head - d_rotary) // 2, high)
        return head, first, low, high, turns

    @triton.jit
    def turned_back(low, high, cos, sin, turns):
        """Gradients of what is turned -> of what was there before: the rotation's transpose."""
        # what does not turn stays to the bit
        before_low = tl.where(turns, low * cos + high * sin, low)
        before_high = tl.where(turns, high * cos - low * sin, high)
        return before_low, before_high

    @triton.jit
    def rope_fwd_kernel(
        qkv_ptr,
        q_ptr,
        k_ptr,
        cos_ptr,
        sin_ptr,
        M,
        angles,
        N,
        K,
        d_head: tl.constexpr,
        d_rotary: tl.constexpr,
        b_m: tl.constexpr,
        b_f: tl.constexpr,
    ):
        """`angles`: rows of cosines and sines, of which token m takes row m % angles."""
        # value heads stay where they are
        head, first, n_low, n_high, turns = unit_of(tl.program_id(1), N + K, N + K, d_head, d_rotary)
        m = tl.program_id(0).to(tl.int64) * b_m + tl.arange(0, b_m)
        f = tl.arange(0, b_f)
        is_token = (m < M)[:, None]
        low_mask = is_token & (f < n_low)[None, :]
        high_mask = is_token & (f < n_high)[None, :]
        at = m[:, None] * ((N + 2 * K) * d_head) + head * d_head + first + f[None, :]
        low = tl.load(qkv_ptr + at, mask=low_mask, other=0.0).to(tl.float32)
        high = tl.load(qkv_ptr + at + n_low, mask=high_mask, other=0.0).to(tl.float32)
        angle = (m % angles)[:, None] * (d_rotary // 2) + f[None, :]
        cos = tl.load(cos_ptr + angle, mask=low_mask & turns, other=1.0)
        sin = tl.load(sin_ptr + angle, mask=low_mask & turns, other=0.0)
        turned_low = tl.where(turns, low * cos - high * sin, low).to(q_ptr.dtype.element_ty)
        turned_high = tl.where(turns, high * cos + low * sin, high).to(q_ptr.dtype.element_ty)
        if head < N:
            to = q_ptr + m[:, None] * (N * d_head) + head * d_head + first + f[None, :]
            tl.store(to, turned_low, mask=low_mask)
            tl.store(to + n_low, turned_high, mask=high_mask)
        else:
            to = k_ptr + m[:, None] * (K * d_head) + (head - N) * d_head + first + f[None, :]
            tl.store(to, turned_low, mask=low_mask)
            tl.store(to + n_low, turned_high, mask=high_mask)

    @triton.jit
    def source_of(
        head,
        q_ptr,
        k_ptr,
        v_ptr,
        N,
        K,
        q_strides,
        k_strides,
        v_strides,
        per_stride: tl.constexpr,
        alignment: tl.constexpr,
    ):
        """Where the gradient of a head lies, and its strides over sequences and tokens. Strides over sequences, tokens
        and heads count `per_stride` elements as one; pointers are aligned to so many bytes."""
        is_query = head < N
        is_key = head < N + K
        place = tl.where(is_query, head, tl.where(is_key, head - N, head - N - K)).to(tl.int64)
        source = tl.where(is_query, q_ptr, tl.where(is_key, k_ptr, v_ptr))
        # what is chosen of pointers has lost what is known of them
        source = tl.multiple_of(source, alignment)
        over_sequences = tl.where(is_query, q_strides[0], tl.where(is_key, k_strides[0], v_strides[0]))
        over_tokens = tl.where(is_query, q_strides[1], tl.where(is_key, k_strides[1], v_strides[1]))
        over_heads = tl.where(is_query, q_strides[2], tl.where(is_key, k_strides[2], v_strides[2]))
        source += place * over_heads * per_stride
        return source, over_sequences.to(tl.int64), over_tokens.to(tl.int64), over_heads.to(tl.int64)

    @triton.jit
    def gradients_of_unit(
        q_ptr,
        k_ptr,
        v_ptr,
        cos_ptr,
        sin_ptr,
        M,
        T,
        angles,
        N,
        K,
        q_strides,
        k_strides,
        v_strides,
        per_stride: tl.constexpr,
        alignment: tl.constexpr,
        d_head: tl.constexpr,
        d_rotary: tl.constexpr,
        b_m: tl.constexpr,
        b_f: tl.constexpr,
    ):
        """Both halves in fp32, turned back; where they are to be written, and their masks."""
        head, first, n_low, n_high, turns = unit_of(tl.program_id(1), N + 2 * K, N + K, d_head, d_rotary)
        m = tl.program_id(0).to(tl.int64) * b_m + tl.arange(0, b_m)
        f = tl.arange(0, b_f)
        is_token = (m < M)[:, None]
        low_mask = is_token & (f < n_low)[None, :]
        high_mask = is_token & (f < n_high)[None, :]
        source, over_sequences, over_tokens, _ = source_of(
            head, q_ptr, k_ptr, v_ptr, N, K, q_strides, k_strides, v_strides, per_stride, alignment
        )
        at = (m // T * over_sequences + m % T * over_tokens)[:, None] * per_stride + first + f[None, :]
        low = tl.load(source + at, mask=low_mask, other=0.0).to(tl.float32)
        high = tl.load(source + at + n_low, mask=high_mask, other=0.0).to(tl.float32)
        angle = (m % angles)[:, None] * (d_rotary // 2) + f[None, :]
        cos = tl.load(cos_ptr + angle, mask=low_mask & turns, other=1.0)
        sin = tl.load(sin_ptr + angle, mask=low_mask & turns, other=0.0)
        low, high = turned_back(low, high, cos, sin, turns)
        column = head * d_head + first + f
        return low, high, m, column, n_low, low_mask, high_mask

    @triton.jit
    def rope_bwd_kernel(
        q_ptr,
        k_ptr,
        v_ptr,
        out_ptr,
        cos_ptr,
        sin_ptr,
        M,
        T,
        angles,
        N,
        K,
        q_strides,
        k_strides,
        v_strides,
        per_stride: tl.constexpr,
        alignment: tl.constexpr,
        d_head: tl.constexpr,
        d_rotary: tl.constexpr,
        b_m: tl.constexpr,
        b_f: tl.constexpr,
    ):
        low, high, m, column, n_low, low_mask, high_mask = gradients_of_unit(
            q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, M, T, angles, N, K, q_strides, k_strides, v_strides,
            per_stride, alignment, d_head, d_rotary, b_m, b_f,
        )  # fmt: skip
        to = out_ptr + m[:, None] * ((N + 2 * K) * d_head) + column[None, :]
        tl.store(to, low.to(out_ptr.dtype.element_ty), mask=low_mask)
        tl.store(to + n_low, high.to(out_ptr.dtype.element_ty), mask=high_mask)

    @triton.jit
    def rope_bwd_fp8_kernel(
        q_ptr,
        k_ptr,
        v_ptr,
        row_ptr,
        column_ptr,
        cos_ptr,
        sin_ptr,
        scale_ptr,
        scale_copy_ptr,
        seen_ptr,
        saturated_ptr,
        M,
        T,
        angles,
        N,
        K,
        q_strides,
        k_strides,
        v_strides,
        per_stride: tl.constexpr,
        alignment: tl.constexpr,
        d_head: tl.constexpr,
        d_rotary: tl.constexpr,
        has_seen: tl.constexpr,
        largest: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        b_m: tl.constexpr,
        b_f: tl.constexpr,
    ):
        low, high, m, column, n_low, low_mask, high_mask = gradients_of_unit(
            q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, M, T, angles, N, K, q_strides, k_strides, v_strides,
            per_stride, alignment, d_head, d_rotary, b_m, b_f,
        )  # fmt: skip
        scale = tl.load(scale_ptr)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale_copy_ptr, scale)
        inverse = inverse_of(scale)
        row = m[:, None] * ((N + 2 * K) * d_head) + column[None, :]
        # masked elements are 0
        q, size, over = in_fp8(low, inverse, largest, mantissa, least_exponent)
        tl.store(row_ptr + row, q, mask=low_mask)
        # to transposed addresses
        tl.store(column_ptr + column.to(tl.int64)[None, :] * M + m[:, None], q, mask=low_mask)
        q, size_high, over_high = in_fp8(high, inverse, largest, mantissa, least_exponent)
        tl.store(row_ptr + row + n_low, q, mask=high_mask)
        tl.store(column_ptr + (column + n_low).to(tl.int64)[None, :] * M + m[:, None], q, mask=high_mask)
        record(
            seen_ptr,
            tl.load(seen_ptr),
            saturated_ptr,
            tl.max(tl.max(tl.maximum(size, size_high), axis=1), axis=0),
            tl.sum(tl.sum(over.to(tl.int32) + over_high.to(tl.int32), axis=1), axis=0),
            has_seen,
        )

    @triton.jit
    def split_angles(angles):
        """int64 of two fp32 -> both, the first of them first."""
        first = angles.to(tl.int32).to(tl.float32, bitcast=True)
        second = (angles >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        return first, second

    @triton.jit
    def rotated_back(low, high, cos_ptr, sin_ptr, angle, mask, turns, is_even: tl.constexpr):
        """Two neighbours each in the low and the high half, int32 of two bf16 -> all four in fp32, turned back."""
        low_0, low_1 = split(low)
        high_0, high_1 = split(high)
        mask = mask & turns
        cos_0, cos_1 = split_angles(tl.load(cos_ptr + angle, mask=mask, other=0))
        sin_0, sin_1 = split_angles(tl.load(sin_ptr + angle, mask=mask, other=0))
        low_0, high_0 = turned_back(low_0, high_0, cos_0, sin_0, turns)
        low_1, high_1 = turned_back(low_1, high_1, cos_1, sin_1, turns)
        return low_0, low_1, high_0, high_1

    @triton.jit
    def rope_bwd_fp8_pairs_kernel(
        q_ptr,
        k_ptr,
        v_ptr,
        row_ptr,
        column_ptr,
        cos_ptr,
        sin_ptr,
        scale_ptr,
        scale_copy_ptr,
        seen_ptr,
        saturated_ptr,
        quarter_M,
        T,
        angles,
        N,
        K,
        q_strides,
        k_strides,
        v_strides,
        rows,
        d_head: tl.constexpr,
        d_rotary: tl.constexpr,
        has_seen: tl.constexpr,
        largest: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        interpreted: tl.constexpr,
        is_even: tl.constexpr,
        b_m: tl.constexpr,
        b_h: tl.constexpr,
        b_f: tl.constexpr,
        below: tl.constexpr,
    ):
        """Gradients as int32 [B, T, heads, H / 2] with strides in 16 bytes, angles as int64 [angles, R / 4], rows as
        int16 [M, C / 2], columns as int32 [C, M / 4]: as fp8_cast/triton.py does, see its note "Pairs". `rows`: four,
        which the compiler must not know. `b_h`: units of a program, all of queries, of keys or of values. `b_f`:
        features of a half."""
        tile_m, tile_u = tile_of_program(below)
        if tile_m * (b_m // 4) >= quarter_M:
            return
        # all in pairs
        head, first, half, _, turns = unit_of(tile_u * b_h, N + 2 * K, N + K, d_head // 2, d_rotary // 2)
        first = tl.multiple_of(first, 8)
        half = tl.multiple_of(half, 4)
        # tokens 4 i + j, heads h, features 2 c and 2 c + 1 of each half
        i = tl.arange(0, b_m // 4)
        h = tl.arange(0, b_h * b_f // 2) // (b_f // 2)
        c = tl.arange(0, b_h * b_f // 2) % (b_f // 2)
        mask = (tile_m * (b_m // 4) + i < quarter_M)[:, None] & (c < half)[None, :]
        source, over_sequences, over_tokens, over_heads = source_of(
            head, q_ptr, k_ptr, v_ptr, N, K, q_strides, k_strides, v_strides, 4, 16
        )
        source += first
        # four tokens lie in one sequence; in 32 bits, since divisions of 64 were a tenth of the kernel
        m = tile_m * b_m + 4 * i
        at = (m // T * over_sequences + m % T * over_tokens)[:, None] * 4 + (h * over_heads * 4 + c)[None, :]
        step = over_tokens * 4
        angle = (m % angles).to(tl.int64)[:, None] * (d_rotary // 4) + c[None, :]
        angle_step: tl.constexpr = d_rotary // 4
        # all are loaded before anything is stored
        low_0, low_1, low_2, low_3 = load_four_rows(source, at, step, mask, is_even, "")
        high_0, high_1, high_2, high_3 = load_four_rows(source + half, at, step, mask, is_even, "")
        a_0, b_0, u_0, v_0 = rotated_back(low_0, high_0, cos_ptr, sin_ptr, angle, mask, turns, is_even)
        a_1, b_1, u_1, v_1 = rotated_back(
            low_1, high_1, cos_ptr + angle_step, sin_ptr + angle_step, angle, mask, turns, is_even
        )
        a_2, b_2, u_2, v_2 = rotated_back(
            low_2, high_2, cos_ptr + 2 * angle_step, sin_ptr + 2 * angle_step, angle, mask, turns, is_even
        )
        a_3, b_3, u_3, v_3 = rotated_back(
            low_3, high_3, cos_ptr + 3 * angle_step, sin_ptr + 3 * angle_step, angle, mask, turns, is_even
        )
        scale, inverse, before = load_known(scale_ptr, seen_ptr)
        zero = i[:, None] * 0 + c[None, :] * 0
        sizes = size_of_four_rows(zero.to(tl.float32), a_0, b_0, a_1, b_1, a_2, b_2, a_3, b_3)
        sizes = size_of_four_rows(sizes, u_0, v_0, u_1, v_1, u_2, v_2, u_3, v_3)

        half_C = (N + 2 * K) * (d_head // 2)
        column = head * (d_head // 2) + first
        row_ptr += tile_m.to(tl.int64) * b_m * half_C + column
        column_ptr += column.to(tl.int64) * (2 * quarter_M) + tile_m * (b_m // 4)
        to = i[:, None] * (4 * half_C) + (h * (d_head // 2) + c)[None, :]
        down = (h * (d_head // 2) + c)[None, :] * (2 * quarter_M) + i[:, None]
        q_0, q_1, q_2, q_3 = four_in_fp8(
            a_0, b_0, a_1, b_1, a_2, b_2, a_3, b_3, inverse, largest, mantissa, least_exponent, interpreted
        )
        store_four_rows(row_ptr, to, half_C, q_0, q_1, q_2, q_3, mask, is_even)
        first_column, second_column = columns_of_rows(q_0, q_1, q_2, q_3, interpreted)
        store_two_columns(column_ptr, down, quarter_M, first_column, second_column, mask, is_even)
        # the high half
        row_ptr += half
        column_ptr += (2 * half).to(tl.int64) * quarter_M
        q_0, q_1, q_2, q_3 = four_in_fp8(
            u_0, v_0, u_1, v_1, u_2, v_2, u_3, v_3, inverse, largest, mantissa, least_exponent, interpreted
        )
        store_four_rows(row_ptr, to, half_C, q_0, q_1, q_2, q_3, mask, is_even)
        first_column, second_column = columns_of_rows(q_0, q_1, q_2, q_3, interpreted)
        store_two_columns(column_ptr, down, quarter_M, first_column, second_column, mask, is_even)
        top = largest_size(sizes)
        count = 0
        if not (top * inverse <= largest):
            # rare: computed again rather than kept
            size = zero.to(tl.float32)
            over = zero
            for j in range(rows):
                low = load_pairs(source + j * step, at, mask, is_even)
                high = load_pairs(source + j * step + half, at, mask, is_even)
                angle_j = angle + j * angle_step
                a, b, u, v = rotated_back(low, high, cos_ptr, sin_ptr, angle_j, mask, turns, is_even)
                size, over = recounted(size, over, a, b, inverse, largest)
                size, over = recounted(size, over, u, v, inverse, largest)
            top = tl.max(tl.max(size, axis=1), axis=0)
            count = tl.sum(tl.sum(over, axis=1), axis=0)
        record(seen_ptr, before, saturated_ptr, top, count, has_seen)
        if (tile_m == 0) & (tile_u == 0):
            tl.store(scale_copy_ptr, scale)


class Tile(NamedTuple):
    """Of a kernel that writes fp8: of each column it writes as many bytes as rows."""

    rows: int
    heads: int
    """Beside each other, all of queries, of keys or of values: a divisor of the numbers of each."""
    warps: int
    registers: int
    """Of a thread at most."""
    below: int
    """See `grid_of_tiles` in fp8_cast/tiles.py."""


# Halves of heads, as powers of two, that a program of pairs takes.
HALVES = (8, 16, 32, 64, 128, 256)


def tile_of(half: int, heads: Heads) -> Tile:
    """For so many features of each half: 16 bytes of each row and half a thread. Of small heads a program takes some
    beside each other, which read the same angles."""
    together = math.gcd(heads.queries, heads.keys, max(1, 64 // half))
    rows = 128 if together * half <= 32 else 64
    warps = rows * together * half // 1024
    return Tile(rows, together, max(1, min(16, warps)), registers=128, below=8)


def _units(heads: Heads, d_rotary: int, *, values: bool) -> int:
    """See note "Units"."""
    units = heads.turned
    if values:
        units += heads.keys
    if d_rotary < heads.size:
        units += heads.turned
    return units


class _Angles(NamedTuple):
    """Of each token."""

    cos: Tensor
    """[rows, R / 2] in fp32."""
    sin: Tensor
    rows: int
    """Token m takes row m % rows."""
    d_rotary: int


def _angles(cos: Tensor, sin: Tensor, B: int, T: int) -> _Angles:
    assert cos.dtype == torch.float32, f"the kernel takes angles in fp32, these are in {cos.dtype}"
    half = cos.shape[-1]
    rows = cos.numel() // half
    assert rows in (T, B * T), f"angles of {rows} tokens, heads of {B} x {T}"
    return _Angles(cos.contiguous(), sin.contiguous(), rows, 2 * half)


def _half_block(heads: Heads) -> int:
    """Features of a block that holds half a head."""
    return next_power_of_2((heads.size + 1) // 2)


@operation("megaspec::rope_forward")
def rope_forward(qkv: Tensor, cos: Tensor, sin: Tensor, queries: int, keys: int, size: int) -> tuple[Tensor, Tensor]:
    """[B, T, C] -> queries [B, T, N, H] and keys [B, T, K, H], turned. The last three: Heads."""
    assert qkv.dtype != torch.float64, "the kernel computes in fp32"
    heads = Heads(queries, keys, size)
    B, T, C = qkv.shape
    assert heads.width == C, f"{heads} are {heads.width} features of a token, not {C}"
    q = qkv.new_empty(B, T, queries, size)
    k = qkv.new_empty(B, T, keys, size)
    M = B * T
    if M == 0:
        return q, k
    angles = _angles(cos, sin, B, T)
    block = _half_block(heads)
    rows = max(1, BLOCK // block)
    rope_fwd_kernel[(ceil_div(M, rows), _units(heads, angles.d_rotary, values=False))](
        qkv.contiguous(),
        q,
        k,
        angles.cos,
        angles.sin,
        M,
        angles.rows,
        queries,
        keys,
        size,
        angles.d_rotary,
        rows,
        block,
        num_warps=WARPS,
    )
    return q, k


@fake_of(rope_forward)
def _(qkv: Tensor, cos: Tensor, sin: Tensor, queries: int, keys: int, size: int) -> tuple[Tensor, Tensor]:
    B, T, _ = qkv.shape
    return qkv.new_empty(B, T, queries, size), qkv.new_empty(B, T, keys, size)


def _heads_of(grad_q: Tensor, grad_k: Tensor) -> Heads:
    return Heads(grad_q.shape[2], grad_k.shape[2], grad_q.shape[3])


class _Lying(NamedTuple):
    """Gradients whose heads lie in one piece each."""

    grads: tuple[Tensor, Tensor, Tensor]
    strides: tuple[tuple[int, ...], ...]
    """Of each over sequences, tokens and heads, in so many elements as `per` says."""
    per: int
    alignment: int
    """Bytes that what is read at once may have."""


def _lying(*grads: Tensor) -> _Lying:
    grads = tuple(_in_one_piece(grad) for grad in grads)
    per = 8
    alignment = 16
    for grad in grads:
        if grad.data_ptr() % 16 or any(stride % 8 for stride in grad.stride()[:3]):
            per = 1
            alignment = 1
    strides = tuple(tuple(stride // per for stride in grad.stride()[:3]) for grad in grads)
    return _Lying(grads, strides, per, alignment)


def _in_one_piece(grad: Tensor) -> Tensor:
    """With heads that lie so. Over what there is but one of, any stride may stand: it becomes 0."""
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    strides = tuple(stride if size > 1 else 0 for size, stride in zip(grad.shape, grad.stride(), strict=True))
    return grad.as_strided(grad.shape, (*strides[:3], 1))


@operation("megaspec::rope_backward")
def rope_backward(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, T, N, H], [B, T, K, H] twice -> [B, T, C]"""
    heads = _heads_of(grad_q, grad_k)
    B, T = grad_q.shape[:2]
    out = grad_q.new_empty(B, T, heads.width)
    M = B * T
    if M == 0:
        return out
    lying = _lying(grad_q, grad_k, grad_v)
    angles = _angles(cos, sin, B, T)
    block = _half_block(heads)
    rows = max(1, BLOCK // block)
    rope_bwd_kernel[(ceil_div(M, rows), _units(heads, angles.d_rotary, values=True))](
        *lying.grads,
        out,
        angles.cos,
        angles.sin,
        M,
        T,
        angles.rows,
        heads.queries,
        heads.keys,
        *lying.strides,
        lying.per,
        lying.alignment,
        heads.size,
        angles.d_rotary,
        rows,
        block,
        num_warps=WARPS,
    )
    return out


@fake_of(rope_backward)
def _(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return grad_q.new_empty(*grad_q.shape[:2], _heads_of(grad_q, grad_k).width)


def rope_backward_in_fp8(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor, *, known: Known
) -> Written:
    """`rope_backward`, written in fp8 alone, by a scale that is known."""
    assert grad_q.dtype != torch.float64, "the kernel computes in fp32"
    heads = _heads_of(grad_q, grad_k)
    B, T = grad_q.shape[:2]
    M = B * T
    written = empty_pair(grad_q, M, heads.width, known.dtype)
    lying = _lying(grad_q, grad_k, grad_v)
    angles = _angles(cos, sin, B, T)
    block = _half_block(heads)
    units = _units(heads, angles.d_rotary, values=True)
    recorded = (
        known.scale,
        written.scale,
        # where nothing is recorded nothing is written: any address serves
        known.scale.view(torch.int32) if known.seen is None else known.seen.view(torch.int32),
        known.saturated,
    )
    # both halves of every unit in 16 bytes
    in_pairs = M % 16 == 0 and T % 4 == 0 and heads.size % 16 == 0 and angles.d_rotary % 16 == 0 and block in HALVES
    if in_pairs and lying.per == 8 and grad_q.dtype == torch.bfloat16:
        tile = tile_of(block, heads)
        is_even = M % tile.rows == 0 and angles.d_rotary == heads.size == 2 * block
        rope_bwd_fp8_pairs_kernel[grid_of_tiles(ceil_div(M, tile.rows), units // tile.heads, tile.below)](
            *(grad.view(torch.int32) for grad in lying.grads),
            written.rows.view(torch.int16),
            written.columns.view(torch.int32),
            angles.cos.view(torch.int64),
            angles.sin.view(torch.int64),
            *recorded,
            M // 4,
            T,
            angles.rows,
            heads.queries,
            heads.keys,
            *lying.strides,
            M // (M // 4),
            heads.size,
            angles.d_rotary,
            known.seen is not None,
            *format_constants(known.dtype),
            INTERPRETED,
            is_even,
            tile.rows,
            tile.heads,
            block,
            tile.below,
            num_warps=tile.warps,
            maxnreg=tile.registers,
        )
        return written
    rows = max(16, min(64, SMALL_BLOCK // block))
    rope_bwd_fp8_kernel[(ceil_div(M, rows), units)](
        *lying.grads,
        written.rows.view(torch.uint8),
        written.columns.view(torch.uint8),
        angles.cos,
        angles.sin,
        *recorded,
        M,
        T,
        angles.rows,
        heads.queries,
        heads.keys,
        *lying.strides,
        lying.per,
        lying.alignment,
        heads.size,
        angles.d_rotary,
        known.seen is not None,
        *format_constants(known.dtype),
        rows,
        block,
        num_warps=SMALL_WARPS,
    )
    return written


class RopeOp(torch.autograd.Function):
    """See reference.py."""

    @staticmethod
    def forward(ctx, qkv, cos, sin, queries, keys, size):
        ctx.save_for_backward(cos, sin)
        q, k = rope_forward(qkv, cos, sin, queries, keys, size)
        return q, k, values_of(qkv, Heads(queries, keys, size))

    @staticmethod
    def backward(ctx, grad_q, grad_k, grad_v):
        cos, sin = ctx.saved_tensors
        return rope_backward(grad_q, grad_k, grad_v, cos, sin), None, None, None, None, None


def rope(qkv_BTC: Tensor, cos: Tensor, sin: Tensor, *, heads: Heads) -> Turned:
    """See reference.py."""
    return Turned(*RopeOp.apply(qkv_BTC, cos, sin, *heads))
