"""Whole parameters in flat buffers, each cut into equal shards between their rows: see places.py."""

from collections.abc import Mapping
from math import prod

from torch import Tensor

from megaspec.parallelism.places import Places, places_of


class Division(Places):
    """Places in a buffer of numbers."""

    def own(self, flat: Tensor, index: int) -> Tensor:
        """The shard `index` of a buffer [numel]."""
        return flat[index * self.shard : (index + 1) * self.shard]

    def view(self, flat: Tensor, name: str) -> Tensor:
        """A whole parameter in a buffer [numel]."""
        shape = self.shapes[name]
        return flat[self.starts[name] :][: prod(shape)].view(shape)

    def part(self, own: Tensor, name: str, index: int) -> Tensor:
        """The rows of a parameter that lie in a shard, in its buffer [shard]."""
        shape, rows = self.shapes[name], self.rows(name, index)
        row = prod(shape[1:])
        count = rows.stop - rows.start
        first = 0
        if count:
            first = self.starts[name] + rows.start * row - index * self.shard
        return own[first : first + count * row].view(count, *shape[1:])


def divide(shapes: Mapping[str, tuple[int, ...]], *, shards: int) -> Division:
    """A buffer for parameters that lie `together`."""
    return of_places(places_of(shapes, shards=shards))


def of_places(places: Places) -> Division:
    """A buffer of numbers in which they lie so."""
    return Division(places.shapes, places.starts, places.shard, places.shards)
