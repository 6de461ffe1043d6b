"""Where the numbers of a tensor of ours lie in tensors of Hugging Face's, one statement for both directions.

Note "One form for all transforms". A tensor of ours is cut by its rows into blocks, and each block is a set of rows, or
of columns, of one of their tensors:

    same, part i of n      rows from `first` on
    stacked rows           several blocks, of several tensors
    transposed             rows of ours are columns of theirs
    fused experts          `expert`, the index in their leading dimension
    interleaved by n       groups of one row, n apart
    a split of each head   groups of a head's rows, further apart than they are long
    rotary pairs           a permutation inside of each group (`within`)

All of it says for each row of ours which row it is of theirs, and no two rows say the same one. So it is a bijection if
the blocks leave out no row of either side, which `check` counts. Reading it one way imports, the other way exports, and
neither needs more of a tensor than the rows that are asked for.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from megaspec.core.errors import RecipeError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Block:
    """`rows` consecutive rows of a tensor of ours, as they lie in the tensor `name` of theirs.

    Row r is their row first + (r // group) · stride + within[r % group].
    """

    name: str
    rows: int
    first: int = 0
    group: int = 0
    """Rows that belong together, such as those of a head; 0: all of them."""
    stride: int = 0
    """From one group to the next, in their rows; 0: a group follows upon the other."""
    within: tuple[int, ...] | None = None
    """Their place in the group of each row; None: the same order."""
    expert: int | None = None
    """Index in their leading dimension; None: theirs has none beside rows and columns."""
    transposed: bool = False
    """Their columns are rows of ours."""

    @property
    def is_consecutive(self) -> bool:
        """Whether its rows are consecutive rows of theirs, in the same order."""
        group = self.group or self.rows
        return self.within is None and (group == self.rows or self.stride in (0, group))

    def their_rows(self, start: int, stop: int) -> "NDArray[np.int64]":
        """Of rows start..stop of the block: int64 [stop - start]."""
        import numpy as np  # only where rows are counted: every command knows of this file

        rows = np.arange(start, stop, dtype=np.int64)
        if self.is_consecutive:
            return self.first + rows
        group = self.group or self.rows
        stride = self.stride or group
        places = rows % group
        if self.within is not None:
            places = np.asarray(self.within, dtype=np.int64)[places]
        return self.first + rows // group * stride + places


@dataclass(frozen=True)
class TensorMap:
    """One tensor of ours and the blocks that it is made of, one below the other."""

    name: str
    """Global name: `layers.0.attn.wqkv.weight`."""
    shape: tuple[int, ...]
    """Rows, or rows and columns."""
    blocks: tuple[Block, ...]

    def parts(self, start: int, stop: int) -> Iterator[tuple[Block, int, int, int]]:
        """What rows start..stop meet: the block, from which of its rows to which, and where these begin in ours."""
        begin = 0
        for block in self.blocks:
            end = begin + block.rows
            low = max(start, begin)
            high = min(stop, end)
            if low < high:
                yield block, low - begin, high - begin, low
            begin = end


@dataclass(frozen=True)
class TheirTensor:
    """A tensor of theirs, and what of ours lies in it."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[TensorMap, int, Block], ...]
    """Of each block: the tensor of ours that it is of, and which row of it the block begins with."""


def their_tensors(maps: Mapping[str, TensorMap], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TheirTensor]:
    """The same map seen from their side. `shapes`: of every tensor of theirs.

    RecipeError: the map is no bijection, which is a mistake of the family that made it.
    """
    pieces: dict[str, list[tuple[TensorMap, int, Block]]] = {name: [] for name in shapes}
    for ours in maps.values():
        begin = 0
        for block in ours.blocks:
            _demand(block.name in shapes, f"{ours.name} is made of {block.name}, which has no shape")
            pieces[block.name].append((ours, begin, block))
            begin += block.rows
        _demand(begin == ours.shape[0], f"{ours.name}: blocks of {begin} rows for {ours.shape[0]}")
    found = {}
    for name, shape in shapes.items():
        _check_coverage(name, shape, pieces[name])
        found[name] = TheirTensor(name, shape, tuple(pieces[name]))
    return found


def _check_coverage(name: str, shape: tuple[int, ...], pieces: list[tuple[TensorMap, int, Block]]) -> None:
    """Every row, or column, of a tensor of theirs is in one block."""
    import numpy as np

    counts: dict[int | None, NDArray[np.int64]] = {}
    for ours, _, block in pieces:
        matrix = shape if block.expert is None else shape[1:]
        columns = matrix[:0] if len(matrix) == 1 else matrix[1:]
        size = matrix[0]
        if block.transposed:
            size = matrix[1]
            columns = matrix[:1]
        is_as_wide = prod(columns) == prod(ours.shape[1:])
        _demand(is_as_wide, f"{name} {shape} can't hold rows of {ours.name} {ours.shape}")
        rows = block.their_rows(0, block.rows)
        low = int(rows.min())
        high = int(rows.max())
        _demand(0 <= low <= high < size, f"{ours.name}: rows {low} to {high} of {name} {shape}")
        held = counts.setdefault(block.expert, np.zeros(size, dtype=np.int64))
        np.add.at(held, rows, 1)
    expected = {None} if None in counts else set(range(shape[0]))
    left_out = sorted(expected - set(counts))
    _demand(set(counts) == expected, f"{name} {shape}: experts {left_out} are of no tensor of ours")
    for expert, held in counts.items():
        text = f"{name} {shape}, expert {expert}: some rows are of no tensor of ours, or of several"
        _demand(bool((held == 1).all()), text)


def _demand(is_so: bool, text: str) -> None:
    """RecipeError: a family's names are no map. A family may be a user's own."""
    if not is_so:
        raise RecipeError(f"the names of the family say nothing that can be read and written: {text}")


def pairs_to_halves(d_head: int, d_rotary: int, *, first: int = 0) -> tuple[int, ...]:
    """`within` for a head whose rotary features are stored as pairs (2i, 2i + 1), where ours turns (i, i + r/2).

    The `d_rotary` rotary features begin at `first` of `d_head`; the others stay.
    """
    places = list(range(d_head))
    half = d_rotary // 2
    for i in range(half):
        places[first + i] = first + 2 * i
        places[first + half + i] = first + 2 * i + 1
    return tuple(places)
