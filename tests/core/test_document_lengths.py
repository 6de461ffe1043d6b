"""What a packed row leaves of attention: the formula against every place of a row, and the histogram's two lengths
against distributions whose pairs are known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megaspec.core.document_lengths import (
    LengthBin,
    begun_at_random,
    mean_length,
    mixed,
    share_hidden,
    twice_the_pairs_in_a_row,
)
from megaspec.core.part_facts import Sight

SIGHTS = (Sight(), Sight(window=1), Sight(window=5), Sight(chunk=1), Sight(chunk=6), Sight(window=99), Sight(chunk=99))


def alike(length: int, documents: int = 1) -> LengthBin:
    """Documents of one length."""
    return LengthBin(documents=documents, tokens=documents * length, squares=documents * length**2)


def in_all_places(length: int, row: int, sight: Sight) -> float:
    """Twice the pairs of a document's pieces, as the mean over the places of a row at which it may begin."""
    pairs = 0
    for begin in range(row):
        place = begin
        left = length
        while left:
            piece = min(left, row - place)
            pairs += sight.twice_the_pairs(piece)
            left -= piece
            place = 0
    return pairs / row


@given(st.integers(1, 70), st.integers(1, 24), st.sampled_from(SIGHTS))
def test_pieces_of_a_document_see_what_they_see_in_every_place(length, row, sight):
    found = twice_the_pairs_in_a_row((alike(length),), row, sight)
    assert found == pytest.approx(row / length * in_all_places(length, row, sight), rel=1e-12)


@given(st.integers(0, 70), st.sampled_from(SIGHTS))
def test_pairs_add_up(most, sight):
    assert sight.sum_of_twice_the_pairs(most) == sum(sight.twice_the_pairs(n) for n in range(1, most + 1))


def in_a_geometric_row(mean: float, row: int, *, window: int | None = None, chunk: int | None = None) -> float:
    """Twice the pairs where every token begins a document with probability 1 / mean: a token t of the row has d tokens
    of its document before it with probability p q^d, or all t with q^t."""
    p = 1 / mean
    pairs = 0.0
    seen_if_begun_here = 0.0
    for t in range(row):
        seen = t + 1
        if window is not None:
            seen = min(seen, window)
        if chunk is not None:
            seen = t % chunk + 1
        pairs += seen_if_begun_here + (1 - p) ** t * seen
        seen_if_begun_here += p * (1 - p) ** t * seen
    # a token with itself is half of a pair
    return 2 * pairs - row


# What two lengths for a bin of a factor of two leave: 0.1 % where pieces see a polynomial, more where chunks end.
@pytest.mark.parametrize("mean", [3, 32, 256, 1024, 5000])
@pytest.mark.parametrize("row", [256, 3000, 8192])
@pytest.mark.parametrize(("sight", "tolerance"), [(Sight(), 2e-3), (Sight(window=512), 2e-3), (Sight(chunk=512), 1e-2)])
def test_documents_that_begin_at_random(mean, row, sight, tolerance):
    lengths = begun_at_random(1 / mean)
    assert mean_length(lengths) == pytest.approx(mean, rel=1e-9)
    exact = in_a_geometric_row(mean, row, window=sight.window, chunk=sight.chunk)
    assert twice_the_pairs_in_a_row(lengths, row, sight) == pytest.approx(exact, rel=tolerance)


def test_the_share_that_is_hidden():
    assert share_hidden((), 4096) == 0
    assert share_hidden((alike(1),), 4096) == pytest.approx(1 - 1 / 4096)
    # a document of a whole row lies in two rows but for one place: (T + 2 (T - 1)(2 T - 1) / 6) / T² is about 2/3
    assert share_hidden((alike(4096),), 4096) == pytest.approx(1 / 3, abs=1e-3)
    assert share_hidden((alike(10**9),), 4096) == pytest.approx(0, abs=1e-5)


def test_a_mixture_counts_by_tokens():
    short, long = alike(64), alike(2048, documents=5)
    half = mixed([((short,), 1.0), ((long,), 1.0)])
    rows = [twice_the_pairs_in_a_row(lengths, 4096) for lengths in ((short,), (long,), half)]
    assert rows[2] == pytest.approx((rows[0] + rows[1]) / 2)
    # the scale of a histogram means nothing
    assert twice_the_pairs_in_a_row((long.times(1e-9),), 4096) == pytest.approx(rows[1])


def test_what_no_documents_can_have_is_refused():
    with pytest.raises(ValidationError, match="a bin whose squares are at least tokens² / documents = "):
        LengthBin(documents=10, tokens=100, squares=999)
