"""GPT-2's pair of files, vocab.json and merges.txt, as the tokenizer.json of the same tokenizer."""

import json
from pathlib import Path
from typing import Any

from megaspec.core.errors import DataError

END_OF_TEXT = "<|endoftext|>"
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def is_vocabulary(text: bytes) -> bool:
    """Whether a JSON file maps tokens to ids, as vocab.json does, and is no tokenizer.json."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and bool(content) and _are_ids(content)


def from_vocab_and_merges(vocab: bytes, merges: bytes, *, where: str, merges_where: str) -> bytes:
    """The tokenizer.json: byte-level BPE with GPT-2's split into words; `<|endoftext|>` is one token in any text.

    Raises DataError for files that aren't a vocabulary and its merges, with the line of a wrong merge.
    """
    try:
        ids = json.loads(vocab)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not a vocabulary: {error}") from error
    if not isinstance(ids, dict) or not ids or not _are_ids(ids):
        raise DataError(f"{where}: not a vocabulary: it must be an object of tokens and their ids")
    if len(set(ids.values())) < len(ids):
        raise DataError(f"{where}: not a vocabulary: two tokens have one id")
    added = []
    if END_OF_TEXT in ids:
        added.append(_special(END_OF_TEXT, ids[END_OF_TEXT]))
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": _BYTE_LEVEL,
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": ids,
            "merges": _merges(merges, ids, merges_where, where),
        },
    }
    return json.dumps(content, ensure_ascii=False).encode()


def merges_beside(vocab: Path) -> Path:
    """Where the merges of a vocabulary are looked for: vocab.json → merges.txt, gpt2-vocab.json → gpt2-merges.txt."""
    return vocab.with_name(vocab.name.replace("vocab", "merges")).with_suffix(".txt")


def _merges(text: bytes, ids: dict[str, int], where: str, vocab_where: str) -> list[list[str]]:
    try:
        lines = text.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not a list of merges: {error}") from error
    merges: list[list[str]] = []
    for number, line in enumerate(lines, start=1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2:
            raise DataError(f"{where}:{number}: a merge must be two tokens with a space between, found {line[:80]!r}")
        for token in (*pair, "".join(pair)):
            if token not in ids:
                raise DataError(f"{where}:{number}: {token[:80]!r} is no token of {vocab_where}: not its merges")
        merges.append(pair)
    if not merges:
        raise DataError(f"{where}: holds no merges")
    return merges


def _are_ids(content: dict[str, Any]) -> bool:
    # a bool is an int to Python, so the type itself
    return all(type(value) is int and value >= 0 for value in content.values())


def _special(content: str, number: int) -> dict[str, Any]:
    return {
        "id": number,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
