"""Sizes of blocks of Triton kernels.

Triton's own cdiv and next_power_of_2 serve kernels as well, and take 2 to 5 us of the host at each call, of which a
step of a few layers makes hundreds. In place of its cdiv the host takes ceil_div of core/divisors.py.
"""


def next_power_of_2(size: int) -> int:
    """The least one that is not below a size, from 1 on."""
    return 1 << (size - 1).bit_length()
