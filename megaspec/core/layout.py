"""Where a local tensor lies in its global one. Plain data that tensor parallelism writes and that initialisation,
gradient norms, checkpoints and exports read."""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Piece:
    """A rectangle that a local tensor and its global tensor share.

    `replica` counts this rank's copy among the copies that model-parallel ranks hold of the same rectangle: copy 0 is
    the one that norms count and checkpoints write.
    """

    global_start: tuple[int, ...]
    local_start: tuple[int, ...]
    shape: tuple[int, ...]
    replica: int = 0

    @property
    def local_slices(self) -> tuple[slice, ...]:
        return tuple(slice(s, s + n) for s, n in zip(self.local_start, self.shape, strict=True))

    @property
    def global_slices(self) -> tuple[slice, ...]:
        return tuple(slice(s, s + n) for s, n in zip(self.global_start, self.shape, strict=True))


@dataclass(frozen=True)
class Layout:
    """A parameter's global name and shape, and the rectangles of it that this rank holds.

    Elements of the local tensor that no piece covers are padding: they are zero and stay zero.
    """

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_whole(self) -> bool:
        """True when this rank holds the global tensor as it is, with nothing shared or padded."""
        return len(self.pieces) == 1 and self.pieces[0].shape == self.shape == self.local_shape

    @property
    def is_primary(self) -> bool:
        """True when every element of the local tensor is counted on this rank and none is padding."""
        return all(p.replica == 0 for p in self.pieces) and sum(prod(p.shape) for p in self.pieces) == prod(
            self.local_shape
        )


def whole(name: str, shape: tuple[int, ...], *, replica: int = 0) -> Layout:
    """The layout of a tensor that is not split; `replica` is this rank's number among the ranks that hold it."""
    zero = (0,) * len(shape)
    return Layout(name, shape, shape, (Piece(zero, zero, shape, replica),))
