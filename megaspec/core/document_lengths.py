"""How long documents are, as a histogram, and what of attention a row that is packed with them leaves. Torch-free.

Note "Documents in rows". Documents lie one behind the other, in an order that knows nothing of rows, and the stream is
cut every T tokens. So a document of L tokens begins at each place of a row as often as at any other, and is cut into
pieces. Let g(n) be twice the pairs that a piece of n tokens sees (Sight.twice_the_pairs), G(n) = g(1) + ... + g(n).

    L <= T: of T places T - L + 1 leave it whole; each of the others, L - 1 of them, cuts it in two, and every length
            from 1 to L - 1 is there twice:          E = ((T - L + 1) g(L) + 2 G(L - 1)) / T
    L > T:  the first piece has each length from 1 to T once, the last one each from 0 to T - 1 once, and between them
            lie L - T whole rows, summed over places: E = (G(T) + G(T - 1) + (L - T) g(T)) / T

Both are exact, for any g: windows and chunks count within a piece, as attention counts them. A row of T tokens has
T · sum of E / sum of L. Up to a bin's variance E is taken of two lengths that have the bin's mean and variance, which
is exact where E is a polynomial of degree 2, and nearly so in between: a bin spans a factor of two.
"""

from collections.abc import Iterable
from math import sqrt
from typing import Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from megaspec.core.frozen import Frozen, PositiveFloat
from megaspec.core.part_facts import ALL_OF_THE_PAST, Sight

# Documents longer than all but this share of them count for nothing.
_TAIL = 1e-12
# Lengths below this are added up one by one.
_ADDED_UP = 4096


class LengthBin(Frozen):
    """Documents of similar length; numbers are relative to those of other bins."""

    documents: PositiveFloat
    """How many; those without a token are left out."""
    tokens: PositiveFloat
    """Of all of them."""
    squares: float = Field(gt=0)
    """The sum of their squared lengths."""

    @model_validator(mode="after")
    def _can_be(self) -> Self:
        """A mean square is no less than the square of a mean, but for rounding."""
        if self.squares * self.documents < self.tokens**2 * (1 - 1e-9):
            rule = f"a bin whose squares are at least tokens² / documents = {self.tokens**2 / self.documents:g}"
            raise PydanticCustomError(
                "squares", "{rule}; take what `megaspec data inspect --json` prints", {"rule": rule}
            )
        return self

    @property
    def two_lengths(self) -> tuple[float, float]:
        """Two lengths with the mean and the variance of its documents."""
        mean = self.tokens / self.documents
        spread = sqrt(max(0.0, self.squares / self.documents - mean**2))
        # no document has less than a token
        return max(1.0, mean - spread), mean + spread

    def times(self, factor: float) -> "LengthBin":
        """As much of it."""
        return LengthBin(documents=factor * self.documents, tokens=factor * self.tokens, squares=factor * self.squares)


Lengths = tuple[LengthBin, ...]
"""A histogram. (): nothing is known, and a row counts as one document."""


def mean_length(lengths: Lengths) -> float:
    """Tokens of a document on average."""
    return sum(one.tokens for one in lengths) / sum(one.documents for one in lengths)


def twice_the_pairs_in_a_row(lengths: Lengths, tokens: float, sight: Sight = ALL_OF_THE_PAST) -> float:
    """What Sight.twice_the_pairs is of a row of one document, expected of `tokens` tokens from the beginning of a row
    that is packed; see the note "Documents in rows"."""
    if not lengths:
        return sight.twice_the_pairs(tokens)
    pairs = 0.0
    for one in lengths:
        for length in one.two_lengths:
            pairs += one.documents / 2 * _pairs_of_pieces(length, tokens, sight)
    return tokens * pairs / sum(one.tokens for one in lengths)


def share_hidden(lengths: Lengths, seq_len: int) -> float:
    """Of the pairs of causal attention in a row, those that lie in different documents."""
    return 1.0 - twice_the_pairs_in_a_row(lengths, seq_len) / seq_len**2


def _pairs_of_pieces(length: float, row: float, sight: Sight) -> float:
    """E of the note."""
    pairs = sight.twice_the_pairs
    sums = sight.sum_of_twice_the_pairs
    if length <= row:
        return ((row - length + 1) * pairs(length) + 2 * sums(length - 1)) / row
    return (sums(row) + sums(row - 1) + (length - row) * pairs(row)) / row


def begun_at_random(rate: float) -> Lengths:
    """Where each token begins a document with probability `rate`: lengths of the geometric distribution, in bins that
    double. A row that begins one itself is cut from such a stream, since what is left of a document is as long as one.
    """
    if rate >= 1:
        return (LengthBin(documents=1.0, tokens=1.0, squares=1.0),)
    bins = []
    shortest = 1
    while _at_least(rate, shortest)[0] > _TAIL:
        documents, tokens, squares = _between(rate, shortest, 2 * shortest)
        bins.append(LengthBin(documents=documents, tokens=tokens, squares=squares))
        shortest *= 2
    return tuple(bins)


def _between(rate: float, shortest: int, end: int) -> tuple[float, float, float]:
    """Of documents from `shortest` to below `end`: their share, and their part of the mean length and mean square."""
    if end > _ADDED_UP:
        documents, tokens, squares = _at_least(rate, shortest)
        longer_documents, longer_tokens, longer_squares = _at_least(rate, end)
        return documents - longer_documents, tokens - longer_tokens, squares - longer_squares
    # one by one, where a difference would leave few digits
    documents = 0.0
    tokens = 0.0
    squares = 0.0
    for length in range(shortest, end):
        share = rate * (1 - rate) ** (length - 1)
        documents += share
        tokens += share * length
        squares += share * length**2
    return documents, tokens, squares


def _at_least(rate: float, shortest: int) -> tuple[float, float, float]:
    """Of documents that are at least so long, the same."""
    # beyond the first tokens they are as long as any document, whose mean and mean square are
    mean = 1 / rate
    square = (2 - rate) / rate**2
    before = shortest - 1
    share = (1 - rate) ** before
    return share, share * (before + mean), share * (before**2 + 2 * before * mean + square)


def mixed(parts: Iterable[tuple[Lengths, float]]) -> Lengths:
    """The histogram of several data sets together, each with its share of the tokens."""
    found: list[LengthBin] = []
    for lengths, share in parts:
        tokens = sum(one.tokens for one in lengths)
        found += [one.times(share / tokens) for one in lengths]
    return tuple(found)
