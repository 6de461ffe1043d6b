"""Whole parameters in flat buffers, each cut into equal shards between their rows.

Note "One buffer or several". A parameter may lie across many shards, and each border has to fall between two of its
rows: so a shard is a multiple of its row length, and of those of all others in the buffer. Widths of a model share most
of their factors as a rule, and what that pads is little. Widths that share none multiply: six primes of 31 to 53 would
make a shard of hundreds of billions of elements. Such parameters lie in buffers of their own, which costs a collective
each.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import lcm, prod

from torch import Tensor

# Elements: every parameter starts on a 128-byte line, in two-byte formats too.
_LINE = 64
# Of a buffer, what rounding its shards up may take: a share of its elements, or so many where it is small.
_MOST_PADDED = 1 / 16
_SMALL = 1 << 16


@dataclass(frozen=True)
class Division:
    """Where parameters lie in a flat buffer of `shards` shards of `shard` elements.

    No border between shards cuts a row of a parameter, so a rank's share of each is a range of rows, possibly none.
    What lies between parameters is padding.
    """

    shapes: Mapping[str, tuple[int, ...]]
    starts: Mapping[str, int]
    shard: int
    shards: int

    @property
    def numel(self) -> int:
        return self.shard * self.shards

    def own(self, flat: Tensor, index: int) -> Tensor:
        """The shard `index` of a buffer [numel]."""
        return flat[index * self.shard : (index + 1) * self.shard]

    def view(self, flat: Tensor, name: str) -> Tensor:
        """A whole parameter in a buffer [numel]."""
        shape = self.shapes[name]
        return flat[self.starts[name] :][: prod(shape)].view(shape)

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

    def part(self, own: Tensor, name: str, index: int) -> Tensor:
        """The rows of a parameter that lie in a shard, in its buffer [shard]."""
        shape, rows = self.shapes[name], self.rows(name, index)
        row = prod(shape[1:])
        count = rows.stop - rows.start
        first = 0
        if count:
            first = self.starts[name] + rows.start * row - index * self.shard
        return own[first : first + count * row].view(count, *shape[1:])


def together(shapes: Mapping[str, tuple[int, ...]], *, shards: int) -> list[list[str]]:
    """Consecutive parameters that one buffer of `shards` shards can hold: all of them, but where their row lengths have
    so little in common that a shard would be mostly padding."""
    if not shapes:
        return []
    elements = sum(map(prod, shapes.values()))
    if shards == 1 or _step(shapes.values()) * shards <= max(_MOST_PADDED * elements, _SMALL):
        return [list(shapes)]
    runs: list[list[str]] = []
    # of the run that is made
    step = _LINE
    elements = 0
    for name, shape in shapes.items():
        own = _step([shape])
        longer = lcm(step, own)
        more = elements + prod(shape)
        # one's row length may be a factor of the other's: together they take no more than apart
        if runs and (longer in (step, own) or longer * shards <= _MOST_PADDED * more):
            runs[-1].append(name)
            step = longer
            elements = more
        else:
            runs.append([name])
            step = own
            elements = prod(shape)
    return runs


def _step(shapes: Iterable[tuple[int, ...]]) -> int:
    """What a shard that holds such parameters is a multiple of, in elements."""
    return lcm(_LINE, *(prod(shape[1:]) for shape in shapes))


def divide(shapes: Mapping[str, tuple[int, ...]], *, shards: int) -> Division:
    """Places parameters one after the other, in their order. For those that lie `together`.

    A shard is a multiple of all row lengths; so a parameter that starts at a multiple of its row length is cut between
    rows wherever borders fall into it.
    """
    step = _step(shapes.values()) if shards > 1 else _LINE
    needed = sum(prod(shape) for shape in shapes.values())
    shard = _up(-(-needed // shards), step)
    # padding between parameters may take more than is left: a larger shard has room for it
    while True:
        starts: dict[str, int] = {}
        end = 0
        for name, shape in shapes.items():
            start = _up(end, _LINE)
            last = start + prod(shape) - 1
            is_cut = shards > 1 and start // shard != last // shard
            if is_cut:
                start = _up(start, _step([shape]))
            starts[name] = start
            end = start + prod(shape)
        if end <= shards * shard:
            return Division(dict(shapes), starts, shard, shards)
        shard += step


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
