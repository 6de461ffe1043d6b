"""Which document each token of packed sequences is of, in the form that attention without a mask takes.

A kernel for sequences of different lengths takes all tokens one behind the other, and where each sequence begins. Here
these are the documents, and their number is rounded up, so that shapes stay few: what lies behind the last document of
a row is a sequence of no token.

Note "Blocks of keys". With numbers that ascend along queries and keys, document d has the queries starts[d] to
starts[d + 1], where starts[d] counts those with a number below d, and the keys by the same formula. That holds for a
whole sequence, and for any part of one: documents that have queries and no keys there, or neither, have lengths of 0.
So a block on a rank of a ring takes the same kernel, and the host reads nothing from the GPU.
"""

# B sequences, T tokens, D documents of a row at most

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# The fewest documents that shapes are made for.
_FEWEST = 32


@dataclass(frozen=True)
class Documents:
    """Documents of B rows of T tokens each, or of some of their tokens in the same order."""

    number: Tensor
    """int32 [B, T]: of each token's document in its row, ascending, from 0 to below `most`. [1, T]: every row's."""
    starts: Tensor
    """int32 [B · most + 1]: the first token of each document, of all rows one behind the other, and B · T."""
    most: int
    """D: a bound on the documents of a row."""
    longest: int
    """A bound on the tokens of a document here, at most T."""

    def map(self, change: Callable[[Tensor], Tensor]) -> "Documents":
        """The same documents with every tensor changed, as when they move to a device."""
        return Documents(change(self.number), change(self.starts), self.most, self.longest)

    def of_rows(self, rows: slice) -> "Documents":
        """Of some of the rows, with the bounds of all."""
        number = self.number[rows]
        return Documents(number, starts_of(number, self.most), self.most, self.longest)

    def for_rows(self, rows: int) -> "Documents":
        """With a row of numbers for each of B rows."""
        if self.number.shape[0] == rows:
            return self
        number = self.number.expand(rows, -1).contiguous()
        return Documents(number, starts_of(number, self.most), self.most, self.longest)

    def at(self, places: Tensor | slice) -> "Documents":
        """Of the tokens at ascending places of each row: int64 [t], or a slice."""
        number = self.number[:, places].contiguous()
        return Documents(number, starts_of(number, self.most), self.most, min(self.longest, number.shape[1]))


@dataclass(frozen=True)
class BlockDocuments:
    """Of a block of attention: a query sees keys of its own document."""

    queries: Documents
    keys: Documents
    """With the same `most`; of a causal block the same tokens."""

    def mask(self) -> Tensor:
        """bool [B, 1, queries, keys]: for what takes nothing else."""
        return self.queries.number[:, None, :, None] == self.keys.number[:, None, None, :]


def documents_of(number: Tensor) -> Documents:
    """int32 [B, T], equal in a document and different in the next -> Documents.

    The bounds are read from the numbers, so on a GPU the host waits for them: a loader does this on the CPU. The bound
    on their number is a power of two, at least 32; that on their length a power of two, at most T.
    """
    T = number.shape[1]
    is_start = torch.zeros_like(number, dtype=torch.bool)
    is_start[:, 1:] = number[:, 1:] != number[:, :-1]
    from_zero = is_start.cumsum(dim=1, dtype=torch.int32)
    most = max(_FEWEST, _power_of_two(int(from_zero.max()) + 1))
    starts = starts_of(from_zero, most)
    longest = min(T, _power_of_two(int(starts.diff().max())))
    return Documents(from_zero, starts, most, longest)


def whole_rows(rows: int, length: int, *, device: torch.device) -> Documents:
    """Rows of one document each."""
    number = torch.zeros(rows, length, dtype=torch.int32, device=device)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * length
    return Documents(number, starts, 1, length)


def chunks_of(positions_BT: Tensor, chunk: int, *, documents: Documents | None) -> Documents:
    """Chunks of a document as documents of their own. `positions`: int64, of the tokens in their documents; without
    documents, of the whole row."""
    T = positions_BT.shape[1]
    number = (positions_BT % chunk == 0).cumsum(dim=1, dtype=torch.int32) - 1
    # a document has a chunk more than those that it fills
    most = T // chunk + 1
    longest = chunk
    if documents is not None:
        most = T // chunk + documents.most
        longest = min(chunk, documents.longest)
    return Documents(number, starts_of(number, most), most, longest)


def starts_of(number: Tensor, most: int) -> Tensor:
    """int32 [B, T], ascending along a row, below `most` -> int32 [B · most + 1]; see the note "Blocks of keys"."""
    B, T = number.shape
    every = torch.arange(most, dtype=torch.int32, device=number.device).repeat(B, 1)
    below = torch.searchsorted(number, every, out_int32=True)
    first_of_row = torch.arange(B, dtype=torch.int32, device=number.device) * T
    return torch.cat(((below + first_of_row[:, None]).flatten(), below.new_full((1,), B * T)))


def _power_of_two(count: int) -> int:
    """The first that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()
