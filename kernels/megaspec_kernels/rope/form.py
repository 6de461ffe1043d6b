"""What a product of queries, keys and values is made of."""

from typing import NamedTuple

from torch import Tensor


class Heads(NamedTuple):
    """[..., (queries + 2 keys) size]: the query heads, then the key heads, then as many value heads."""

    queries: int
    keys: int
    size: int
    """Features of each."""

    @property
    def turned(self) -> int:
        """Heads that have positions."""
        return self.queries + self.keys

    @property
    def width(self) -> int:
        """Features of a token in the product."""
        return (self.queries + 2 * self.keys) * self.size


class Turned(NamedTuple):
    """What attention takes."""

    q_BTNH: Tensor
    k_BTKH: Tensor
    v_BTKH: Tensor


def values_of(qkv_BTC: Tensor, heads: Heads) -> Tensor:
    """A view of the value heads, [B, T, K, H]."""
    before = (heads.queries + heads.keys) * heads.size
    return qkv_BTC[..., before:].unflatten(-1, (heads.keys, heads.size))
