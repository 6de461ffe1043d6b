"""Narrow number formats of what an optimizer keeps: grids, scales, rounding.

Note on rounding. A moment changes by a few per cent a step or less; where that is under half of the grid's distance,
rounding to nearest never lets it change. So the neighbour is drawn: up with the probability that makes the expected
value right. The draw is a hash of the element's place and the step, without a generator. Formats of little range have
a scale for each tensor, a power of two, so that values that lie on one grid lie on any finer one; they hold the root of
the second moment, with half the range, whose square is what has the right expected value.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Where no element is above this, the scale does not follow: its own range ends.
_SMALLEST_BOUND = 2.0**-100
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Format:
    """A grid of numbers ±m · 2^e."""

    name: str
    dtype: torch.dtype
    mantissa: int
    """Bits behind the point."""
    lowest: int
    """The exponent below which the grid gets no finer."""
    largest: float
    has_scale: bool

    @property
    def smallest(self) -> float:
        """The least number above zero."""
        return 2.0 ** (self.lowest - self.mantissa)


FORMATS = {
    # fp32's range; the last few octaves are left out, so that a distance is a normal number, too
    "bf16": Format("bf16", torch.bfloat16, 7, -119, 3.3e38, has_scale=False),
    "fp16": Format("fp16", torch.float16, 10, -14, 65504.0, has_scale=True),
    "fp8": Format("fp8", torch.float8_e4m3fn, 3, -6, 448.0, has_scale=True),
}


def hashed(x: Tensor) -> Tensor:
    """int64 of 32 bits -> int64 of 32 bits, all of which depend on all (Wellons 2018, `lowbias32`)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def draws(key: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Two float32 in [0, 1) for each element, from a scalar key of 32 bits and the element's place."""
    place = torch.arange(shape.numel(), device=key.device).view(shape) & _WORD
    word = hashed(place ^ key)
    return (word & 0xFFFF).to(torch.float32) / 65536, (word >> 16).to(torch.float32) / 65536


def scale_for(bound: Tensor, form: Format | None) -> Tensor:
    """The largest power of two that brings `bound` to at most the format's largest number; 1 where there is none."""
    if form is None or not form.has_scale:
        return torch.ones_like(bound)
    ratio = form.largest / bound.clamp(min=_SMALLEST_BOUND)
    # ratio = mantissa · 2^e with a mantissa in [1/2, 1): the power of two below it is 2^(e - 1)
    mantissa, _ = torch.frexp(ratio)
    return ratio / mantissa / 2


def distance(x: Tensor, form: Format) -> Tensor:
    """Between neighbours on the grid at x >= 0, exactly."""
    # base = mantissa · 2^e with a mantissa in [1/2, 1), so that base / mantissa is 2^e, without rounding
    base = x.clamp(min=2.0**form.lowest)
    mantissa, _ = torch.frexp(base)
    return base / mantissa * 2.0 ** -(form.mantissa + 1)


def encoded(x: Tensor, form: Format | None, scale: Tensor, draw: Tensor | None) -> Tensor:
    """A first moment in its format. `draw` in [0, 1) chooses the neighbour, None: the nearest."""
    if form is None:
        return x
    scaled = x.abs() * scale
    step = distance(scaled, form)
    low = torch.floor(scaled / step) * step
    threshold = 0.5 if draw is None else draw
    goes_up = (scaled - low) / step > threshold
    return (torch.where(goes_up, low + step, low).clamp(max=form.largest) * x.sign()).to(form.dtype)


def decoded(stored: Tensor, scale: Tensor, wide: torch.dtype) -> Tensor:
    """The first moment that is meant."""
    return stored.to(wide) / scale.to(wide)


def encoded_square(x: Tensor, form: Format | None, scale: Tensor, draw: Tensor | None) -> Tensor:
    """A second moment in its format: where that has a scale the root, never 0 for what is above 0."""
    if form is None or not form.has_scale:
        return encoded(x, form, scale, draw)
    root = x.sqrt() * scale
    step = distance(root, form)
    low = torch.floor(root / step) * step
    high = low + step
    goes_up = root - low > step / 2
    if draw is not None:
        # by the squares, which are what has the right expected value
        goes_up = (root**2 - low**2) / (high**2 - low**2) > draw
    on_grid = torch.where(goes_up, high, low).clamp(max=form.largest)
    return torch.where(x > 0, on_grid.clamp(min=form.smallest), 0).to(form.dtype)


def decoded_square(stored: Tensor, form: Format | None, scale: Tensor, wide: torch.dtype) -> Tensor:
    """The second moment that is meant."""
    value = decoded(stored, scale, wide)
    if form is None or not form.has_scale:
        return value
    return value.square()


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """float32 -> the nearest bf16, and what it lacks as int16: together they are `master`, bit for bit."""
    bits = master.view(torch.int32)
    # the lower half with its sign: what rounding the upper half to nearest leaves over
    low = bits << 16 >> 16
    high = (bits - low) >> 16
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def joined(weight: Tensor, low: Tensor) -> Tensor:
    """The float32 that `split` took apart."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)
