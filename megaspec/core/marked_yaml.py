"""YAML as data: plain mappings, lists and scalars with the line of each, within fixed bounds.

Scalars follow YAML 1.2's core schema, so that `on`, `017` and `1:30` stay the text that they look like and strict types
refuse them where a number or a truth value is due. Tags, recursive aliases, merge keys and repeated keys are refused.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megaspec.core.errors import Problem, RecipeError

MAX_BYTES = 256 * 1024
MAX_DEPTH = 32
MAX_NODES = 10_000
MAX_KEY = 100

_NULL = {"", "~", "null", "Null", "NULL"}
_TRUTH = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_WHOLE = r"(?:0|[1-9][0-9_]{0,30})"
_INT = re.compile(rf"[-+]?{_WHOLE}")
_FLOAT = re.compile(rf"[-+]?(?:{_WHOLE}?\.[0-9]{{1,30}}|{_WHOLE}\.?)(?:[eE][-+]?[0-9]{{1,4}})?")
_NOT_FINITE = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}


class Quoted(str):
    """A text that stands in quotes, so that it is no number, whatever it looks like."""

    __slots__ = ()


@dataclass(frozen=True)
class MarkedYaml:
    """What a file holds, and where: `lines` gives the 1-based line of each dotted path (`optim.lr`, `data.blend.0`)."""

    content: dict[str, Any]
    lines: dict[str, int]


@dataclass
class _Node:
    value: Any
    lines: dict[str, int] = field(default_factory=dict)
    size: int = 1
    done: bool = True


@dataclass
class _OpenCollection:
    """A mapping or list whose end has not been read."""

    node: _Node
    is_mapping: bool
    line: int
    key: str | None = None


def read_yaml(path: Path, *, label: str) -> MarkedYaml:
    """Read a file that must hold one mapping. `label` is how errors name it.

    RecipeError, with file:line: unreadable, too large, too deep, not YAML, not a mapping, or one of the refusals above.
    """
    return parse_yaml(read_text(path, label=label), label=label)


def read_text(path: Path, *, label: str) -> str:
    """The text of such a file. RecipeError: unreadable, or too large."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RecipeError(f"{label} can't be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise RecipeError(f"{label} is larger than {MAX_BYTES} bytes, which no recipe needs")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise RecipeError(f"{label} is not UTF-8: byte {error.start} is {raw[error.start]:#04x}") from None


def parse_yaml(text: str, *, label: str) -> MarkedYaml:
    """The same as `read_yaml`, from text."""
    try:
        root = _Builder(label).build(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        where = f"{label}:{mark.line + 1}" if mark else label
        what = getattr(error, "problem", None) or str(error)
        raise RecipeError([Problem("", f"not valid YAML: {what}", where, "yaml.syntax")]) from None
    if root is None or root.value is None:
        return MarkedYaml({}, {})
    if not isinstance(root.value, dict):
        raise RecipeError([Problem("", "a recipe is a mapping of keys to values", f"{label}:1", "yaml.mapping")])
    return MarkedYaml(root.value, root.lines)


class _Builder:
    """Builds values from parser events with an explicit stack, so that neither depth nor aliases can run away."""

    def __init__(self, label: str):
        self._label = label
        self._stack: list[_OpenCollection] = []
        self._anchors: dict[str, _Node] = {}
        self._nodes = 0
        self._root: _Node | None = None

    def build(self, text: str) -> _Node | None:
        documents = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            line = event.start_mark.line + 1
            match event:
                case yaml.DocumentStartEvent():
                    documents += 1
                    if documents > 1:
                        raise self._refuse(line, "a recipe is one document", "remove the second `---`", "yaml.document")
                case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                    self._open(event, line)
                case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                    ended = self._stack.pop()
                    ended.node.done = True
                    self._place(ended.node, ended.line, counted=True)
                case yaml.ScalarEvent():
                    self._refuse_tag(event, line)
                    node = _Node(_scalar(event))
                    self._anchor(event, node)
                    self._place_or_key(node, event, line)
                case yaml.AliasEvent():
                    self._place_or_key(self._alias(event.anchor, line), event, line)
        return self._root

    def _open(self, event: yaml.Event, line: int) -> None:
        self._refuse_tag(event, line)
        is_mapping = isinstance(event, yaml.MappingStartEvent)
        if self._stack and self._stack[-1].is_mapping and self._stack[-1].key is None:
            raise self._refuse(line, "a key is plain text", "write `key: value`", "yaml.key")
        if len(self._stack) >= MAX_DEPTH:
            raise self._refuse(line, f"nested deeper than {MAX_DEPTH}", "flatten it", "yaml.depth")
        # empty until its parts have come
        empty: dict[str, Any] | list[Any] = {} if is_mapping else []
        node = _Node(empty, done=False)
        self._anchor(event, node)
        self._stack.append(_OpenCollection(node, is_mapping, line))

    def _anchor(self, event: yaml.Event, node: _Node) -> None:
        if event.anchor:
            self._anchors[event.anchor] = node

    def _alias(self, name: str, line: int) -> _Node:
        node = self._anchors.get(name)
        if node is None:
            raise self._refuse(line, f"*{name} has no anchor", f"mark a value with &{name} above", "yaml.alias")
        if not node.done:
            raise self._refuse(line, f"*{name} holds itself", "write the value out", "yaml.alias")
        return node

    def _place_or_key(self, node: _Node, event: yaml.Event, line: int) -> None:
        top = self._stack[-1] if self._stack else None
        is_key = top is not None and top.is_mapping and top.key is None
        if not is_key:
            self._place(node, line, counted=False)
            return
        key = getattr(event, "value", node.value)
        if not isinstance(key, str):
            raise self._refuse(line, "a key is plain text", "write `key: value`", "yaml.key")
        if key == "<<":
            raise self._refuse(line, "`<<` merges hide where a value is from", "inherit with `defaults:`", "yaml.merge")
        if len(key) > MAX_KEY:
            text = f"{key[:20]}... is longer than {MAX_KEY} characters"
            raise self._refuse(line, text, "no key of a recipe is", "yaml.key")
        if key in top.node.value:
            first = top.node.lines.get(key, "?")
            raise self._refuse(line, f"{key} is set twice, first in line {first}", "keep one", "yaml.duplicate")
        top.key = key
        top.node.lines[key] = line

    def _place(self, node: _Node, line: int, *, counted: bool) -> None:
        """Put a finished value into the mapping or list around it. `counted`: its parts were counted as they came."""
        self._nodes += 1 if counted else node.size
        if self._nodes > MAX_NODES:
            raise self._refuse(
                line, f"more than {MAX_NODES} values, aliases counted each time", "shorten it", "yaml.size"
            )
        if not self._stack:
            self._root = node
            return
        top = self._stack[-1]
        if top.is_mapping:
            assert top.key is not None, "a value came before its key"
            part = top.key
            top.key = None
            top.node.value[part] = node.value
        else:
            part = str(len(top.node.value))
            top.node.value.append(node.value)
            top.node.lines[part] = line
        top.node.size += node.size
        top.node.lines.update((f"{part}.{below}", where) for below, where in node.lines.items())

    def _refuse_tag(self, event: yaml.Event, line: int) -> None:
        if event.tag is not None:
            raise self._refuse(line, f"tag {event.tag} is refused: a recipe is data", "remove the tag", "yaml.tag")

    def _refuse(self, line: int, what: str, way_out: str, code: str) -> RecipeError:
        return RecipeError([Problem("", f"{what}; {way_out}", f"{self._label}:{line}", code)])


def _scalar(event: yaml.ScalarEvent) -> Any:
    """The value of a scalar: quotes make a text of it, whatever it looks like."""
    if event.style is not None:
        return Quoted(event.value)
    return plain_scalar(event.value)


def plain_scalar(text: str) -> Any:
    """What a text without quotes stands for: null, true or false, a number, or the text."""
    if text in _NULL:
        return None
    if text in _TRUTH:
        return _TRUTH[text]
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    if text.lower() in _NOT_FINITE:
        return float(_NOT_FINITE[text.lower()])
    return text
