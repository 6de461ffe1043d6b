"""How positions enter by learned vectors, or not at all. Rotary positions: nn/rope/."""

from typing import ClassVar, Literal

from megaspec.core.frozen import Frozen
from megaspec.core.part_facts import PartFacts


class PositionsSpec(Frozen):
    """How the model knows where a token is: what every way says of itself."""

    is_rotary: ClassVar[bool] = False
    """Query and key heads are turned by angles."""

    def learned_rows(self, max_seq_len: int) -> int:
        """Rows of a learned table that is added to the embedding; 0: there is none."""
        return 0

    def turned(self, width: int) -> int:
        """Features of a head that are turned, where `width` may be."""
        return width if self.is_rotary else 0

    def rotation_facts(self, d_rotary: int, *, n_heads: int, n_kv_heads: int, name: str) -> PartFacts:
        """Of what turns heads in each layer. `d_rotary`: features of a head that turn; `name`: of its module."""
        return PartFacts()


class LearnedPositionsSpec(PositionsSpec):
    """A learned vector for each position is added to the embedding (Radford et al. 2019)."""

    kind: Literal["learned"]

    def learned_rows(self, max_seq_len: int) -> int:
        return max_seq_len


class NoPositionsSpec(PositionsSpec):
    """Nothing says where a token is but the causal mask (Kazemnejad et al. 2023)."""

    kind: Literal["none"]
