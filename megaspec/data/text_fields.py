"""Which fields of a record are a document, and what is wrong with a record that is none."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

# Between the values of several keys that are one document.
JOIN = "\n\n"
# Characters of an input that a reason tells.
_SHOWN = 60
_MOST_KEYS = 6
_SURROGATE = re.compile("[\ud800-\udfff]")
_TYPES = (
    (type(None), "null"),
    (bool, "a boolean"),
    ((int, float), "a number"),
    (str, "a string"),
    ((list, tuple), "a list"),
    (Mapping, "an object"),
    (bytes, "bytes"),
)

BAD_KINDS = (
    "broken JSON",
    "no object",
    "missing key",
    "wrong type",
    "bad UTF-8",
    "empty document",
    "line too long",
    "no tokens",
)


@dataclass(frozen=True)
class BadLine:
    """A line that is no document."""

    kind: str
    """One of BAD_KINDS."""
    detail: str = ""
    """What was expected and found, or where in the line; "" where the kind says it all."""

    def __str__(self) -> str:
        if not self.detail:
            return self.kind
        return f"{self.kind}: {self.detail}"


@dataclass(frozen=True)
class TextFields:
    """The keys of a record whose values, joined in this order, are a document.

    A key with dots goes into objects (`meta.text`), unless the record has a key of that very name.
    """

    keys: tuple[str, ...] = ("text",)
    join: str = JOIN

    @staticmethod
    def of(key: "str | TextFields") -> "TextFields":
        """The fields where one key may be given by its name."""
        if isinstance(key, TextFields):
            return key
        return TextFields((key,))

    def text(self, record: Mapping[str, Any]) -> str | BadLine:
        """The document of a record."""
        values: list[str] = []
        for key in self.keys:
            value = _value(record, key)
            if isinstance(value, BadLine):
                return value
            if not isinstance(value, str):
                return BadLine("wrong type", f"{_quoted(key)} must be a string, found {found(value)}")
            values.append(value)
        return self.joined(values)

    def joined(self, values: list[str]) -> str | BadLine:
        """The values as one document; those that are empty get no separator."""
        if len(values) == 1:
            return checked_text(values[0])
        return checked_text(self.join.join(value for value in values if value.strip()))

    @cached_property
    def spellings(self) -> tuple[bytes, ...]:
        """The names of the keys, and of the objects on the way to them, as JSON writes them."""
        names: set[bytes] = set()
        for key in self.keys:
            for name in (key, *key.split(".")):
                names.add(json.dumps(name).encode())
                names.add(json.dumps(name, ensure_ascii=False).encode(errors="surrogatepass"))
        return tuple(sorted(names))


def checked_text(text: str) -> str | BadLine:
    """A text, or what keeps it from being a document."""
    if not text.strip():
        return BadLine("empty document")
    half = _SURROGATE.search(text)
    if half is not None:
        return BadLine("bad UTF-8", f"half a character, \\u{ord(half[0]):04x}, at character {half.start() + 1}")
    return text


def bad_utf8(error: UnicodeDecodeError) -> BadLine:
    """The first byte that is no UTF-8."""
    return BadLine("bad UTF-8", f"byte 0x{error.object[error.start]:02x} at byte {error.start + 1}")


def found(value: Any) -> str:
    """The type of a value in JSON's words, and the beginning of a number or string."""
    name = type(value).__name__
    for types, said in _TYPES:
        if isinstance(value, types):
            name = said
            break
    if isinstance(value, (int, float, str)):
        name += f" ({json.dumps(value)[:_SHOWN]})"
    return name


def _value(record: Mapping[str, Any], key: str) -> Any:
    """What a record holds under a key or a path; BadLine where there is nothing."""
    if key in record:
        return record[key]
    value: Any = record
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return BadLine("missing key", f"no {_quoted(key)}; the line has {_listed(record)}")
        value = value[name]
    return value


def _listed(record: Mapping[str, Any]) -> str:
    names = [_quoted(name) for name in list(record)[:_MOST_KEYS]]
    if len(record) > _MOST_KEYS:
        names.append("...")
    return ", ".join(names) or "no key"


def _quoted(name: str) -> str:
    return json.dumps(name[:_SHOWN])
