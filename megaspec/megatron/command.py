"""A pretrain_gpt.py command line as words -> the flags that it gives, with their values."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaspec.core.errors import Problem, RecipeError
from megaspec.megatron.flag import Fate, Flag
from megaspec.megatron.flags import BY_NAME, hint
from megaspec.megatron.script import script_words

_MAX_BYTES = 1 << 20
# Folders that a recipe names nowhere; a shell variable in them does no harm.
_ONLY_NAMED = ("--save", "--load", "--tensorboard-dir", "--tokenizer-model")
_NEGATIVE = re.compile(r"-[\d.]\S*")


@dataclass(frozen=True)
class Command:
    """What a command line says."""

    values: dict[str, Any]
    """First name of a flag -> its typed value; True for a flag without one, a list for a flag with several."""
    written: dict[str, str]
    """First name of a flag -> flag and value as they were written."""
    gpus: int | None
    """torchrun's processes on all nodes. None: it does not say."""
    repeated: tuple[str, ...] = ()
    """Flags that were given more than once; the last one counts."""


@dataclass
class _Reading:
    values: dict[str, Any] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    repeated: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, word: str, what: str) -> None:
        self.problems.append(Problem("", f"{word}: {what}", "", "megatron-flag"))


def read_command(words: Sequence[str]) -> Command:
    """The command of a line's words, of one quoted word, or of the file `@FILE` or `FILE`.

    What stands before the script (assignments, torchrun or srun with their own flags) is passed over, but for the
    number of processes. RecipeError: everything that is wrong with the flags, at once.
    """
    words = [w for w in _spelled_out(words) if w.strip() and w.strip() != "\\"]
    start = next((n + 1 for n, w in enumerate(words) if w.endswith(".py")), None)
    if start is None:
        start = next((n for n, w in enumerate(words) if not re.match(r"[A-Za-z_]\w*=", w)), len(words))
    reading = _Reading()
    _read_flags(words[start:], reading)
    if not reading.problems and not reading.values:
        reading.refuse("from-megatron", "no flags; give those of pretrain_gpt.py after --, or a file with the command")
    if reading.problems:
        raise RecipeError(reading.problems)
    return Command(reading.values, reading.written, _processes(words[:start]), tuple(dict.fromkeys(reading.repeated)))


def _spelled_out(words: Sequence[str]) -> list[str]:
    if len(words) != 1:
        return list(words)
    [word] = words
    path = Path(word.removeprefix("@"))
    if word.startswith("@") or (not word.startswith("-") and "\n" not in word and path.is_file()):
        try:
            with path.open("rb") as file:
                return script_words(file.read(_MAX_BYTES).decode("utf-8", errors="replace"), label=str(path))
        except OSError as error:
            raise RecipeError(f"{path}: can't be read: {error.strerror}") from None
    if any(c.isspace() for c in word):
        return script_words(word, label="the command")
    return [word]


def _read_flags(words: list[str], reading: _Reading) -> None:
    position = 0
    while position < len(words):
        name, equals, attached = words[position].partition("=")
        position += 1
        if not name.startswith("--"):
            reading.refuse(words[position - 1], "belongs to no flag")
            continue
        behind = []
        while position < len(words) and not words[position].startswith("--"):
            behind.append(words[position])
            position += 1
        flag = BY_NAME.get(name)
        if flag is None:
            reading.refuse(name, f"no flag of pretrain_gpt.py; {hint(name) or 'drop it'}")
        else:
            _read_values(flag, name, [*([attached] if equals else []), *behind], reading, attached=bool(equals))


def _read_values(flag: Flag, name: str, words: list[str], reading: _Reading, *, attached: bool) -> None:
    most = 0 if flag.type is None else len(words) if flag.many and not attached else 1
    taken, left = words[:most], words[most:]
    if flag.type is None and attached:
        return reading.refuse(f"{name}={words[0]}", f"takes no value; give {name} or leave it out")
    for word in left:
        reading.refuse(word, f"belongs to no flag: {name} takes {'one value' if most else 'none'}")
    if flag.type is not None and flag.many != "*" and not taken:
        return reading.refuse(name, "its value is missing")
    values = []
    for word in taken:
        if "$" in word and flag.fate is Fate.TRANSLATED and flag.name not in _ONLY_NAMED:
            reading.refuse(f"{name} {word}", "a shell variable; give its value, or the words that `echo` prints for it")
            continue
        if word.startswith("-") and flag.type in ("int", "float") and not _NEGATIVE.fullmatch(word):
            reading.refuse(word, f"is no value of {name}")
            continue
        try:
            values.append(flag.read(word))
        except ValueError as error:
            reading.refuse(f"{name} {word}", f"must be {error}")
    if flag.name in reading.values:
        reading.repeated.append(flag.name)
    reading.values[flag.name] = True if flag.type is None else values if flag.many else (values or [None])[0]
    reading.written[flag.name] = " ".join([name, *taken])
    return None


def _processes(prefix: list[str]) -> int | None:
    """Processes of torchrun on all nodes, where both numbers are plain."""
    found = {"nproc-per-node": "", "nnodes": "1"}
    for word, behind in zip(prefix, [*prefix, ""][1:], strict=True):
        name, equals, value = word.lstrip("-").replace("_", "-", 2).partition("=")
        name = name.replace("_", "-")
        if word.startswith("--") and name in found:
            found[name] = value if equals else behind
    numbers = [int(v) if v.isdecimal() else 0 for v in found.values()]
    return numbers[0] * numbers[1] or None
