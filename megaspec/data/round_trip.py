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
        ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        known = [i for i in ids if i != self._unknown_id]
        back = self._decoder.decode(known, skip_special_tokens=False)
        # Tokens that the text itself names, as [SEP], come back as they are written: normal as well.
        found = Counter(self._seen(back)) | Counter(self._seen(self._normal(back)))
        if len(known) < len(ids):
            for character, count in Counter(self._seen(self._normal(self._unknown))).items():
                found[character] += count * text.count(self._unknown)
        return Counter(self._seen(self._normal(text))) - found

    def _normal(self, text: str) -> str:
        normalizer = self._tokenizer.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def _seen(self, text: str) -> str:
        spaced = text.replace(_SPACE_SIGN, " ")
        return spaced.strip() if self._keeps_spaces else "".join(spaced.split())


def _decoding(said: dict[str, Any], tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with a decoder: without one, tokens would be put together with spaces between them."""
    if said.get("decoder") is not None:
        return tokenizer
    is_bytes = any(part.get("type") == "ByteLevel" for part in _parts(said.get("pre_tokenizer")))
    kinds = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    decoder = {"type": "ByteLevel", **kinds} if is_bytes else {"type": "Fuse"}
    return Tokenizer.from_str(json.dumps(said | {"decoder": decoder}))


def _parts(said: Any) -> list[dict[str, Any]]:
    """A pre-tokenizer with all that it is a sequence of."""
    if isinstance(said, list):
        return [part for one in said for part in _parts(one)]
    if not isinstance(said, dict):
        return []
    return [said, *_parts(said.get("pretokenizers"))]


def _takes_spaces_away(pre_tokenizer: Any) -> bool:
    for part in _parts(pre_tokenizer):
        if part.get("type") in _WITHOUT_SPACES:
            return True
        if part.get("type") == "CharDelimiterSplit" and str(part.get("delimiter")).isspace():
            return True
    return False


def _unknown_token(model: dict[str, Any]) -> str | None:
    """Name of the token that stands for what is not in the vocabulary."""
    number = model.get("unk_id")
    if number is not None:
        return model["vocab"][number][0]
    return model.get("unk_token")
