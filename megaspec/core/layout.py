"""Where a local tensor lies in its global one. Plain data that tensor parallelism writes and that initialisation,
gradient norms, checkpoints and exports read."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Piece:
    """A rectangle that a local tensor and its global tensor share.

    `replica` counts this rank's copy among the `copies` that ranks of the world hold of the same rectangle. Norms count
    copy 0, checkpoints are written by one of them.
    """

    global_start: tuple[int, ...]
    local_start: tuple[int, ...]
    shape: tuple[int, ...]
    replica: int = 0
    copies: int = 1

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """Of the local tensor: the elements of this piece."""
        return _slices(self.local_start, self.shape)

    @property
    def global_slices(self) -> tuple[slice, ...]:
        """Of the global tensor: the same elements."""
        return _slices(self.global_start, self.shape)


def _slices(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Of a rectangle: one slice for each dim."""
    return tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))


@dataclass(frozen=True)
class Layout:
    """A parameter's global name and shape, and the rectangles of it that this rank holds.

    Elements of the local tensor that no piece covers are padding: they are zero and stay zero.
    """

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def layouts_as_json(layouts: Iterable[Layout]) -> bytes:
    """For other ranks: see layouts_of_json."""
    described = []
    for layout in layouts:
        # the objects' own fields: asdict copies each number, which takes longer than all else here
        pieces = [vars(piece) for piece in layout.pieces]
        described.append(vars(layout) | {"pieces": pieces})
    return json.dumps(described).encode()


def layouts_of_json(text: bytes) -> list[Layout]:
    """What `layouts_as_json` was given."""
    layouts = []
    for fields in json.loads(text):
        pieces = tuple(Piece(**_with_tuples(piece)) for piece in fields["pieces"])
        layouts.append(Layout(**_with_tuples(fields) | {"pieces": pieces}))
    return layouts


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """A class's fields with its tuples, which JSON writes as lists."""
    with_tuples = {}
    for name, value in fields.items():
        if isinstance(value, list):
            value = tuple(value)
        with_tuples[name] = value
    return with_tuples


def whole(name: str, shape: tuple[int, ...], *, replica: int = 0, copies: int = 1) -> Layout:
    """The layout of a tensor that is not split; `replica` is this rank's number among the `copies` that hold it."""
    zero = (0,) * len(shape)
    return Layout(name, shape, shape, (Piece(zero, zero, shape, replica, copies),))


def replicated(layout: Layout, *, index: int, count: int) -> Layout:
    """The layout on one of `count` ranks that hold the same; `index` is its number among them."""
    pieces = []
    for piece in layout.pieces:
        # each copy there was becomes `count` copies, numbered one after another
        pieces.append(replace(piece, replica=piece.replica * count + index, copies=piece.copies * count))
    return replace(layout, pieces=tuple(pieces))


def rows(layout: Layout, first: int, last: int) -> Layout:
    """The layout of the rows [first, last) of a local tensor."""
    pieces = []
    for piece in layout.pieces:
        # the local rows [begin, end) that the piece and the range share
        begin = max(piece.local_start[0], first)
        end = min(piece.local_start[0] + piece.shape[0], last)
        if begin >= end:
            continue
        skipped = begin - piece.local_start[0]
        shared = replace(
            piece,
            global_start=(piece.global_start[0] + skipped, *piece.global_start[1:]),
            local_start=(begin - first, *piece.local_start[1:]),
            shape=(end - begin, *piece.shape[1:]),
        )
        pieces.append(shared)
    n_rows = max(0, last - first)
    return Layout(layout.name, layout.shape, (n_rows, *layout.local_shape[1:]), tuple(pieces))
