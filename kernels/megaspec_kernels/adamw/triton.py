"""AdamW in one kernel over all tensors, with the factor on gradients and the weights' copy in the model's format: each
element is read once and written once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from megaspec_kernels.adamw.formats import Format
from megaspec_kernels.adamw.reference import Moments, Step, next_scales

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without GPU: the resolver never picks this file's kernels there
    triton = None

BLOCK = 2048
# Elements that one program goes through: few, so that what runs at once lies close together in memory.
CHUNK = 4 * BLOCK
WARPS = 8
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8"}

if triton is not None:

    @triton.jit
    def typed(address, name: tl.constexpr, is_aligned: tl.constexpr):
        """The pointer that an int64 is. fp8 is read as bytes, low halves of master weights as int16.

        Four elements are said to be aligned, not 16 bytes: then a thread takes four of each tensor, 16 bytes of those
        in fp32. With eight of a bf16 weight all else would go to other threads through shared memory.
        """
        if name == "fp32":
            p = address.to(tl.pointer_type(tl.float32))
            if is_aligned:
                p = tl.multiple_of(p, 16)
        elif name == "bf16":
            p = address.to(tl.pointer_type(tl.bfloat16))
            if is_aligned:
                p = tl.multiple_of(p, 8)
        elif name == "fp16":
            p = address.to(tl.pointer_type(tl.float16))
            if is_aligned:
                p = tl.multiple_of(p, 8)
        elif name == "int16":
            p = address.to(tl.pointer_type(tl.int16))
            if is_aligned:
                p = tl.multiple_of(p, 8)
        else:
            p = address.to(tl.pointer_type(tl.uint8))
            if is_aligned:
                p = tl.multiple_of(p, 4)
        return p

    @triton.jit
    def hashed(x):
        """See formats.hashed; uint32."""
        x = (x ^ (x >> 16)) * 0x7FEB352D
        x = (x ^ (x >> 15)) * 0x846CA68B
        return x ^ (x >> 16)

    @triton.jit
    def distance(x, mantissa: tl.constexpr, lowest: tl.constexpr):
        """Between neighbours on the grid at x >= 0, and its inverse."""
        exponent = tl.maximum(((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127, lowest)
        step = ((exponent - mantissa + 127) << 23).to(tl.float32, bitcast=True)
        return step, ((mantissa - exponent + 127) << 23).to(tl.float32, bitcast=True)

    @triton.jit
    def from_bytes(b):
        """e4m3 without subnormal float32 on the way, which may be flushed."""
        exponent, fraction = ((b >> 3) & 15).to(tl.int32), (b & 7).to(tl.int32)
        normal = (((exponent + 120) << 23) | (fraction << 20)).to(tl.float32, bitcast=True)
        x = tl.where(exponent == 0, fraction.to(tl.float32) * 0.001953125, normal)
        return tl.where((b & 128) != 0, -x, x)

    @triton.jit
    def to_bytes(x):
        """e4m3 of what lies on its grid."""
        size = tl.abs(x)
        normal = (size.to(tl.int32, bitcast=True) >> 20) - 960
        code = tl.where(size < 0.015625, (size * 512.0).to(tl.int32), normal)
        return tl.where(x < 0, code | 128, code).to(tl.uint8)

    @triton.jit
    def load(p, at, mask, name: tl.constexpr):
        x = tl.load(p + at, mask=mask, other=0)
        if name == "fp8":
            return from_bytes(x)
        return x.to(tl.float32)

    @triton.jit
    def store(p, at, mask, x, name: tl.constexpr):
        if name == "fp8":
            tl.store(p + at, to_bytes(x), mask=mask)
        elif name == "bf16":
            tl.store(p + at, x.to(tl.bfloat16), mask=mask)
        elif name == "fp16":
            tl.store(p + at, x.to(tl.float16), mask=mask)
        else:
            tl.store(p + at, x, mask=mask)

    @triton.jit
    def adamw_kernel(
        addresses_ptr,
        which_ptr,
        start_ptr,
        size_ptr,
        decay_ptr,
        key_ptr,
        m_unit_ptr,
        m_next_ptr,
        m_largest_ptr,
        v_unit_ptr,
        v_next_ptr,
        v_largest_ptr,
        scalars_ptr,
        n_tensors,
        lr,
        decayed,
        gain1,
        gain2,
        eps,
        weight: tl.constexpr,
        master: tl.constexpr,
        m_name: tl.constexpr,
        m_mantissa: tl.constexpr,
        m_lowest: tl.constexpr,
        m_most: tl.constexpr,
        v_name: tl.constexpr,
        v_mantissa: tl.constexpr,
        v_lowest: tl.constexpr,
        v_most: tl.constexpr,
        v_least: tl.constexpr,
        is_root: tl.constexpr,
        has_scales: tl.constexpr,
        is_aligned: tl.constexpr,
        chunk: tl.constexpr,
        b_n: tl.constexpr,
    ):
        """`unit`: 1 / scale. `scalars`: 1 / divide_by, 1 / (1 − β₁ᵗ), 1 / (1 − β₂ᵗ), skip. `decayed`: lr times decay.
        `gain`: 1 − β. `largest`: of what is stored, scale included; left alone unless `has_scales`, as units and
        next scales are. Master "none": the weights are fp32 themselves."""
        tensor = tl.load(which_ptr + tl.program_id(0))
        first = tl.multiple_of(tl.load(start_ptr + tl.program_id(0)), 16)
        # nothing is in the tensor where the step is skipped: a branch would wait before it asks for the rest
        size = tl.load(size_ptr + tensor) * (tl.load(scalars_ptr + 3) == 0.0)
        if is_aligned:
            size = tl.multiple_of(size, 16)
        w_ptr = typed(tl.load(addresses_ptr + tensor), weight, is_aligned)
        g_ptr = typed(tl.load(addresses_ptr + n_tensors + tensor), "fp32", is_aligned)
        m_ptr = typed(tl.load(addresses_ptr + 2 * n_tensors + tensor), m_name, is_aligned)
        v_ptr = typed(tl.load(addresses_ptr + 3 * n_tensors + tensor), v_name, is_aligned)
        k_ptr = w_ptr
        if master != "none":
            k_ptr = typed(tl.load(addresses_ptr + 4 * n_tensors + tensor), master, is_aligned)
        factor, unbias1, unbias2 = tl.load(scalars_ptr), tl.load(scalars_ptr + 1), tl.load(scalars_ptr + 2)
        m_unit, m_next, v_unit, v_next = 1.0, 1.0, 1.0, 1.0
        if has_scales:
            m_unit, m_next = tl.load(m_unit_ptr + tensor), tl.load(m_next_ptr + tensor)
            v_unit, v_next = tl.load(v_unit_ptr + tensor), tl.load(v_next_ptr + tensor)
        keep = 1.0 - decayed * tl.load(decay_ptr + tensor)
        key = tl.load(key_ptr + tensor).to(tl.uint32)
        m_largest = tl.zeros([b_n], dtype=tl.float32)
        v_largest = tl.zeros([b_n], dtype=tl.float32)
        for begin in range(0, chunk, b_n):
            at = first + begin + tl.arange(0, b_n)
            mask = at < size
            g = tl.load(g_ptr + at, mask=mask, other=0.0) * factor
            m = load(m_ptr, at, mask, m_name) * m_unit
            v = load(v_ptr, at, mask, v_name) * v_unit
            if is_root:
                v = v * v
            # m = β₁ m + (1 − β₁) g, v = β₂ v + (1 − β₂) g²
            m += gain1 * (g - m)
            v += gain2 * (g * g - v)
            # the fp32 master weight: from its two halves, or as it is
            if master == "int16":
                high = tl.load(w_ptr + at, mask=mask, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
                low = tl.load(k_ptr + at, mask=mask, other=0).to(tl.int32)
                w = ((high << 16) + low).to(tl.float32, bitcast=True)
            else:
                w = tl.load(k_ptr + at, mask=mask, other=0.0)
            w = w * keep - lr * (m * unbias1 / (tl.sqrt(v * unbias2) + eps))
            if master == "int16":
                bits = w.to(tl.int32, bitcast=True)
                low = (bits << 16) >> 16
                high = ((bits - low) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
                tl.store(w_ptr + at, high, mask=mask)
                tl.store(k_ptr + at, low.to(tl.int16), mask=mask)
            else:
                tl.store(k_ptr + at, w, mask=mask)
                if master != "none":
                    store(w_ptr, at, mask, w, weight)
            # 32 random bits an element: the lower 16 round the first moment, the upper 16 the second
            word = hashed(at.to(tl.uint32) ^ key)
            if m_name != "fp32":
                size_m = tl.abs(m) * m_next
                step, inverse = distance(size_m, m_mantissa, m_lowest)
                low_m = tl.floor(size_m * inverse) * step
                draw = (word & 0xFFFF).to(tl.float32) * 0.0000152587890625
                size_m = tl.minimum(tl.where((size_m - low_m) * inverse > draw, low_m + step, low_m), m_most)
                m = tl.where(m < 0, -size_m, size_m)
            store(m_ptr, at, mask, m, m_name)
            if has_scales:
                m_largest = tl.maximum(m_largest, tl.where(mask, tl.abs(m), 0.0))
            if v_name != "fp32":
                size_v = v
                if is_root:
                    size_v = tl.sqrt(v) * v_next
                step, inverse = distance(size_v, v_mantissa, v_lowest)
                low_v = tl.floor(size_v * inverse) * step
                part = (size_v - low_v) * inverse
                # the same part of the way between the squares: (x² − low²) / (high² − low²), high = low + step
                if is_root:
                    part = part * (size_v + low_v) / (2 * low_v + step)
                draw = (word >> 16).to(tl.float32) * 0.0000152587890625
                size_v = tl.minimum(tl.where(part > draw, low_v + step, low_v), v_most)
                if is_root:
                    size_v = tl.maximum(size_v, tl.where(v > 0, v_least, 0.0))
                v = size_v
            store(v_ptr, at, mask, v, v_name)
            if has_scales:
                v_largest = tl.maximum(v_largest, tl.where(mask, v, 0.0))
        if has_scales:
            tl.atomic_max(m_largest_ptr + tensor, tl.max(m_largest, 0))
            tl.atomic_max(v_largest_ptr + tensor, tl.max(v_largest, 0))


@dataclass(frozen=True)
class _Programs:
    """Of each program of a launch its tensor, int32, and first element, int64."""

    which: Tensor
    start: Tensor
    is_aligned: bool
    """Four elements of each of their tensors are aligned: a thread loads them at a time."""


@lru_cache(maxsize=8)
def _programs(
    sizes: tuple[int, ...], aligned: tuple[bool, ...], chunk: int, device: torch.device
) -> tuple[list[_Programs], Tensor]:
    """A launch for aligned tensors and one for others, as far as there are any; and every tensor's size, int64."""
    launches = []
    for is_aligned in (True, False):
        which = []
        start = []
        for tensor, size in enumerate(sizes):
            if aligned[tensor] is is_aligned:
                first = np.arange(0, size, chunk, dtype=np.int64)
                start.append(first)
                which.append(np.full(len(first), tensor, dtype=np.int32))
        if which:
            columns = (torch.from_numpy(np.concatenate(column)).to(device) for column in (which, start))
            launches.append(_Programs(*columns, is_aligned))
    return launches, torch.tensor(sizes, dtype=torch.int64).to(device)


def _grid(form: Format | None) -> tuple[int, int, float]:
    """Mantissa bits, lowest exponent and largest number of a format; None: fp32, for which nobody asks."""
    if form is None:
        return 0, 0, 0.0
    return form.mantissa, form.lowest, form.largest


@torch.no_grad()
def adamw_(
    weights: Sequence[Tensor],
    masters: Sequence[Tensor],
    first: Moments,
    second: Moments,
    gradients: Sequence[Tensor],
    decays: Sequence[bool],
    keys: Tensor,
    step: Step,
) -> None:
    """See reference.py; contiguous tensors that are not empty, gradients in float32, weights of one dtype.

    Of a weight in bf16 with states in 32 bits 30 bytes move: gradient, master and moments are read, the last three
    and the weight written. torch's fused kernel and a copy move 38: it writes scaled gradients back, and the copy reads
    masters again.
    """
    device = weights[0].device
    n = len(weights)
    # in the order in which the kernel reads their addresses
    columns = [weights, gradients, first.values, second.values]
    master = "none"
    if masters[0].data_ptr() != weights[0].data_ptr():
        columns.append(masters)
        master = "int16" if masters[0].dtype == torch.int16 else "fp32"
    elements = tuple(weight.numel() for weight in weights)
    # a single odd one, such as the bias of a router, is not to slow down all others
    aligned = [size % 16 == 0 for size in elements]
    addresses: list[int] = []
    assert all(elements), "a tensor is empty"
    for column in columns:
        dtype = column[0].dtype
        for number, one in enumerate(column):
            assert one.is_contiguous(), f"a tensor is not contiguous: {tuple(one.shape)} by {one.stride()}"
            assert one.dtype == dtype, f"tensors of several formats: {dtype} and {one.dtype}"
            address = one.data_ptr()
            addresses.append(address)
            aligned[number] = aligned[number] and address % 16 == 0
    assert gradients[0].dtype == torch.float32, f"gradients in {gradients[0].dtype}"
    is_cuda = device.type == "cuda"

    def sent(values: Sequence[int] | Sequence[float], dtype: torch.dtype) -> Tensor:
        # from page-locked memory, so that the host does not wait for the GPU
        return torch.tensor(values, dtype=dtype, pin_memory=is_cuda).to(device, non_blocking=True)

    # what the kernel loads as `scalars`, computed in fp64: reciprocals, so that it multiplies
    t = (step.updates + 1).to(torch.float64)
    factor = 1 / step.divide_by.to(torch.float64)
    unbias1 = 1 / (1 - step.beta1**t)
    unbias2 = 1 / (1 - step.beta2**t)
    scalars = torch.stack([factor, unbias1, unbias2, step.skip.to(torch.float64)])
    # which takes a pass over the gradients, for formats with a scale alone
    has_scales = first.has_scale or second.has_scale
    # all 1 unless there are scales, as their inverses are
    scales = units = (first.scale, second.scale)
    if has_scales:
        scales = next_scales(first, second, gradients, step)
        units = (1 / first.scale, 1 / second.scale)
    # programs of one tensor find its largest moments together
    largest = torch.zeros(2, n, dtype=torch.float32, device=device)
    launches, sizes = _programs(elements, tuple(aligned), CHUNK, device)
    table = sent(addresses, torch.int64)
    decay = sent(list(map(float, decays)), torch.float32)
    scalars = scalars.to(torch.float32)
    for programs in launches:
        adamw_kernel[(len(programs.which),)](
            table,
            programs.which,
            programs.start,
            sizes,
            decay,
            keys,
            units[0],
            scales[0],
            largest[0],
            units[1],
            scales[1],
            largest[1],
            scalars,
            n,
            step.lr,
            step.lr * step.weight_decay,
            1 - step.beta1,
            1 - step.beta2,
            step.eps,
            _NAMES[weights[0].dtype],
            master,
            _NAMES[first.values[0].dtype],
            *_grid(first.form),
            _NAMES[second.values[0].dtype],
            *_grid(second.form),
            0.0 if second.form is None else second.form.smallest,
            second.has_scale,
            has_scales,
            programs.is_aligned,
            CHUNK,
            BLOCK,
            num_warps=WARPS,
        )
    if not has_scales:
        return
    apply = step.skip == 0
    for moments, scale, top in ((first, scales[0], largest[0]), (second, scales[1], largest[1])):
        moments.scale.copy_(torch.where(apply, scale, moments.scale))
        moments.largest.copy_(torch.where(apply, top / scale, moments.largest))
