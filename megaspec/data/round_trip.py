"""What a tokenizer.json loses of a text: the characters that don't come back when its ids are decoded.

Note "What is lost". A text is compared with what comes back of it, as counts of characters:
- The text is taken as the tokenizer's own normalizer leaves it. Lower case, NFC, accents that are stripped, a space in
  front: what a normalizer does is said in the file, and is no loss.
- An unknown token gives nothing back, unless the text itself says its name.
- White space counts, unless a pre-tokenizer takes it away by its kind (as before WordPiece, or in T5). The sign `▁`
  stands for a space, and spaces at either end are nobody's.
- The decoder of the file is used. Where it has none, tokens are put together as they are; byte-level ones are turned
  into bytes.
"""

import json
from collections import Counter
from typing import Any

from tokenizers import Tokenizer

# Pre-tokenizers that leave white space out of every token.
_WITHOUT_SPACES = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer")
_SPACE_SIGN = "▁"


class RoundTrip:
    """A tokenizer.json, there and back. content: its text, which the library has read before."""

    def __init__(self, content: str, tokenizer: Tokenizer):
        said = json.loads(content)
        self._tokenizer = tokenizer
        self._decoder = _decoding(said, tokenizer)
        self._keeps_spaces = not _takes_spaces_away(said.get("pre_tokenizer"))
        self._unknown = _unknown_token(said["model"])
        self._unknown_id = None if self._unknown is None else tokenizer.token_to_id(self._unknown)

    def lost(self, text: str) -> Counter[str]:
        """How often each character of a text does not come back."""
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        known = [i for i in encoding.ids if i != self._unknown_id]
        back = self._decoder.decode(known, skip_special_tokens=False)
        # Tokens that the text itself names, as [SEP], come back as they are written: normal as well.
        found = self._characters(back) | self._characters(self._normal(back))
        if len(known) < len(encoding.ids):
            # an unknown token whose name stands in the text is no loss of that name
            n_named = text.count(self._unknown)
            for character, count in self._characters(self._normal(self._unknown)).items():
                found[character] += count * n_named
        return self._characters(self._normal(text)) - found

    def _normal(self, text: str) -> str:
        """The text as the tokenizer's normalizer leaves it."""
        normalizer = self._tokenizer.normalizer
        if normalizer is None:
            return text
        return normalizer.normalize_str(text)

    def _characters(self, text: str) -> Counter[str]:
        """How often each character stands in a text; of white space what the tokenizer keeps."""
        spaced = text.replace(_SPACE_SIGN, " ")
        if self._keeps_spaces:
            return Counter(spaced.strip())
        return Counter("".join(spaced.split()))


def _decoding(said: dict[str, Any], tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with a decoder: without one, tokens would be put together with spaces between them."""
    if said.get("decoder") is not None:
        return tokenizer
    decoder: dict[str, Any] = {"type": "Fuse"}
    if any(one.get("type") == "ByteLevel" for one in _flattened(said.get("pre_tokenizer"))):
        decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return Tokenizer.from_str(json.dumps(said | {"decoder": decoder}))


def _flattened(said: Any) -> list[dict[str, Any]]:
    """A pre-tokenizer with all that it is a sequence of."""
    found: list[dict[str, Any]] = []
    if isinstance(said, list):
        for one in said:
            found += _flattened(one)
    elif isinstance(said, dict):
        found = [said, *_flattened(said.get("pretokenizers"))]
    return found


def _takes_spaces_away(pre_tokenizer: Any) -> bool:
    for one in _flattened(pre_tokenizer):
        if one.get("type") in _WITHOUT_SPACES:
            return True
        if one.get("type") == "CharDelimiterSplit" and str(one.get("delimiter")).isspace():
            return True
    return False


def _unknown_token(model: dict[str, Any]) -> str | None:
    """Name of the token that stands for what is not in the vocabulary."""
    number = model.get("unk_id")
    if number is not None:
        return model["vocab"][number][0]
    return model.get("unk_token")
