"""SentencePiece's .model files, read by the library `sentencepiece`.

Note "Why its own library". A unigram model takes the best of all ways to cut a text; the library adds the scores of
pieces in single precision along the whole text, so another implementation cuts some long texts in another way. Who goes
on with a model has to have its very tokens.
"""

import base64
import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from megaspec.core.errors import DataError

_SPACE_SIGN = "▁"


class SentencePieceTokenizer:
    """A tokenizer.model, unigram or BPE.

    text: its content. where: the file that it is from, for errors; "" takes the name. eod: name of the piece that ends
    a document; None takes the model's own end of sentence.
    Raises DataError when the content is no such model, has no piece of that name, or the library is missing.
    """

    ending = ".model"

    def __init__(self, text: bytes, *, name: str, where: str = "", eod: str | None = None):
        self.where = where or name
        self._model = _load(text, self.where)
        self.text = text
        self.name = name
        self.sha256 = hashlib.sha256(text).hexdigest()
        self.vocab_size = self._model.get_piece_size()
        self._unknown = self._model.unk_id()
        self.eod = self._find_eod(eod)

    @property
    def eod_token(self) -> str | None:
        """The piece that ends a document, as it is written."""
        if self.eod is None:
            return None
        return self._model.id_to_piece(self.eod)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._model.encode(list(texts), out_type=int, num_threads=1)

    def encode_prompt(self, text: str) -> list[int]:
        """The piece that begins texts, where the model has one, and the text's: whether programs put it there stands in
        no file of SentencePiece's; those of Llama do."""
        begin = self._model.bos_id()
        ids = self._model.encode(text, out_type=int)
        return [begin, *ids] if begin >= 0 else ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids if 0 <= int(i) < self.vocab_size])

    def lost(self, text: str) -> Counter[str]:
        """What its normalizer leaves of the text, less what comes back; an unknown piece gives nothing back."""
        (ids,) = self.encode_batch([text])
        back = self.decode([i for i in ids if i != self._unknown])
        # normal as well, since a piece that was unknown leaves two spaces side by side
        found = _characters(back) | _characters(self._model.normalize(back))
        return _characters(self._model.normalize(text)) - found

    def _find_eod(self, wanted: str | None) -> int | None:
        if wanted is None:
            end = self._model.eos_id()
            return end if end >= 0 else None
        number = self._model.piece_to_id(wanted)
        # a name that it doesn't know gives the unknown piece
        if self._model.id_to_piece(number) != wanted:
            raise DataError(f"--eod {wanted}: {self.name} has no such piece; its own is {self._own_eod()}")
        return number

    def _own_eod(self) -> str:
        end = self._model.eos_id()
        return self._model.id_to_piece(end) if end >= 0 else "none"


def _characters(text: str) -> Counter[str]:
    return Counter(text.replace(_SPACE_SIGN, " ").strip())


def _load(text: bytes, where: str) -> Any:
    if _is_tiktoken(text):
        raise DataError(
            f"{where}: ranks of tiktoken, no SentencePiece model; take the tokenizer.json of the same model instead"
        )
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise DataError(
            f"{where}: a SentencePiece model needs sentencepiece; install the extra megaspec[sentencepiece], or take "
            "the tokenizer.json of the same model"
        ) from error
    model = SentencePieceProcessor()
    try:
        loaded = bool(text) and model.LoadFromSerializedProto(text)
    except (RuntimeError, ValueError) as error:
        cause = str(error).splitlines()[0][:200]
        raise DataError(f"{where}: not a SentencePiece model: {cause}") from error
    if not loaded or model.get_piece_size() < 1:
        raise DataError(f"{where}: not a SentencePiece model: it holds no pieces")
    return model


def _is_tiktoken(text: bytes) -> bool:
    """Whether the first line is a token in base64 and its rank."""
    words = text[:1000].split(b"\n", 1)[0].split(b" ")
    if len(words) != 2 or not words[1].strip().isdigit():
        return False
    try:
        base64.b64decode(words[0], validate=True)
    except ValueError:
        return False
    return True
