"""`${path.to.key}` in a recipe: the value at another path, and nothing else: no functions, no environment."""

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from megaspec.core.errors import Problem
from megaspec.core.problems import origin_of, parts_of, path_below, show, value_at

_REFERENCE = re.compile(r"\$\{(\.*[A-Za-z0-9_.]+)\}")
_MAX_REFERENCES = 100


def bad_references(text: str) -> bool:
    """True when a text holds a `${` that is not a plain `${path.to.key}`."""
    return text.count("${") != len(_REFERENCE.findall(text))


def interpolate(
    content: Mapping[str, Any], origins: Mapping[str, str], problems: list[Problem]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Copies of content and origins with every reference replaced. What is wrong is added to `problems`.

    A reference points at a plain value or a section of plain values, by its full path or, with leading dots, from the
    section that it stands in. A text that is one reference takes the value as it is, with its type.
    """
    replaced = deepcopy(dict(content))
    new_origins = dict(origins)
    with_references = [(key, text) for key, text in _texts(replaced) if "${" in text]

    def refuse(key: str, text: str, why: str) -> None:
        problems.append(Problem(key, f"{key}={show(text)}: {why}", origin_of(origins, key), "reference"))

    if sum(text.count("${") for _, text in with_references) > _MAX_REFERENCES:
        refuse(*with_references[0], f"more than {_MAX_REFERENCES} references; write the values")
        return replaced, new_origins
    for key, text in with_references:
        if bad_references(text):
            refuse(key, text, "only ${path.to.key} is read: no functions, no environment")
            continue
        references, refusals = _looked_up(content, key, text)
        for why in refusals:
            refuse(key, text, why)
        if refusals:
            continue
        if _REFERENCE.fullmatch(text):
            [reference] = references
            _put(replaced, key, deepcopy(reference.value))
            # what lies in a section that is taken over keeps the place where it was set
            for path, origin in origins.items():
                if path.startswith(f"{reference.path}."):
                    new_origins[path.replace(reference.path, key, 1)] = origin
        else:
            for reference in references:
                text = text.replace(f"${{{reference.written}}}", show(reference.value), 1)
            _put(replaced, key, text)
    return replaced, new_origins


@dataclass(frozen=True)
class _Reference:
    """A `${...}` that points at something."""

    written: str
    """What stands in the braces."""
    path: str
    """The dotted path that it means, from the top."""
    value: Any


def _looked_up(content: Mapping[str, Any], key: str, text: str) -> tuple[list[_Reference], list[str]]:
    """The references of the text at a key, in order, and why those that are missing here can't be taken."""
    references = []
    refusals = []
    for written in _REFERENCE.findall(text):
        path = _absolute(key, written)
        value = value_at(content, path)
        if value is None:
            refusals.append(f"{path} is not set")
        elif any("${" in inner for _, inner in _texts(value)):
            refusals.append(f"{path} is itself a reference; point at the value")
        else:
            references.append(_Reference(written, path, value))
    return references, refusals


def _absolute(key: str, target: str) -> str:
    """The full path of a reference at `key`: one leading dot is the key's own section, each more one section up."""
    dots = len(target) - len(target.lstrip("."))
    if dots == 0:
        return target
    above = key.split(".")[:-dots]
    return ".".join([*above, target[dots:]])


def _texts(content: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every text of plain data, with its dotted path."""
    if isinstance(content, str):
        yield prefix, content
        return
    for name, inner in parts_of(content):
        yield from _texts(inner, path_below(prefix, name))


def _put(content: Any, key: str, value: Any) -> None:
    """Replace the value at a dotted path that exists."""
    *above, last = key.split(".")
    for part in above:
        content = content[_index(content, part)]
    content[_index(content, last)] = value


def _index(content: Any, part: str) -> int | str:
    """What a part of a path is called in the list or section that holds it."""
    if isinstance(content, list):
        return int(part)
    return part
