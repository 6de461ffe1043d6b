"""Tokenizers: bytes, built in; every Hugging Face tokenizer.json; what SentencePiece and GPT-2 write."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from megaspec.core.errors import DataError
from megaspec.data.round_trip import RoundTrip
from megaspec.data.sentencepiece_model import SentencePieceTokenizer
from megaspec.data.vocab_merges import from_vocab_and_merges, is_vocabulary, merges_beside

TOKENIZER_LIMIT = 256 * 2**20
CONFIG_LIMIT = 16 * 2**20
VOCAB_LIMIT = 2**24
# Endings of the copies beside the data.
COPIES = (".json", ".model")
BPE_EOD = "<|endoftext|>"
# Files that a folder is searched for, in this order: a tokenizer.json says more than what it was made from.
TOKENIZER_NAMES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
# Tokens that end a document, in the order in which they are looked for when nothing says which one it is.
EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<｜end▁of▁sentence｜>")


class Tokenizer(Protocol):
    """Text to token ids and back."""

    name: str
    sha256: str
    vocab_size: int
    eod: int | None
    ending: str
    """Of the copy of its file that lies beside the data; "" for bytes, which have none."""
    text: bytes
    """Content of its file."""
    where: str
    """The file that the user named, for errors."""

    @property
    def eod_token(self) -> str | None:
        """The token that ends a document, as it is written; None where it has no text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[Sequence[int] | np.ndarray]:
        """Token ids of each text, without eod and without the tokens that a post-processor would add."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a text with those that its file says to put around it, such as one that begins texts."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; what can't be decoded is shown as U+FFFD."""
        ...

    def lost(self, text: str) -> Counter[str]:
        """How often each character of a text does not come back when its ids are decoded."""
        ...


class ByteTokenizer:
    """The bytes of UTF-8 are ids 0 to 255; 256 ends a document."""

    name = "byte"
    sha256 = hashlib.sha256(b"byte").hexdigest()
    vocab_size = 257
    eod: int | None = 256
    ending = ""
    text = b""
    where = "byte"
    eod_token = None

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def encode_prompt(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(int(i) for i in ids if 0 <= int(i) < 256).decode("utf-8", errors="replace")

    def lost(self, text: str) -> Counter[str]:
        return Counter()


class FileTokenizer:
    """A tokenizer.json.

    text: its content. where: the file that it is from, for errors; "" takes the name. eod: name of the token that ends
    a document; None looks for one that is known as such.
    Raises DataError when the content is no tokenizer or has no token of that name; so does every method for a text
    that the tokenizer fails on.
    """

    ending = ".json"

    def __init__(self, text: bytes, *, name: str, where: str = "", eod: str | None = None):
        self.where = where or name
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where}: not a tokenizer.json: {error}") from error
        with _told(self.where, "not a tokenizer.json"):
            self._tokenizer = HfTokenizer.from_str(decoded)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.text = text
        self.name = name
        self.sha256 = hashlib.sha256(text).hexdigest()
        self.vocab_size = max(ids, default=-1) + 1
        if not 0 < self.vocab_size <= VOCAB_LIMIT:
            raise DataError(f"{self.where}: vocabulary size={self.vocab_size}, it is 1 to {VOCAB_LIMIT}")
        self.eod = self._find_eod(eod)

    def encode_batch(self, texts: Sequence[str]) -> list[Sequence[int]]:
        with _told(self.where, "this tokenizer fails on a text"):
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def encode_prompt(self, text: str) -> list[int]:
        with _told(self.where, "this tokenizer fails on a text"):
            return self._tokenizer.encode(text, add_special_tokens=True).ids

    def decode(self, ids: Sequence[int]) -> str:
        known = [int(i) for i in ids if 0 <= int(i) < self.vocab_size]
        with _told(self.where, "this tokenizer fails on ids"):
            return self._tokenizer.decode(known, skip_special_tokens=False)

    def lost(self, text: str) -> Counter[str]:
        with _told(self.where, "this tokenizer fails on a text"):
            return self._round_trip.lost(text)

    @cached_property
    def _round_trip(self) -> RoundTrip:
        return RoundTrip(self.text.decode(), self._tokenizer)

    @property
    def eod_token(self) -> str | None:
        """The token that ends a document, as it is written."""
        if self.eod is None:
            return None
        return self._tokenizer.id_to_token(self.eod)

    def _find_eod(self, wanted: str | None) -> int | None:
        if wanted is not None:
            found = self._tokenizer.token_to_id(wanted)
            if found is None:
                raise DataError(f"--eod {wanted}: {self.name} has no such token; its added tokens are {self._added()}")
            return found
        for name in EOD_NAMES:
            found = self._tokenizer.token_to_id(name)
            if found is not None:
                return found
        return None

    def _added(self) -> str:
        names = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        return ", ".join(names[:20]) or "none"


@contextmanager
def _told(where: str, what: str) -> Iterator[None]:
    """Whatever the library raises, as DataError.

    For what it can't parse or encode it raises Exception itself, no subclass. What breaks an assumption in it, such as
    a regular expression that backtracks for too long, is a PanicException: no Exception, and of a module that can't be
    imported.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        cause = str(error).strip() or type(error).__name__
        if "retry-limit-in-match" in cause:
            cause += "; a regular expression in it backtracks without end, mend it or take another tokenizer"
        raise DataError(f"{where}: {what}: {cause.splitlines()[0][:300]}") from error


@dataclass(frozen=True)
class BpeRequest:
    """`bpe:8192`: a tokenizer that is still to be trained on the input."""

    vocab_size: int


def parse_tokenizer(choice: str, *, eod: str | None = None, merges: str | None = None) -> Tokenizer | BpeRequest:
    """A tokenizer by what the command line says: `byte`, `bpe:SIZE`, a file, a folder or a hub name.

    merges: the merges.txt of a vocab.json; None looks for it beside.

    Raises DataError.
    """
    if merges is not None and not choice.endswith(".json"):
        raise DataError(f"--merges {merges}: belongs to a vocab.json, --tokenizer {choice} is none; leave it out")
    if choice == "byte":
        if eod is not None:
            raise DataError(f"--eod {eod}: the byte tokenizer has its own, 256; leave --eod out")
        return ByteTokenizer()
    if choice == "bpe" or choice.startswith("bpe:"):
        if eod is not None:
            raise DataError(f"--eod {eod}: {choice} gets {BPE_EOD} of its own; leave --eod out")
        size = choice.removeprefix("bpe").removeprefix(":")
        if not size.isdecimal() or not 257 < int(size) <= VOCAB_LIMIT:
            raise DataError(f"--tokenizer {choice}: the size is a number above 257 (256 bytes and eod), as in bpe:8192")
        return BpeRequest(int(size))
    return load_tokenizer(choice, eod=eod, merges=merges)


def load_tokenizer(where: str | Path, *, eod: str | None = None, merges: str | None = None) -> Tokenizer:
    """The tokenizer of a file, of a folder that holds one, or of a model on the Hugging Face hub.

    A file is a tokenizer.json, SentencePiece's .model, or GPT-2's vocab.json, whose merges lie beside it or in
    `merges`. eod: token that ends a document; None takes eos_token of tokenizer_config.json, else a known name, and of
    SentencePiece the model's own end of sentence.
    Raises DataError when there is none, or it is too large or damaged.
    """
    path = Path(where)
    if path.is_dir():
        path = _in_folder(path)
    elif not path.exists():
        path = _from_hub(str(where))
    text = read_limited(path, TOKENIZER_LIMIT)
    name = path.parent.name if path.name in TOKENIZER_NAMES else path.name
    configured = _configured_eod(path.with_name("tokenizer_config.json"))
    if path.suffix == SentencePieceTokenizer.ending:
        return SentencePieceTokenizer(text, name=name or str(path), where=str(path), eod=eod or configured)
    if merges is not None or (path.name != "tokenizer.json" and is_vocabulary(text)):
        beside = merges_beside(path) if merges is None else Path(merges)
        if not beside.exists():
            raise DataError(f"{path}: a vocabulary without its merges, {beside} is not there; name them with --merges")
        merged = read_limited(beside, TOKENIZER_LIMIT)
        text = from_vocab_and_merges(text, merged, where=str(path), merges_where=str(beside))
    return FileTokenizer(text, name=name or str(path), where=str(path), eod=eod or configured)


def open_copy(text: bytes, ending: str, *, name: str, where: str) -> Tokenizer:
    """A tokenizer from the copy of its file that a job keeps. Raises DataError."""
    if ending == SentencePieceTokenizer.ending:
        return SentencePieceTokenizer(text, name=name, where=where)
    return FileTokenizer(text, name=name, where=where)


def tokenizer_path(prefix: str | Path, ending: str = ".json") -> Path:
    """Where the copy lies beside the data."""
    return Path(f"{prefix}.tokenizer{ending}")


def _in_folder(folder: Path) -> Path:
    """The first file of a known name."""
    for name in TOKENIZER_NAMES:
        if (folder / name).exists():
            return folder / name
    return folder / TOKENIZER_NAMES[0]


def train_bpe(texts: Iterable[str], vocab_size: int) -> FileTokenizer:
    """A byte-level BPE tokenizer (Sennrich et al. 2016, Radford et al. 2019) that loses nothing of any text.

    The same texts give the same tokenizer. Its last id ends a document.
    Raises DataError when the texts are too few for that many ids.
    """
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size() + 1
    if found != vocab_size:
        raise DataError(f"--tokenizer bpe:{vocab_size}: the input is enough for {found} ids only; ask for bpe:{found}")
    tokenizer.add_special_tokens([BPE_EOD])
    return FileTokenizer(tokenizer.to_str().encode(), name=f"bpe:{vocab_size}")


def _configured_eod(path: Path) -> str | None:
    if not path.exists():
        return None
    try:
        token = json.loads(read_limited(path, CONFIG_LIMIT)).get("eos_token")
    except (ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: not a tokenizer configuration: {error}") from error
    # as it is written for a token, or with its settings as an object
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        return None
    return content


def read_limited(path: Path, limit: int) -> bytes:
    """A file of at most `limit` bytes. Raises DataError."""
    try:
        with open(path, "rb") as file:
            text = file.read(limit + 1)
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}") from error
    if len(text) > limit:
        raise DataError(f"{path}: larger than {limit} bytes, so no tokenizer")
    return text


def _from_hub(name: str) -> Path:
    looks_like_path = name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1
    if looks_like_path:
        raise DataError(f"--tokenizer {name}: no such file or folder")
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise DataError(
            f"--tokenizer {name}: no such file or folder; for a name on the hub install the extra megaspec[hf], or "
            "give `byte`, `bpe:8192` or the path of a tokenizer.json"
        ) from error
    try:
        path = Path(hf_hub_download(name, "tokenizer.json"))
    except (OSError, ValueError, HfHubHTTPError, HFValidationError, EntryNotFoundError) as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"--tokenizer {name}: neither a file nor a folder, and the hub gave no tokenizer.json ({cause[:200]}); "
            "give `byte`, `bpe:8192` or the path of a tokenizer.json"
        ) from error
    return path
