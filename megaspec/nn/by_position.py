"""Modules whose result depends on where in the sequence a token is."""

# T tokens that the module is given

from torch import Tensor, nn


class ByPosition(nn.Module):
    """A module that looks up where its tokens are: to add a position's vector, to draw a mask for each token.

    Sequence parallelism gives such a module a part of the tokens whose places it is told, and has to know it: whatever
    asks for places derives from this class, and is named by a `sequence` row of the model's placement.
    """

    part: tuple[int, int] = (0, 1)
    """(index, count): this rank holds part `index` of `count` equal parts of the tokens."""

    def places_here(self, places: Tensor, tokens: int) -> Tensor:
        """[..., count · T] -> [..., T]: of the places that are told, those of the T `tokens` that are here."""
        first = self.part[0] * tokens
        return places[..., first : first + tokens]
