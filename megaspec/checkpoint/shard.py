"""What one rank saves, as a safetensors file: its header, and where each tensor lies."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megaspec.checkpoint.format import LARGEST_NUMBER, MOST_DIMS, is_tensor_name
from megaspec.checkpoint.rectangles import Rectangle

TORCH_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class SavedPiece:
    """A rectangle of the global tensor `name` that this rank saves: `tensor` lies at `start` in `global_shape`.

    Of all ranks' pieces, exactly one holds each element of a global tensor. Any device, any strides; dtypes of
    TORCH_DTYPES. A piece without elements stores nothing but keeps the tensor's name and shape.

    `read` makes the tensor when it is written, where `tensor` is on the meta device and says its shape and dtype alone:
    of what is streamed, memory holds the pieces that are being written.
    """

    name: str
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    tensor: Tensor
    read: Callable[[], Tensor] | None = None

    def __post_init__(self) -> None:
        """A piece that can't be stored is a mistake of the caller: AssertionError."""
        assert is_tensor_name(self.name), f"name={self.name!r}: letters, digits and ._/- only, and no parts like `..`"
        assert self.tensor.dtype in DTYPE_NAMES, f"{self.name}: dtype={self.tensor.dtype} has no safetensors name"
        shape = self.rectangle.shape
        is_inside = len(shape) <= MOST_DIMS and self.rectangle.is_within(self.global_shape)
        assert is_inside, f"{self.name}: start={self.start} shape={shape} lies outside global_shape={self.global_shape}"
        assert prod(self.global_shape) < LARGEST_NUMBER, f"{self.name}: global_shape={self.global_shape} is too large"

        assert self.tensor.is_meta == (self.read is not None), f"{self.name}: on the meta device, and nothing reads it"

    @property
    def rectangle(self) -> Rectangle:
        """Which of the global tensor it is."""
        return Rectangle(self.start, tuple(self.tensor.shape))

    def value(self) -> Tensor:
        """What is stored, on any device. Raises what `read` raises."""
        if self.read is None:
            return self.tensor
        value = self.read()
        found = (value.shape, value.dtype)
        expected = (self.tensor.shape, self.tensor.dtype)
        assert found == expected, f"{self.name}: what was read is {found}, expected {expected}"
        return value


@dataclass(frozen=True)
class ShardPlan:
    """What a shard will be: its header, and each piece that has elements with its byte offset in the file."""

    header: bytes
    pieces: tuple[tuple[SavedPiece, int], ...]
    bytes: int


def plan_shard(pieces: Sequence[SavedPiece], *, metadata: dict[str, str]) -> ShardPlan:
    """Lay out a safetensors file: larger elements first, so that every tensor is aligned to its elements."""
    stored = [piece for piece in pieces if piece.tensor.numel()]
    stored.sort(key=lambda piece: (-piece.tensor.element_size(), piece.name, piece.start))
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    # offsets count from the end of the header, whose length isn't known before they are
    offsets = []
    end = 0
    for piece in stored:
        begin = end
        end += piece.tensor.numel() * piece.tensor.element_size()
        offsets.append(begin)
        key = _key(piece)
        assert key not in entries, f"piece {key} is given twice"
        entries[key] = {
            "dtype": DTYPE_NAMES[piece.tensor.dtype],
            "shape": list(piece.tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    # filled up to a multiple of 8 bytes, so that the tensors behind it are aligned
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    placed = tuple((piece, len(header) + offset) for piece, offset in zip(stored, offsets, strict=True))
    return ShardPlan(header, placed, len(header) + end)


def _key(piece: SavedPiece) -> str:
    """A piece's name in its file: the tensor's own name for a whole tensor, `name[0:4,8:16]` for a part."""
    rectangle = piece.rectangle
    if rectangle.shape == tuple(piece.global_shape):
        return piece.name
    spans = ",".join(map("{}:{}".format, rectangle.start, rectangle.stop))
    return f"{piece.name}[{spans}]"


def views_of(plan: ShardPlan) -> Iterator[memoryview]:
    """The file's bytes in their order. A tensor is taken to the CPU when its turn comes."""
    yield memoryview(plan.header)
    for piece, _ in plan.pieces:
        yield as_bytes(piece.value().detach().cpu().contiguous())


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes; valid as long as the view lives."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
