"""Plain data as YAML that `marked_yaml` reads back as it was, and so does every reader of YAML 1.2, or of 1.1."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from megaspec.core.marked_yaml import plain_scalar
from megaspec.core.problems import path_below

_INDENT = "  "
_NO_WRAPPING = 10**6
# Where remarks begin, if the lines before them are not longer.
_REMARK_COLUMN = 40


def yaml_lines(content: Mapping[str, Any], remark: Callable[[str], str] | None = None) -> Iterator[str]:
    """Sections as the lines of a file: a line for every value, lists of plain values on one.

    `remark`: what to say behind the value at a dotted path (`data.blend.0.prefix`), one printable line; "": nothing.
    """
    if remark is None:
        remark = _no_remark
    return _section(content, "", "", remark)


def flow(value: Any, *, is_in_brackets: bool = False) -> str:
    """A value on one line: a text in quotes where it would be read as anything else without them."""
    if isinstance(value, Mapping):
        entries = []
        for name, inner in value.items():
            entries.append(f"{flow(name, is_in_brackets=True)}: {flow(inner, is_in_brackets=True)}")
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(flow(inner, is_in_brackets=True) for inner in value)}]"
    if not isinstance(value, str):
        return _dumped(value)
    if not value.isprintable():
        # escapes, so that nothing in it acts on a terminal
        return _dumped(value, default_style='"', allow_unicode=False)
    text = _dumped(value)
    if is_in_brackets:
        # commas and brackets are quoted there
        text = _dumped([value], default_flow_style=True)[1:-1]
    if text == value and plain_scalar(value) != value:
        # a number for YAML 1.2 alone, as 1e5 is
        return f"'{value}'"
    return text


def _dumped(value: Any, **how: Any) -> str:
    text = yaml.safe_dump(value, **{"width": _NO_WRAPPING, "allow_unicode": True} | how)
    return text.removesuffix("\n").removesuffix("\n...")


def _no_remark(_: str) -> str:
    return ""


def _section(content: Mapping[str, Any], path: str, indent: str, remark: Callable[[str], str]) -> Iterator[str]:
    for name, value in content.items():
        key = path_below(path, name)
        yield from _entry(f"{indent}{flow(name)}:", value, key, indent, remark)


def _entry(start: str, value: Any, key: str, indent: str, remark: Callable[[str], str]) -> Iterator[str]:
    """The lines of a value; `start` is what stands before it."""
    below = indent + _INDENT
    if isinstance(value, Mapping) and value:
        yield start
        yield from _section(value, key, below, remark)
        return
    if isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
        yield start
        for number, entry in enumerate(value):
            yield from _list_entry(entry, path_below(key, number), below, remark)
        return
    yield _with_remark(f"{start} {flow(value)}", remark(key))


def _list_entry(entry: Any, key: str, indent: str, remark: Callable[[str], str]) -> Iterator[str]:
    """`- prefix: ...`, the other keys below the first one."""
    if not isinstance(entry, Mapping) or not entry:
        yield _with_remark(f"{indent}- {flow(entry)}", remark(key))
        return
    mark = f"{indent}- "
    for line in _section(entry, key, indent + _INDENT, remark):
        yield mark + line[len(mark) :]
        mark = " " * len(mark)


def _with_remark(line: str, text: str) -> str:
    if not text:
        return line
    return f"{line.ljust(_REMARK_COLUMN - 2)}  # {text}"
