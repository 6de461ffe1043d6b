"""Random numbers as a function of a key and a counter, so that every layout draws the same ones.

Counter-based generation after Salmon et al. 2011 ("Parallel random numbers: as easy as 1, 2, 3"), with the 64-bit
mixer of SplitMix (Steele et al. 2014).
"""

import hashlib
import math

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
# Numbers that are drawn at a time.
_INIT_CHUNK = 1 << 24


def _signed(value: int) -> int:
    """The int64 of the same 64 bits, since tensors have no unsigned one."""
    value &= (1 << 64) - 1
    if value >> 63:
        return value - (1 << 64)
    return value


def _shift_right(x: Tensor, n: int) -> Tensor:
    """As of unsigned numbers: zeros come in from the left."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def mix(x: Tensor) -> Tensor:
    """int64 -> int64, a bijection whose output bits all depend on all input bits."""
    x = x * 1 + _signed(_GOLDEN)
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX2)
    return x ^ _shift_right(x, 31)


def key_of(seed: int, name: str) -> int:
    """A 63-bit key from a seed and a name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def normal(key: int, index: Tensor) -> Tensor:
    """float64 standard normals, one for each int64 counter (Box and Muller 1958)."""
    first = mix(index + key)
    second = mix(first ^ _signed(_GOLDEN))
    # 53 bits each, all that a float64 holds; u1 is in (0, 1], since 0 has no logarithm, u2 in [0, 1)
    u1 = (_shift_right(first, 11).to(torch.float64) + 1.0) * 2.0**-53
    u2 = _shift_right(second, 11).to(torch.float64) * 2.0**-53
    return torch.sqrt(-2.0 * torch.log(u1)) * torch.cos(2.0 * math.pi * u2)


def fill_normal_(out: Tensor, *, key: int, start: tuple[int, ...], shape: tuple[int, ...], std: float) -> None:
    """Fills `out`, the rectangle of a global tensor of `shape` that begins at `start`, with N(0, std²)."""
    device = out.device
    # of the global tensor, in row-major order: an element's counter is its place there, whoever holds it
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # some rows at a time, since counters and float64 take many times the memory of the weights
    n_rows = max(1, _INIT_CHUNK // max(1, math.prod(out.shape[1:])))
    for row in range(0, out.shape[0], n_rows):
        part = out[row : row + n_rows]
        part_start = (start[0] + row, *start[1:])
        index = torch.zeros((), dtype=torch.int64, device=device)
        for dim, stride in enumerate(strides):
            along = torch.arange(part_start[dim], part_start[dim] + part.shape[dim], device=device) * stride
            # lies along its own dimension, and is the same along the others
            view = [1] * part.dim()
            view[dim] = -1
            index = index + along.view(view)
        part.copy_(normal(key, index) * std)


def site_key(name: str) -> Tensor:
    """int64 scalar: a key from a name, as a tensor, so that compiled code serves every name."""
    return torch.tensor(key_of(0, name), dtype=torch.int64)


def _state(key: Tensor, counters: tuple[Tensor, ...]) -> Tensor:
    state = key
    for counter in counters:
        # xor first: a sum of an arange and a 64-bit constant is beyond what torch 2.11 compiles for a GPU
        state = mix(state ^ counter)
    return state


def keep_mask(key: Tensor, counters: tuple[Tensor, ...], probability: float) -> Tensor:
    """bool, the broadcast shape of the int64 counters: True with `probability`, from key and counters alone."""
    return _shift_right(_state(key, counters), 32) < int(probability * 2**32)


def uniform(key: Tensor, counters: tuple[Tensor, ...], *, dtype: torch.dtype) -> Tensor:
    """Multiples of 2⁻²⁴ in [0, 1), equally likely, in the broadcast shape of the int64 counters; fp32 holds them."""
    return _shift_right(_state(key, counters), 40).to(dtype) * 2.0**-24


def uniform_53(key: int, counter: int) -> float:
    """A multiple of 2⁻⁵³ in [0, 1), from key and counter alone."""
    bits = _shift_right(mix(torch.tensor(counter + key, dtype=torch.int64)), 11)
    return int(bits) * 2.0**-53
