"""Rotary frequencies and the ways to stretch them, in fp64.

Rules and constants are those of the papers that spec.py names, as Hugging Face's transformers computes them.
"""

# R features of a head that turn, in R / 2 pairs

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megaspec.nn.rope.spec import (
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    NoRopeScaling,
    ProportionalRopeScaling,
    RotarySpec,
    YarnRopeScaling,
)


def inverse_frequencies(spec: RotarySpec, d_rotary: int, *, length: int = 0) -> Tensor:
    """float64 [R / 2]: radians per token of each pair of features. `length`: tokens of the whole sequence."""
    scale = _SCALINGS[type(spec.scaling)]
    return scale(spec.scaling, d_rotary, spec.base, length)


def _plain(d_rotary: int, base: float) -> Tensor:
    """base^(-2i / R)"""
    return 1.0 / base ** (torch.arange(0, d_rotary, 2, dtype=torch.float64) / d_rotary)


def _unscaled(scaling: NoRopeScaling, d_rotary: int, base: float, length: int) -> Tensor:
    return _plain(d_rotary, base)


def _linear(scaling: LinearRopeScaling, d_rotary: int, base: float, length: int) -> Tensor:
    return _plain(d_rotary, base) / scaling.factor


def _dynamic(scaling: DynamicRopeScaling, d_rotary: int, base: float, length: int) -> Tensor:
    # how much longer than the original the sequence is
    longer = max(length, scaling.original_max_seq_len) / scaling.original_max_seq_len
    grown = base * (scaling.factor * longer - (scaling.factor - 1)) ** (d_rotary / (d_rotary - 2))
    return _plain(d_rotary, grown)


def _llama3(scaling: Llama3RopeScaling, d_rotary: int, base: float, length: int) -> Tensor:
    inv = _plain(d_rotary, base)
    # tokens of a whole turn; those longer than `low` slow down by the factor, those shorter than `high` stay
    wavelength = 2 * math.pi / inv
    low = scaling.original_max_seq_len / scaling.low_freq_factor
    high = scaling.original_max_seq_len / scaling.high_freq_factor
    # between both, from one to the other, linear in the frequency; no wavelength is where both are the same
    smooth = (scaling.original_max_seq_len / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * inv / scaling.factor + smooth * inv
    scaled = torch.where(wavelength < high, inv, between)
    return torch.where(wavelength > low, inv / scaling.factor, scaled)


def _yarn(scaling: YarnRopeScaling, d_rotary: int, base: float, length: int) -> Tensor:
    inv = _plain(d_rotary, base)
    low = _turning(scaling.beta_fast, scaling, d_rotary, base)
    high = _turning(scaling.beta_slow, scaling, d_rotary, base)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, d_rotary - 1)
    if low == high:
        # no ramp, but a step
        high += 0.001
    ramp = ((torch.arange(d_rotary // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return inv * (1 - ramp) + inv / scaling.factor * ramp


def _turning(turns: float, scaling: YarnRopeScaling, d_rotary: int, base: float) -> float:
    """The number of the frequency that turns so often in the original length, between whole ones."""
    return d_rotary * math.log(scaling.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(base))


def _longrope(scaling: LongRopeScaling, d_rotary: int, base: float, length: int) -> Tensor:
    is_long = length > scaling.original_max_seq_len
    factors = scaling.long_factor if is_long else scaling.short_factor
    return _plain(d_rotary, base) / torch.tensor(factors, dtype=torch.float64)


def _proportional(scaling: ProportionalRopeScaling, d_rotary: int, base: float, length: int) -> Tensor:
    inv = _plain(d_rotary, base) / scaling.factor
    inv[int(scaling.fraction * d_rotary // 2) :] = 0.0
    return inv


_SCALINGS: dict[type, Callable[[Any, int, float, int], Tensor]] = {
    NoRopeScaling: _unscaled,
    LinearRopeScaling: _linear,
    DynamicRopeScaling: _dynamic,
    Llama3RopeScaling: _llama3,
    YarnRopeScaling: _yarn,
    LongRopeScaling: _longrope,
    ProportionalRopeScaling: _proportional,
}
