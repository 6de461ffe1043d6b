"""Python data as a recipe's: what a YAML file could say, and nothing else."""

from collections.abc import Mapping
from typing import Any

from megaspec.core.errors import Problem
from megaspec.core.marked_yaml import MAX_DEPTH
from megaspec.core.problems import path_below, show

_SCALARS = (str, int, float, bool, type(None))


def plain_content(content: Any, label: str, problems: list[Problem]) -> dict[str, Any]:
    """A copy of plain dicts and lists; what is no data of a recipe is left out and told in `problems`. `label`: what
    errors call the content."""
    if not isinstance(content, Mapping):
        text = (
            f"a recipe is a dict of keys to values, not a {type(content).__name__}; write {{'train': {{'steps': 9}}}}"
        )
        problems.append(Problem("", text, label, "data.mapping"))
        return {}
    return _plain(content, "", label, problems)


def _plain(value: Any, key: str, label: str, problems: list[Problem]) -> Any:
    if isinstance(value, _SCALARS):
        return value
    if key.count(".") >= MAX_DEPTH:
        problems.append(Problem(key, f"{key} is nested deeper than {MAX_DEPTH}; flatten it", label, "data.depth"))
        return None
    if isinstance(value, Mapping):
        return _plain_mapping(value, key, label, problems)
    if isinstance(value, list | tuple):
        return [_plain(one, f"{key}.{place}", label, problems) for place, one in enumerate(value)]
    text = (
        f"{key}={show(value)} is of type {type(value).__name__}; a recipe holds text, numbers, True, False, None, lists"
    )
    problems.append(Problem(key, f"{text} and dicts: write str(...), int(...) or float(...)", label, "data.kind"))
    return None


def _plain_mapping(value: Mapping[Any, Any], key: str, label: str, problems: list[Problem]) -> dict[str, Any]:
    found = {}
    for name, inner in value.items():
        path = path_below(key, name)
        if not isinstance(name, str):
            text = f"{path}: a key is text, {show(name)} is of type {type(name).__name__}; write {str(name)!r}"
            problems.append(Problem(path, text, label, "data.key"))
        elif "." in name:
            outer, _, rest = name.partition(".")
            text = f"{path}: a key has no dot; write {{{outer!r}: {{{rest!r}: ...}}}}"
            problems.append(Problem(path, text, label, "data.key"))
        else:
            found[name] = _plain(inner, path, label, problems)
    return found
