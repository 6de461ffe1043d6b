"""Prompts of `megaspec generate`: texts of the command line, and lines of files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaspec.core.errors import DataError, RecipeError

_WRITTEN = ("text", "end", "prompt_tokens", "tokens", "sample")
"""Keys of an output line that generate writes."""


def prompts_of(texts: Sequence[str], files: Sequence[str]) -> list[dict[str, Any]]:
    """Each as an object with its text under `prompt`. RecipeError: there are none, or a text is no UTF-8. DataError: a
    file that can't be read as prompts."""
    prompts: list[dict[str, Any]] = []
    for text in texts:
        _refuse_surrogates(text, "TEXT")
        prompts.append({"prompt": text})
    for file in files:
        prompts += read_prompts(Path(file))
    if not prompts:
        raise RecipeError("there is nothing to go on from; give TEXT, or --prompts FILE")
    return prompts


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """A .jsonl file of objects with a text under `prompt`, or a .txt file with a prompt a line. Empty lines are left
    out. DataError: every line that is wrong."""
    if path.suffix not in (".jsonl", ".txt"):
        raise DataError(
            f"--prompts {path}: must end with .jsonl, an object with `prompt` a line, or .txt, a text a line"
        )
    try:
        content = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(f"--prompts {path}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"--prompts {path}: is no UTF-8: {error}") from None
    found = []
    problems = []
    # line ends alone: JSON may hold other separators of lines
    for number, line in enumerate(content.split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        if path.suffix == ".txt":
            found.append({"prompt": line})
            continue
        try:
            found.append(_object(line))
        except ValueError as error:
            problems.append(f"--prompts {path}:{number}: {error}")
    if not found and not problems:
        problems.append(f"--prompts {path}: holds no line")
    if problems:
        raise DataError(problems[:20])
    return found


def _object(line: str) -> dict[str, Any]:
    """ValueError: no object with a prompt."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from None
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
        raise ValueError('must be an object with a text under "prompt", such as {"prompt": "Once"}')
    if any("\ud800" <= c <= "\udfff" for c in value["prompt"]):
        raise ValueError("its prompt is not valid Unicode: it holds half of a surrogate pair")
    taken = [key for key in _WRITTEN if key in value]
    if taken:
        raise ValueError(f"has the key {taken[0]}, which generate writes; give it another name")
    return value


def _refuse_surrogates(text: str, what: str) -> None:
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise RecipeError(f"{what} is not valid UTF-8; give it in the encoding of the terminal")
