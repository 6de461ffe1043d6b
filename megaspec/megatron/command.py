"""A pretrain_gpt.py command line as words -> the flags that it gives, with their values."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megaspec.core.errors import Problem, RecipeError
from megaspec.core.problems import MOST_PROBLEMS, show
from megaspec.core.regular_files import open_regular
from megaspec.megatron.flag import Fate, Flag
from megaspec.megatron.flags import BY_NAME, hint
from megaspec.megatron.launcher import Ranks, count_ranks, what_is_refused
from megaspec.megatron.program import check_program, read_line
from megaspec.megatron.script import Script, script_words
from megaspec.megatron.shell_starts import find_start

_MAX_BYTES = 1 << 18
# Looking for the nearest flag takes milliseconds.
_LONGEST_HINT = 80
# Folders that a recipe names nowhere; a shell variable in them does no harm.
_ONLY_NAMED = ("--save", "--load", "--tensorboard-dir", "--tokenizer-model")
_NEGATIVE = re.compile(r"-[\d.]\S*")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_UNSET = "nothing sets it; give NAME=VALUE in front of @FILE, values of $1, $2, ... behind it"


@dataclass(frozen=True)
class Command:
    """What a command line says."""

    values: dict[str, Any]
    """First name of a flag -> its typed value; True for a flag without one, a list for a flag with several."""
    written: dict[str, str]
    """First name of a flag -> flag and value as they were written."""
    ranks: Ranks
    """The world size, as far as the launcher in front says it."""
    repeated: tuple[str, ...] = ()
    """Flags that were given more than once; the last one counts."""
    notes: tuple[str, ...] = ()
    """What was assumed while it was read."""

    @property
    def gpus(self) -> int | None:
        """Ranks of all nodes. None: no launcher says them."""
        return self.ranks.count


@dataclass
class _FlagReading:
    """What was read of the flags so far."""

    values: dict[str, Any] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    repeated: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, word: str, what: str) -> None:
        self.problems.append(Problem("", f"{show(word)}: {what}", "", "megatron-flag"))


def read_command(words: Sequence[str]) -> Command:
    """The command of a line's words, of one quoted word, or of a script: `[NAME=VALUE ...] @FILE [ARG ...]` or `FILE`.

    What stands before the program (assignments, a launcher with its own flags) is passed over, but for the number of
    ranks. RecipeError: a program that trains something else, or everything that is wrong with the flags, at once.
    """
    script = _spelled_out(words)
    settings, words = _split_settings([word for word in script.words if word.strip() and word.strip() != "\\"])
    line = read_line(words)
    why = what_is_refused(words, line)
    if why:
        raise RecipeError([Problem("", why, "", "megatron-program")])
    program = line.program
    notes = list(script.notes)
    flags = words
    if program is not None:
        flags = words[program.end :]
        notes += filter(None, [check_program(program)])
    elif words and not words[0].startswith(("-", "$")):
        raise RecipeError([Problem("", _no_program(words), "", "megatron-program")])
    reading = _FlagReading()
    _read_flags(flags, reading)
    if not reading.problems and not reading.values:
        reading.refuse("from-megatron", "no flags; give those of pretrain_gpt.py after --, or a file with the command")
    if reading.problems:
        raise RecipeError(_first_problems(reading.problems))
    ranks = count_ranks(words, line, settings=settings, directives=script.directives)
    return Command(reading.values, reading.written, ranks, tuple(dict.fromkeys(reading.repeated)), tuple(notes))


def _split_settings(words: list[str]) -> tuple[list[str], list[str]]:
    """The NAME=VALUE in front, and the words behind them."""
    for number, word in enumerate(words):
        if not _ASSIGNED.fullmatch(word):
            return words[:number], words[number:]
    return words, []


def _first_problems(problems: list[Problem]) -> list[Problem]:
    """As many as are read, and how many more there are."""
    rest = len(problems) - MOST_PROBLEMS
    if rest <= 0:
        return problems
    more = Problem("", f"{rest} more are wrong; mend these first", "", "megatron-flag")
    return [*problems[:MOST_PROBLEMS], more]


def _spelled_out(words: Sequence[str]) -> Script:
    """The words of the command itself, whichever way it is given."""
    environment = {}
    for n, word in enumerate(words):
        if word.startswith("@") and len(word) > 1:
            return _script(word[1:], words[n + 1 :], environment)
        match = _ASSIGNED.fullmatch(word)
        if match is None:
            break
        environment[match.group(1)] = match.group(2)
    if len(words) == 1:
        [word] = words
        if not word.startswith("-") and "\n" not in word and os.path.isfile(word):
            return _script(word, (), {})
        if any(c.isspace() for c in word):
            return script_words(word, label="the command")
    if find_start(words) is not None:
        # the command stands in a string that a shell is given: `srun -n 8 bash -c "python pretrain_gpt.py ..."`
        return script_words(shlex.join(words), label="the command")
    return Script(list(words), [], [])


def _no_program(words: Sequence[str]) -> str:
    """Why words are no command: they neither begin with a flag nor start a Python file or module."""
    for word in words:
        if word.endswith((".sh", ".bash", ".sbatch", ".slurm")):
            way_out = f"to have it read give @{word} with its arguments behind it"
            return f"{show(word)}: is a script, which is not run; {way_out}"
    return f"{show(words[0])}: starts no Python file; give the flags alone, or the command with its pretrain_gpt.py"


def _script(path: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Script:
    """What a file comes to. Links are followed, since the user names it; devices and FIFOs are not read."""
    try:
        with open(open_regular(os.path.realpath(path)), "rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise RecipeError(f"{path}: can't be read: {error.strerror}") from None
    if len(content) > _MAX_BYTES:
        raise RecipeError(f"{path}: a script has at most {_MAX_BYTES:,} bytes; give the command that it makes")
    text = content.decode("utf-8", errors="replace")
    return script_words(text, label=path, arguments=arguments, environment=environment)


def _read_flags(words: list[str], reading: _FlagReading) -> None:
    """`--name value ...` and `--name=value`, one flag after another."""
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("--"):
            reading.refuse(word, f"belongs to no flag{_why_not(word)}")
            continue
        name, equals, attached = word.partition("=")
        values = []
        if equals:
            values.append(attached)
        # the words up to the next flag
        while position < len(words) and not words[position].startswith("--"):
            values.append(words[position])
            position += 1
        flag = BY_NAME.get(name)
        if flag is None:
            reading.refuse(name, f"no flag of pretrain_gpt.py; {_nearest(name, reading) or 'drop it'}")
        else:
            _read_values(flag, name, values, reading, attached=bool(equals))


def _nearest(name: str, reading: _FlagReading) -> str:
    if len(reading.problems) > MOST_PROBLEMS or len(name) > _LONGEST_HINT:
        return ""
    return hint(name)


def _why_not(word: str) -> str:
    """What to do about a variable that stands where a flag could."""
    if "$" not in word:
        return ""
    return f", and {_UNSET}"


def _read_values(flag: Flag, name: str, words: list[str], reading: _FlagReading, *, attached: bool) -> None:
    """A flag and the words behind it. `name`: as it was written; `attached`: its first value stands behind `=`."""
    if flag.type is None and attached:
        return reading.refuse(f"{name}={words[0]}", f"takes no value; give {name} or leave it out")
    most = _most_values(flag, words, attached=attached)
    taken = words[:most]
    takes = "one value (quotes keep blanks in it)" if most else "none"
    for word in words[most:]:
        reading.refuse(word, f"belongs to no flag: {name} takes {takes}{_why_not(word)}")
    if flag.type is not None and flag.many != "*" and not taken:
        return reading.refuse(name, "its value is missing")
    separator = "=" if attached else " "
    values = []
    for word in taken:
        is_read = flag.fate is Fate.TRANSLATED and flag.name not in _ONLY_NAMED
        # one of several values could hold flags, too
        if "$" in word and (is_read or flag.many):
            reading.refuse(f"{name}{separator}{show(word)}", f"a shell variable, and {_UNSET}")
            continue
        if word.startswith("-") and flag.type in ("int", "float") and not _NEGATIVE.fullmatch(word):
            reading.refuse(word, f"is no value of {name}")
            continue
        try:
            values.append(flag.read(word))
        except ValueError as error:
            reading.refuse(f"{name}{separator}{word}", f"must be {error}")
    if flag.name in reading.values:
        reading.repeated.append(flag.name)
    reading.values[flag.name] = _value_of(flag, values)
    reading.written[flag.name] = separator.join([name, " ".join(taken)]) if taken else name
    return None


def _most_values(flag: Flag, words: Sequence[str], *, attached: bool) -> int:
    """How many of the words behind a flag may be its values; argparse gives a flag with `=` that one value alone."""
    if flag.type is None:
        return 0
    if flag.many and not attached:
        return len(words)
    return 1


def _value_of(flag: Flag, values: list[Any]) -> Any:
    """True for a flag without a value, a list for one with several; None where its only value is refused."""
    if flag.type is None:
        return True
    if flag.many:
        return values
    if not values:
        return None
    return values[0]
