"""Text out of tokens, one token at a time: whole characters alone, and nothing of a text that ends it.

Note "Whole characters". A character may be spread over several tokens, and what a token is in text may depend on those
before it: a SentencePiece token gives its space away at the beginning. So a few tokens are decoded again together with
the new one, and what they gave before is taken off; a character that is not complete, U+FFFD at the end, waits.
"""

from collections.abc import Sequence

from megaspec.data.tokenizer import Tokenizer

_TOKENS_BEFORE = 8
"""Of the prompt, decoded together with the first new ones."""
_INCOMPLETE = "\ufffd"
_MOST_WAITING = 16
"""Tokens that may wait for a character: UTF-8 has at most 4 bytes, a token at least one; more are no text."""


class TextStream:
    """The text that goes on from a prompt. `stops`: texts that end it, of which it keeps nothing."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stops = stops
        self._ids = list(prompt[-_TOKENS_BEFORE:])
        self._begin = 0
        """The first token that is decoded again."""
        self._end = len(self._ids)
        """Tokens whose text was taken."""
        self._taken = ""
        """All text so far; without what waits for a character."""
        self._given = 0
        """Characters that were given away."""
        self.is_stopped = False

    @property
    def text(self) -> str:
        """All that is written; call `finish` first."""
        return self._taken

    def add(self, token: int) -> str:
        """-> what text is certain now that was not before. Nothing may be added once `is_stopped`."""
        self._ids.append(token)
        new = self._new_text()
        is_complete = not new.endswith(_INCOMPLETE)
        if new and (is_complete or len(self._ids) - self._end > _MOST_WAITING):
            self._take(new)
        self._stop()
        return self._give(held=self._held())

    def finish(self) -> str:
        """-> the rest: there are no more tokens."""
        if not self.is_stopped:
            self._take(self._new_text())
            self._stop()
        return self._give(held=0)

    def _new_text(self) -> str:
        """Of the tokens whose text was not taken."""
        before = self._tokenizer.decode(self._ids[self._begin : self._end])
        return self._tokenizer.decode(self._ids[self._begin :])[len(before) :]

    def _take(self, new: str) -> None:
        self._taken += new
        self._begin = self._end
        self._end = len(self._ids)

    def _stop(self) -> None:
        """Cuts the text where the first of the stops begins."""
        places = []
        for stop in self._stops:
            # what was given away holds none, nor the beginning of one
            place = self._taken.find(stop, self._given)
            if place >= 0:
                places.append(place)
        if places:
            self._taken = self._taken[: min(places)]
            self.is_stopped = True

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop."""
        if self.is_stopped:
            return 0
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._taken) - self._given), longest, -1):
                if self._taken.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _give(self, *, held: int) -> str:
        end = len(self._taken) - held
        piece = self._taken[self._given : end]
        self._given = max(self._given, end)
        return piece
