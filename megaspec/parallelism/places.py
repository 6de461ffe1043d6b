"""Where whole parameters lie in flat buffers that are cut into equal shards between their rows. Torch-free: the plan
counts the same padding that ranks hold.

Note "One buffer or several". A parameter may lie across many shards, and each border has to fall between two of its
rows: so a shard is a multiple of its row length, and of those of all others in the buffer. Widths of a model share most
of their factors as a rule, and what that pads is little. Widths that share none multiply: six primes of 31 to 53 would
make a shard of hundreds of billions of elements. Such parameters lie in buffers of their own, which costs a collective
each.

Note "Lines". A shard is a multiple of 64 elements as well, so that it ends on a line of 128 bytes whatever its format.
Beside an odd row length that is up to 64 times as much padding: where it would be more than the buffer may take, a
shard ends on 8 elements, or between any two. So no buffer takes much more than whole rows in equal shards need:
less than a row for each shard.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import lcm, prod
from typing import NamedTuple

from megaspec.core.divisors import ceil_div

Shape = tuple[int, ...]
# Elements: every parameter starts on a 128-byte line, in two-byte formats too.
_LINE = 64
# What a shard ends on, the first that takes little.
_LINES = (_LINE, 8, 1)
# Of a buffer, what rounding its shards up may take: a share of its elements, or so many where it is small.
_MOST_PADDED = 1 / 16
_SMALL = 1 << 16


@dataclass(frozen=True)
class Places:
    """Where parameters lie in a flat buffer of `shards` shards of `shard` elements.

    No border between shards cuts a row of a parameter, so a rank's share of each is a range of rows, possibly none.
    What lies between parameters is padding.
    """

    shapes: Mapping[str, Shape]
    starts: Mapping[str, int]
    shard: int
    shards: int

    @property
    def numel(self) -> int:
        """Of the buffer, padding included."""
        return self.shard * self.shards

    @property
    def elements(self) -> int:
        """Of its parameters."""
        return sum(map(prod, self.shapes.values()))

    @cached_property
    def held(self) -> tuple[int, ...]:
        """Elements of parameters in each shard, padding left out."""
        found = [0] * self.shards
        for name, shape in self.shapes.items():
            begin = self.starts[name]
            end = begin + prod(shape)
            for index in range(begin // self.shard, ceil_div(end, self.shard)):
                found[index] += min(end, (index + 1) * self.shard) - max(begin, index * self.shard)
        return tuple(found)

    def rows(self, name: str, index: int) -> slice:
        """The rows of a parameter that lie in a shard."""
        shape = self.shapes[name]
        # elements of one row
        row = prod(shape[1:])
        # the borders of the shard, as elements of the parameter
        first = index * self.shard - self.starts[name]
        begin = min(max(first, 0), prod(shape))
        end = min(max(first + self.shard, 0), prod(shape))
        assert begin % row == 0, f"{name}: shard {index} begins inside a row of {row}, at {begin}"
        assert end % row == 0, f"{name}: shard {index} ends inside a row of {row}, at {end}"
        return slice(begin // row, max(begin, end) // row)


def together(shapes: Mapping[str, Shape], *, shards: int) -> list[list[str]]:
    """Consecutive parameters that one buffer of `shards` shards can hold: all of them, but where their row lengths have
    so little in common that a shard would be mostly padding."""
    if not shapes:
        return []
    if shards == 1 or lcm(_LINE, _rows(shapes.values())) * shards <= _allowed(shapes.values()):
        return [list(shapes)]
    runs: list[list[str]] = []
    # of the run that is made
    rows = 1
    elements = 0
    for name, shape in shapes.items():
        own = _rows([shape])
        longer = lcm(rows, own)
        more = elements + prod(shape)
        # one's row length may be a factor of the other's: together they take no more than apart
        if runs and (longer in (rows, own) or longer * shards <= _MOST_PADDED * more):
            runs[-1].append(name)
            rows = longer
            elements = more
        else:
            runs.append([name])
            rows = own
            elements = prod(shape)
    return runs


def _rows(shapes: Iterable[Shape]) -> int:
    """The least common multiple of their row lengths."""
    return lcm(*(prod(shape[1:]) for shape in shapes))


def _allowed(shapes: Iterable[Shape]) -> float:
    """Elements that rounding shards up may take."""
    return max(_MOST_PADDED * sum(map(prod, shapes)), _SMALL)


def places_of(shapes: Mapping[str, Shape], *, shards: int) -> Places:
    """Places parameters one after the other, in their order. For those that lie `together`.

    A shard is a multiple of all row lengths; so a parameter that starts at a multiple of its row length is cut between
    rows wherever borders fall into it.
    """
    found = _placed(tuple(shapes.values()), shards)
    return Places(dict(shapes), dict(zip(shapes, found.starts, strict=True)), found.shard, shards)


class _Placed(NamedTuple):
    starts: tuple[int, ...]
    shard: int


@lru_cache(maxsize=4096)
def _placed(shapes: tuple[Shape, ...], shards: int) -> _Placed:
    line = _line(shapes, shards)
    step = line
    if shards > 1:
        step = lcm(line, _rows(shapes))
    needed = sum(map(prod, shapes))
    shard = _up(ceil_div(needed, shards), step)
    # padding between parameters may take more than is left: a larger shard has room for it
    while True:
        starts = []
        end = 0
        for shape in shapes:
            start = _up(end, _LINE)
            last = start + prod(shape) - 1
            is_cut = shards > 1 and start // shard != last // shard
            if is_cut:
                start = _up(start, lcm(line, _rows([shape])))
            starts.append(start)
            end = start + prod(shape)
        if end <= shards * shard:
            return _Placed(tuple(starts), shard)
        shard += step


def _line(shapes: tuple[Shape, ...], shards: int) -> int:
    """What shards end on: see note "Lines"."""
    if shards == 1:
        return _LINE
    rows = _rows(shapes)
    allowed = _allowed(shapes)
    for line in _LINES:
        # lengths that are multiples of a line leave nothing to be won by a shorter one
        if lcm(line, rows) * shards <= allowed or lcm(line, rows) == rows:
            return line
    return _LINES[-1]


def _up(n: int, multiple: int) -> int:
    return ceil_div(n, multiple) * multiple
