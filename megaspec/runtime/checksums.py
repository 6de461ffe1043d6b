"""Checksums of tensors over their raw bits, made where the tensors lie. The host reads nothing back.

Note "What a checksum finds". Bits are taken as words of 8 bytes, rows of ROW words are added up, and the sum of each
row is multiplied by an odd number of its own: all modulo 2^64, so that the order of additions changes nothing. A single
bit that flips changes its word by 2^b, b < 64, which times an odd number is never 0 modulo 2^64: every single flip is
found. Of changes at random one in 2^64 is missed, rows that change places are found.

Note "What it costs". Each tensor is read once, without a copy: 8-byte words need no conversion. A row leaves 8 bytes:
0.2 % of what is read, as memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Words of 8 bytes. A row is summed by one block of threads of a GPU.
ROW = 512
_WORD = 8
# 2^64 / golden ratio, odd, as a signed number: its multiples by odd numbers are odd, and far apart.
_ODD = 0x9E3779B97F4A7C15 - 2**64


@dataclass(frozen=True)
class Summed:
    """Something that has a checksum."""

    key: str
    """What it is, and where it lies in its global tensor: equal on all ranks that hold copies."""
    source: str
    """Which of the mappings that are read it is from."""
    name: str
    """Its name in there."""
    slices: tuple[slice, ...]
    """What of that tensor."""


class Checksums:
    """Checksums of the same pieces again and again."""

    def __init__(
        self, pieces: Sequence[Summed], read: Callable[[], Mapping[str, Mapping[str, Tensor]]], *, device: torch.device
    ):
        """`read`: the mappings by name, as they are now; what they hold may be made when it is asked for."""
        self.pieces = list(pieces)
        self._read = read
        sources = read()
        rows = []
        for piece in self.pieces:
            tensor = sources[piece.source][piece.name][piece.slices]
            rows.append(n_rows(tensor))
        self._rows = rows
        weights = [odd_weights(count, device=device) for count in rows]
        self._weights = torch.cat([torch.zeros(0, dtype=torch.int64, device=device), *weights])
        self._sums = torch.zeros_like(self._weights)
        ends = torch.tensor([0, *rows], dtype=torch.int64).cumsum(0)
        self._ends = ends.to(device)

    @property
    def bytes_read(self) -> int:
        """By one `take`."""
        sources = self._read()
        total = 0
        for piece in self.pieces:
            tensor = sources[piece.source][piece.name][piece.slices]
            total += tensor.numel() * tensor.element_size()
        return total

    @torch.no_grad()
    def take(self) -> Tensor:
        """int64 [pieces]: the checksums, on the device."""
        sources = self._read()
        first = 0
        for piece, count in zip(self.pieces, self._rows, strict=True):
            tensor = sources[piece.source][piece.name][piece.slices]
            put_row_sums(tensor, self._sums[first : first + count])
            first += count
        # sums of stretches as differences of running sums, which wrap around together
        running = torch.cat([self._sums.new_zeros(1), (self._sums * self._weights).cumsum(0)])
        at_ends = running[self._ends]
        return at_ends[1:] - at_ends[:-1]


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """int64 scalar: of one tensor."""
    rows = torch.zeros(n_rows(tensor), dtype=torch.int64, device=tensor.device)
    put_row_sums(tensor, rows)
    return (rows * odd_weights(len(rows), device=tensor.device)).sum()


def odd_weights(count: int, *, device: torch.device) -> Tensor:
    """int64 [count]: the number that each row is multiplied by."""
    return (2 * torch.arange(count, dtype=torch.int64, device=device) + 1) * _ODD


def n_rows(tensor: Tensor) -> int:
    """Rows of a tensor, the last one not full."""
    return -(-tensor.numel() * tensor.element_size() // (ROW * _WORD))


def put_row_sums(tensor: Tensor, into: Tensor) -> None:
    """Sums of the rows of a tensor. `into`: int64 [n_rows], perhaps on another device."""
    if into.numel() == 0:
        return
    if tensor.device != into.device:
        there = torch.empty_like(into, device=tensor.device)
        put_row_sums(tensor, there)
        into.copy_(there, non_blocking=True)
        return
    size = tensor.element_size()
    flat = tensor.detach().reshape(-1)
    if flat.storage_offset() * size % _WORD or not flat.is_contiguous():
        # a word may not begin within another
        flat = flat.clone()
    per_word = _WORD // size
    n_words = flat.numel() // per_word
    words = flat[: n_words * per_word].view(torch.int64)
    full = n_words // ROW
    if full:
        torch.sum(words[: full * ROW].view(full, ROW), dim=1, out=into[:full])
    if full == into.numel():
        return
    last = words[full * ROW :].sum()
    rest = flat[n_words * per_word :]
    if rest.numel():
        # less than a word
        last = last + rest.view(torch.uint8).to(torch.int64).sum()
    into[full].copy_(last)
