"""The weights of an opened checkpoint of Megatron's under our names: what Reader is for a checkpoint of ours.

The only module of this room that knows torch: it makes tensors of the bytes that others find.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from megaspec.checkpoint.format import DTYPE_BYTES
from megaspec.checkpoint.shard import TORCH_DTYPES
from megaspec.core.errors import CheckpointError
from megaspec.hf.blocks import Block
from megaspec.megatron.checkpoint_names import EMBEDDING, HEAD, MegatronTable
from megaspec.megatron.opened import OpenedCheckpoint
from megaspec.megatron.rank_files import RankFiles
from megaspec.megatron.whole_tensors import (
    check_storages,
    check_whole,
    equal_everywhere,
    first_of,
    fit_problems,
    read_rows,
)


class MegatronWeights:
    """Weights that are read as they are asked for."""

    def __init__(
        self, files: RankFiles, opened: OpenedCheckpoint, table: MegatronTable, *, padded_vocab: int | None = None
    ):
        """Looks at everything before anything is made of it. CheckpointError: tensors that are missing, left over, of
        another shape, in pieces that don't make a whole, or damaged."""
        self.path = files.path
        self._files = files
        self._table = table
        self._tensors = opened.tensors
        problems = fit_problems(opened.tensors, table, padded=padded_vocab)
        if not problems:
            problems = check_whole(opened.tensors, str(files.path))
            problems = [problem.removeprefix(f"{files.path}: ") for problem in problems]
        if problems:
            raise CheckpointError([f"{files.path}: {problem}" for problem in first_of(problems)])
        check_storages(files, opened.tensors.values())
        if table.is_tied and HEAD in opened.tensors:
            one = opened.tensors[HEAD]
            if not equal_everywhere(files, one, opened.tensors[EMBEDDING]):
                raise CheckpointError(f"{files.path}: {HEAD} differs from {EMBEDDING}, which its args tie it to")

    def __contains__(self, name: str) -> bool:
        return name in self._table.ours

    def names(self) -> list[str]:
        """Of all tensors, ours."""
        return list(self._table.ours)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._table.ours[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """The widest of the tensors that it is made of."""
        dtypes = [self._tensors[block.name].dtype for block in self._table.ours[name].blocks]
        return TORCH_DTYPES[max(dtypes, key=DTYPE_BYTES.__getitem__)]

    def read(self, name: str, start: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """As Weights. CheckpointError: what is read holds NaN or infinities."""
        ours = self._table.ours[name]
        if start is None:
            start = (0,) * len(ours.shape)
        if shape is None:
            shape = [whole - begin for whole, begin in zip(ours.shape, start, strict=True)]
        out = torch.empty(tuple(shape), dtype=self.dtype(name))
        column = start[1] if len(start) == 2 else 0
        for block, low, high, begin in ours.parts(start[0], start[0] + shape[0]):
            rows = slice(begin - start[0], begin - start[0] + high - low)
            out[rows] = self._read_block(block, low, high, column, tuple(shape[1:]))
        return out

    def _read_block(self, block: Block, low: int, high: int, column: int, columns: tuple[int, ...]) -> Tensor:
        """Rows low..high of a block, in our order: [rows, *columns]."""
        tensor = self._tensors[block.name]
        n_columns = columns[0] if columns else 1
        content = np.empty((high - low, n_columns * DTYPE_BYTES[tensor.dtype]), dtype=np.uint8)
        theirs = block.their_rows(low, high)
        # where the next row is not the one behind it
        breaks = np.flatnonzero(np.diff(theirs) != 1) + 1
        edges = [0, *breaks.tolist(), len(theirs)]
        for begin, end in pairwise(edges):
            read_rows(self._files, tensor, int(theirs[begin]), content[begin:end], column=column)
        found = torch.from_numpy(content).flatten().view(TORCH_DTYPES[tensor.dtype]).view(high - low, *columns)
        if not torch.isfinite(found).all():
            raise CheckpointError(f"{self.path}: {block.name} holds NaN or infinities, so it is no trained weight")
        return found
