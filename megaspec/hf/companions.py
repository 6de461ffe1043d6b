"""The files that belong to weights: tokenizer, chat template, settings of generation. Kept byte for byte. Torch-free.

A run keeps them in `tokenizer/`, with the config.json that the weights came with, so that a folder can be written later
without the one they are from.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megaspec.checkpoint.files import open_folder, read_limited
from megaspec.core.errors import CheckpointError
from megaspec.core.regular_files import check_kinds
from megaspec.hf.cache import read_file
from megaspec.hf.folder import CONFIG, CONFIG_LIMIT, as_json, parse_object

FOLDER = "tokenizer"
"""Below a run's folder."""
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
NAMES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    TEMPLATE,
    "chat_template.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
    GENERATION,
)
"""What is kept beside config.json."""
LIMIT = 256 << 20
"""Bytes of one of them."""
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_companions(path: Path) -> dict[str, bytes]:
    """Those that a folder has, and its config.json. `path` has no links, and files are opened as cache.py does it.

    CheckpointError: one is another link, too large or can't be read.
    """
    return _read_all(path, read_file)


def _read_all(path: Path, read: Callable[..., bytes]) -> dict[str, bytes]:
    folder_fd = open_folder(path)
    try:
        present = set(os.listdir(folder_fd))
        found = {}
        for name in (*NAMES, CONFIG):
            if name in present:
                limit = CONFIG_LIMIT if name == CONFIG else LIMIT
                found[name] = read(path, folder_fd, name, limit=limit)
        return found
    finally:
        os.close(folder_fd)


def kept_companions(run_dir: Path) -> dict[str, bytes]:
    """Those that a run keeps; none where it began without. CheckpointError: as `read_companions`."""
    try:
        check_kinds(run_dir, folders=(FOLDER,))
    except OSError as error:
        raise CheckpointError(f"{error.filename} {error.strerror}") from None
    if not (run_dir / FOLDER).is_dir():
        return {}
    # a run's folder has no links
    return _read_all(run_dir / FOLDER, read_limited)


def refuse_other_vocabulary(files: Mapping[str, bytes], *, vocab_size: int, where: str) -> None:
    """CheckpointError: the tokenizer's vocabulary has ids that a model of `vocab_size` tokens has no row for.

    A smaller one is fine: tables are padded. Added tokens may lie behind it, as one for images in a model of text.
    """
    for name in (TOKENIZER, "vocab.json"):
        if name not in files:
            continue
        content = parse_object(files[name], f"{where}/{name}")
        vocabulary: Any = content
        if name == TOKENIZER:
            model = content.get("model")
            vocabulary = model.get("vocab") if isinstance(model, dict) else None
        largest = _largest_id(vocabulary)
        if largest is None:
            raise CheckpointError(f"{where}/{name}: its vocabulary must name a number for each token")
        if largest >= vocab_size:
            text = f"{where}/{name} has tokens up to {largest:,}, config.json says vocab_size={vocab_size:,}: it is the"
            raise CheckpointError(f"{text} tokenizer of another model; put the right one beside the weights")


def _largest_id(vocabulary: Any) -> int | None:
    """Of {token: id}, or of a list of tokens in the order of their ids; None: it is neither."""
    if isinstance(vocabulary, list):
        return len(vocabulary) - 1
    if not isinstance(vocabulary, dict) or not all(type(number) is int for number in vocabulary.values()):
        return None
    return max(vocabulary.values(), default=-1)


def token_ids(kept: Mapping[str, bytes]) -> dict[str, Any]:
    """The ids of special tokens that the weights' own config.json names."""
    if CONFIG not in kept:
        return {}
    config = parse_object(kept[CONFIG], CONFIG)
    return {name: config[name] for name in _IDS if config.get(name) is not None}


def end_ids(files: Mapping[str, bytes], where: str) -> frozenset[int]:
    """The tokens that end a text, as generation_config.json says, or else config.json; empty where neither does.

    CheckpointError: they are no token ids.
    """
    for name in (GENERATION, CONFIG):
        if name not in files:
            continue
        said = parse_object(files[name], f"{where}/{name}").get("eos_token_id")
        if said is None:
            continue
        ids = said if isinstance(said, list) else [said]
        if not ids or not all(type(one) is int and one >= 0 for one in ids):
            raise CheckpointError(f"{where}/{name}: eos_token_id={said!r} must be a token id, or a list of some")
        return frozenset(ids)
    return frozenset()


def with_template_in_both_places(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """A chat template is read from chat_template.jinja by some programs and from tokenizer_config.json by others."""
    found = dict(files)
    if TOKENIZER_CONFIG not in found:
        return found
    config = parse_object(found[TOKENIZER_CONFIG], TOKENIZER_CONFIG)
    template = config.get("chat_template")
    if TEMPLATE in found and template is None:
        try:
            text = found[TEMPLATE].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{TEMPLATE} is no UTF-8: {error}") from None
        found[TOKENIZER_CONFIG] = as_json(config | {"chat_template": text})
    elif TEMPLATE not in found and isinstance(template, str):
        found[TEMPLATE] = template.encode()
    return found


def generation_config(ids: Mapping[str, Any]) -> bytes:
    """For a run that keeps none: which tokens begin and end a text."""
    return as_json({"_from_model_config": True, **ids})


def plain_tokenizer_config(tokenizer_json: bytes, *, eod: int | None, max_seq_len: int) -> bytes:
    """For a tokenizer.json alone: the class that reads any of them, and the token that ends a document."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_seq_len}
    if eod is not None:
        for token in json.loads(tokenizer_json).get("added_tokens", []):
            if token["id"] == eod:
                config["eos_token"] = token["content"]
    return as_json(config)
