"""One flag of Megatron's command line: what it is called, what it takes, and what becomes of it here."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

COMMIT = "d98e8a64ddf34856e74b24714e3bedb2f5a39553"
"""Of NVIDIA/Megatron-LM: where the table of its flags, their defaults and what they do there were read."""
COMMIT_DATE = "2026-08-22"

_ENTRY = re.compile(
    r"(?P<names>--\S+(?: --\S+)*)"
    r"(?: (?P<type>(?!=|->)\S+?)(?P<many>[+*]?))?"
    r"(?: = (?P<default>\S+))?"
    r"(?: -> (?P<key>\S+))?"
)


class Fate(Enum):
    """What becomes of a flag."""

    TRANSLATED = "translated"
    IDLE = "idle"
    """It has no meaning here: something else decides."""
    ABSENT = "absent"
    """It has no counterpart; what is computed stays the same."""
    LOST = "lost"
    """It has no counterpart, and without it something else is trained."""
    DETAIL = "detail"
    """It belongs to another flag, and says nothing without that one."""
    DEAD = "dead"
    """Megatron itself reads it nowhere."""
    REMOVED = "removed"
    """Megatron itself refuses it."""


@dataclass(frozen=True)
class Flag:
    """A flag. Facts of NVIDIA/Megatron-LM at COMMIT."""

    names: tuple[str, ...]
    type: str | None
    """int, float, text, or the words that it takes, as in `a|b`. None: it takes no value."""
    many: str
    """"+": one or more values. "*": any number of values. "": one."""
    default: str | None
    """What Megatron does without it; of flags that are translated or lost."""
    fate: Fate
    text: str
    """The key of a recipe, the reason, or the flag that it belongs to."""
    origin: str = ""
    """Whose flag it is, where pretrain_gpt.py at COMMIT doesn't have it. "": it has."""

    @property
    def reason(self) -> str:
        """Why no key is from it, with whose flag it is."""
        if not self.origin:
            return self.text
        return f"{self.origin}: {self.text}"

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    def read(self, word: str) -> Any:
        """A value with its type. ValueError: it has another, in words."""
        if self.type == "int":
            return _number(int, word, "a whole number")
        if self.type == "float":
            return _number(float, word, "a number")
        words = (self.type or "").split("|")
        if len(words) > 1 and word not in words:
            raise ValueError(" or ".join([", ".join(words[:-1]), words[-1]]))
        return word

    @property
    def default_value(self) -> Any:
        """The default with its type: False for a flag without a value, None where Megatron has none."""
        if self.type is None:
            return False
        if self.default is None:
            return None
        if self.many:
            return [self.read(word) for word in self.default.split(",")]
        return self.read(self.default)


def _number(read: type[int] | type[float], word: str, in_words: str) -> int | float:
    try:
        return read(word)
    except ValueError:
        raise ValueError(in_words) from None


@dataclass(frozen=True)
class FlagGroup:
    """Flags that share a fate and its reason, as a table: `--name [--alias] [type[+|*]] [= default] [-> key]`, commas
    or new lines between them."""

    fate: Fate
    text: str
    table: str
    origin: str = ""
    """Of all flags of the table: see Flag.origin."""

    def flags(self) -> Iterator[Flag]:
        """The flags of the table."""
        for entry in re.split(r",\s|\n", self.table):
            words = " ".join(entry.rstrip(",").split())
            if not words:
                continue
            match = _ENTRY.fullmatch(words)
            assert match, f"no entry of a flag table: {words}"
            names, kind, many, default, key = match.group("names", "type", "many", "default", "key")
            yield Flag(tuple(names.split()), kind, many or "", default, self.fate, key or self.text, self.origin)


def others(origin: str, fate: Fate, text: str, names: str) -> FlagGroup:
    """Flags that pretrain_gpt.py at COMMIT does not have. How many values they take is not kept: each takes the words
    up to the next flag."""
    table = "\n".join(f"{name} text*" for name in names.replace(",", " ").split())
    return FlagGroup(fate, text, table, origin)
