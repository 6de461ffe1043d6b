"""What a precision may be set to."""

import pytest
import torch
from pydantic import ValidationError

from megaspec.precision.spec import Fp8Precision
from megaspec_kernels.fp8_cast.formats import LARGEST, scale_of

MOST = 13


@pytest.mark.parametrize(("name", "most"), [("margin", MOST), ("amax_history", 65536)])
def test_what_is_too_much_of_delayed_scales_is_refused(name: str, most: int) -> None:
    assert getattr(Fp8Precision(kind="fp8", recipe="delayed", **{name: most}), name) == most
    with pytest.raises(ValidationError, match=f"less than or equal to {most}"):
        Fp8Precision(kind="fp8", recipe="delayed", **{name: most + 1})


def test_with_the_most_margin_the_largest_element_is_a_normal_number() -> None:
    """With one more there are largest elements that are none, and lose bits."""
    dtype = torch.float8_e4m3fn
    smallest_normal = torch.finfo(dtype).smallest_normal
    # the largest element of a scale, and one of the least
    for amax, margin, is_normal in ((448.0, MOST, True), (224.1, MOST, True), (224.1, MOST + 1, False)):
        scaled = amax / scale_of(torch.tensor(amax), dtype, margin=margin)
        assert scaled <= LARGEST[dtype]
        assert bool(scaled >= smallest_normal) == is_normal
