"""Which elements of a matrix share a scale, and how its two layouts lie in memory, by recipe; see fp8.py, note "Roles".

Shapes and formats of columns stand here beside each other, since operations that torch.compile leaves whole have to
say them without computing.
"""

# M tokens, K features of a matrix; B sequences, T tokens

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megaspec_kernels.fp8_cast.formats import (
    COLUMN,
    ROW,
    SHORT_COLUMN,
    SHORT_LINE,
    SHORT_ROW,
    Block,
    scale_shape,
)
from megaspec_kernels.linear.mxfp8 import BLOCK as MX_BLOCK
from megaspec_kernels.linear.nvfp4 import BLOCK as FP4_BLOCK
from megaspec_kernels.linear.nvfp4 import HEAD

Recipe = Literal["tensorwise", "delayed", "rowwise", "blockwise"]
Role = Literal["input", "weight", "gradient"]

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
ALL: Block = (None, None)
"""All of a matrix shares a scale."""


class Blocks(NamedTuple):
    """What shares a scale of a matrix, in each of its layouts; both count rows and columns of the matrix as it is."""

    rows: Block
    columns: Block


_TENSOR = Blocks(ALL, ALL)
# a scale for each line along which a product sums
_LINES = Blocks(ROW, COLUMN)
SHORT_LINES = Blocks(SHORT_ROW, SHORT_COLUMN)
_SQUARES = Blocks((SHORT_LINE, SHORT_LINE), (SHORT_LINE, SHORT_LINE))
BLOCKS: dict[Recipe, dict[Role, Blocks]] = {
    "tensorwise": {"input": _TENSOR, "weight": _TENSOR, "gradient": _TENSOR},
    "delayed": {"input": _TENSOR, "weight": _TENSOR, "gradient": _TENSOR},
    "rowwise": {"input": _LINES, "weight": _LINES, "gradient": _LINES},
    "blockwise": {"input": SHORT_LINES, "weight": _SQUARES, "gradient": SHORT_LINES},
}


def has_one_scale(recipe: str) -> bool:
    """Whether it is of a whole tensor: rows and columns are the same numbers."""
    return BLOCKS[recipe]["input"] == _TENSOR


def scale_in_columns(scale_mk: Tensor, block: Block) -> Tensor:
    """[m, k] of a matrix -> [k, m] of its columns. Those of short columns stay where they are, as products read them;
    others are contiguous."""
    if block == SHORT_COLUMN:
        return scale_mk.t()
    return scale_mk.t().contiguous()


@dataclass(frozen=True)
class TurnedColumns:
    """[K, M] of a matrix [M, K], a byte a number."""

    recipe: Recipe

    is_turned = True
    """What ranks keep of their tokens lies in rows, and is turned round once it is gathered."""

    def shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Of the values of a matrix [M, K]."""
        M, K = shape
        return K, M

    def parts_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Of what is kept of an input [B, T, K] whose tokens ranks share out: each keeps a part of dimension 1."""
        return tuple(shape)

    def dtype(self, form: str) -> torch.dtype:
        """Of the values. `form`: of fp8."""
        return FORMATS[form]

    def empty_scale(self, like: Tensor, role: Role, shape: tuple[int, int]) -> Tensor:
        """Room for the scales of a matrix [M, K]."""
        block = BLOCKS[self.recipe][role].columns
        wide = torch.promote_types(like.dtype, torch.float32)
        return scale_in_columns(like.new_empty(scale_shape(block, shape), dtype=wide), block)


class MxFp8Columns:
    """[M, K] as in rows: tensor cores take factors that lie along the other dimension."""

    is_turned = False

    def shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """See TurnedColumns."""
        return shape

    def parts_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """See TurnedColumns."""
        return tuple(shape)

    def joined(self, kept: Tensor, n_in: int) -> Tensor:
        """What ranks have kept of an input of `n_in` features, put together -> in columns."""
        # as bytes: they are not computed with
        return kept.view(torch.uint8).flatten(0, -2).view(kept.dtype)

    def dtype(self, form: str) -> torch.dtype:
        """See TurnedColumns."""
        return FORMATS[form]

    def empty_scale(self, like: Tensor, role: Role, shape: tuple[int, int]) -> Tensor:
        """See TurnedColumns. Powers of two in a byte."""
        return like.new_empty(scale_shape((MX_BLOCK, 1), shape), dtype=torch.uint8)


class NvFp4Columns:
    """[K, M / 2], two numbers a byte; tokens are filled up to whole blocks of 32."""

    is_turned = False

    def shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """See TurnedColumns."""
        M, K = shape
        return K, _filled_up(M) // 2

    def parts_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """See TurnedColumns. Features come first here, too."""
        B, T, K = shape
        return K * B, T // 2

    def joined(self, kept: Tensor, n_in: int) -> Tensor:
        """See MxFp8Columns."""
        return kept.reshape(n_in, -1)

    def dtype(self, form: str) -> torch.dtype:
        """See TurnedColumns. Bytes of two numbers, in whatever form scales are."""
        return torch.uint8

    def empty_scale(self, like: Tensor, role: Role, shape: tuple[int, int]) -> Tensor:
        """See TurnedColumns. A head for the matrix, and a byte for each 16 numbers."""
        M, K = shape
        return like.new_empty(HEAD + K * _filled_up(M) // FP4_BLOCK, dtype=torch.uint8)


def _filled_up(tokens: int) -> int:
    """With the rows of zeros that fill the last block, as mxfp8.in_units puts them behind."""
    return -(-tokens // MX_BLOCK) * MX_BLOCK


COLUMNS: dict[str, TurnedColumns | MxFp8Columns | NvFp4Columns] = {
    "tensorwise": TurnedColumns("tensorwise"),
    "delayed": TurnedColumns("delayed"),
    "rowwise": TurnedColumns("rowwise"),
    "blockwise": TurnedColumns("blockwise"),
    "mxfp8": MxFp8Columns(),
    "nvfp4": NvFp4Columns(),
}
