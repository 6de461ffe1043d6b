"""What grids of Triton kernels are made of. Triton's own functions of these names serve kernels as well, and take 2 to
5 us of the host at each call: a step of a few layers calls them hundreds of times."""


def cdiv(size: int, block: int) -> int:
    """How many blocks cover a size."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """The least one that is not below a size, from 1 on."""
    return 1 << (size - 1).bit_length()
