"""`${path.to.key}` in a recipe: the value at another path, and nothing else: no functions, no environment."""

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from megaspec.core.errors import Problem
from megaspec.core.problems import origin_of, show, value_at

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
    result, found = deepcopy(dict(content)), dict(origins)
    references = [(key, text) for key, text in _texts(result, "") if "${" in text]

    def refuse(key: str, text: str, why: str) -> None:
        problems.append(Problem(key, f"{key}={show(text)}: {why}", origin_of(origins, key), "reference"))

    if sum(text.count("${") for _, text in references) > _MAX_REFERENCES:
        refuse(*references[0], f"more than {_MAX_REFERENCES} references; write the values")
        return result, found
    for key, text in references:
        if bad_references(text):
            refuse(key, text, "only ${path.to.key} is read: no functions, no environment")
            continue
        values = []
        for target in _REFERENCE.findall(text):
            path = _absolute(key, target)
            value = value_at(content, path)
            if value is None:
                refuse(key, text, f"{path} is not set")
            elif any("${" in inner for _, inner in _texts(value, "")):
                refuse(key, text, f"{path} is itself a reference; point at the value")
            else:
                values.append((path, value))
        if len(values) != len(_REFERENCE.findall(text)):
            continue
        if _REFERENCE.fullmatch(text):
            path, value = values[0]
            _put(result, key, deepcopy(value))
            below = {k.replace(path, key, 1): o for k, o in origins.items() if k.startswith(f"{path}.")}
            found.update(below)
        else:
            for target, (_, value) in zip(_REFERENCE.findall(text), values, strict=True):
                text = text.replace(f"${{{target}}}", show(value), 1)
            _put(result, key, text)
    return result, found


def _absolute(key: str, target: str) -> str:
    dots = len(target) - len(target.lstrip("."))
    if dots == 0:
        return target
    above = key.split(".")[:-dots]
    return ".".join([*above, target[dots:]])


def _texts(content: Any, prefix: str) -> list[tuple[str, str]]:
    if isinstance(content, str):
        return [(prefix, content)]
    parts = content.items() if isinstance(content, Mapping) else enumerate(content) if isinstance(content, list) else ()
    return [t for name, inner in parts for t in _texts(inner, f"{prefix}.{name}" if prefix else str(name))]


def _put(content: Any, key: str, value: Any) -> None:
    *above, last = key.split(".")
    for part in above:
        content = content[int(part)] if isinstance(content, list) else content[part]
    content[int(last) if isinstance(content, list) else last] = value
