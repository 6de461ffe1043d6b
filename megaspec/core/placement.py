"""Placement rows: how a model's parameters may be split, as data. A model writes them, strategies read them."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "columns", "rows", "vocab", "sequence", "heads", "head_vector", "heads_whole", "expert_columns", "expert_rows"
]


@dataclass(frozen=True)
class Row:
    """One line of a model's placement: which modules, and how tensor parallelism splits them.

    `pattern` matches module names, `*` standing for one part: `layers.*.attn.wqkv`.
    `kind`:
      columns   a Linear whose outputs are split (each of its parts on its own)
      rows      a Linear whose inputs are split; its output is summed
      vocab     an Embedding or output head split over the vocabulary
      sequence  a module that acts on each token alone (norms, positions): weights replicated, tokens split when
                sequence parallel is on
      heads     a module that acts on each head alone: weights replicated, heads split
      head_vector   a module whose parameters have numbers for each head, dimension 0 is split by heads; those of its
                own, not of modules in it
      heads_whole   a module without parameters that adds up numbers over all heads of a token, on whichever ranks
      expert_columns, expert_rows   the same of a GroupedLinear, for its experts, over the ranks of expert parallel, and
                for the matrix of each expert as of columns and rows, over those of expert tensor parallel
    `heads_per_part`, for columns, head_vector and heads_whole: how many heads each part holds; a part with fewer heads
    than ranks is replicated.
    """

    pattern: str
    kind: Kind
    heads_per_part: tuple[int, ...] | None = None
