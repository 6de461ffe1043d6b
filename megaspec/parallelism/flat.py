"""Whole parameters in one flat buffer, cut into equal shards between their rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm, prod

from torch import Tensor

# Elements: every parameter starts on a 128-byte line, in two-byte formats too.
_LINE = 64


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
        shape, start = self.shapes[name], self.starts[name]
        row, first = prod(shape[1:]), index * self.shard
        begin, end = (min(max(at - start, 0), prod(shape)) for at in (first, first + self.shard))
        assert begin % row == 0, f"{name}: shard {index} begins inside a row of {row}, at {begin}"
        assert end % row == 0, f"{name}: shard {index} ends inside a row of {row}, at {end}"
        return slice(begin // row, max(begin, end) // row)

    def part(self, own: Tensor, name: str, index: int) -> Tensor:
        """The rows of a parameter that lie in a shard, in its buffer [shard]."""
        shape, rows = self.shapes[name], self.rows(name, index)
        row, count = prod(shape[1:]), rows.stop - rows.start
        first = self.starts[name] + rows.start * row - index * self.shard if count else 0
        return own[first : first + count * row].view(count, *shape[1:])


def divide(shapes: Mapping[str, tuple[int, ...]], *, shards: int) -> Division:
    """Places parameters one after the other, in their order.

    A shard is a multiple of all row lengths; so a parameter that starts at a multiple of its row length is cut between
    rows wherever borders fall into it.
    """
    rows = {name: prod(shape[1:]) for name, shape in shapes.items()}
    step = lcm(_LINE, *rows.values()) if shards > 1 else _LINE
    shard = _up(-(-sum(prod(shape) for shape in shapes.values()) // shards), step)
    while True:
        starts, end = {}, 0
        for name, shape in shapes.items():
            start, numel = _up(end, _LINE), prod(shape)
            if shards > 1 and start // shard != (start + numel - 1) // shard:
                start = _up(start, lcm(_LINE, rows[name]))
            starts[name], end = start, start + numel
        if end <= shards * shard:
            return Division(dict(shapes), starts, shard, shards)
        shard += step


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
