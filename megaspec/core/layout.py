"""Where a local tensor lies in its global one. Plain data that tensor parallelism writes and that initialisation,
gradient norms, checkpoints and exports read."""

from dataclasses import dataclass


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


def whole(name: str, shape: tuple[int, ...], *, replica: int = 0) -> Layout:
    """The layout of a tensor that is not split; `replica` is this rank's number among the ranks that hold it."""
    zero = (0,) * len(shape)
    return Layout(name, shape, shape, (Piece(zero, zero, shape, replica),))
