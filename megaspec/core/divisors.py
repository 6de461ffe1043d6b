"""Arithmetic on divisors and multiples, for what has to divide what."""

from collections.abc import Sequence
from math import isqrt


def divisors(n: int) -> list[int]:
    """Of n, ascending; of a number past 10^10, those that are at most 10^5 or n by such a one."""
    found = set()
    # divisors come in pairs d · (n / d), one of which is at most the root
    for d in range(1, min(isqrt(n), 10**5) + 1):
        if n % d == 0:
            found.add(d)
            found.add(n // d)
    return sorted(found)


def ceil_div(value: int, of: int) -> int:
    """How many of a size it takes for a value."""
    return -(-value // of)


def nearest(value: int, legal: Sequence[int], *, most: int = 6) -> list[int]:
    """The `most` legal values that are closest to a value, ascending."""
    return sorted(sorted(legal, key=lambda one: abs(one - value))[:most])


def widths(value: int, of: int) -> list[int]:
    """The nearest multiples of a number, and after them those that fp8 products take, too: 16 and 32 of them."""
    found: list[int] = []
    for unit in (1, 16, 32):
        found += nearest(value, multiples(value, unit * of), most=2)
    return found


def multiples(value: int, of: int) -> list[int]:
    """The multiples of a number around a value, up to eight on each side, ascending."""
    below = value // of * of
    return [m for m in range(below - 7 * of, below + 9 * of, of) if m > 0]
