"""Errors that a user can cause or has to act on. Each class carries the exit code that schedulers read."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def printable(text: str, *, keep: str = "") -> str:
    """The text with line breaks and whatever else a terminal would act on written as escapes, but for those to keep."""
    if text.isprintable():
        return text
    characters = []
    for character in text:
        if not character.isprintable() and character not in keep:
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)


def without_secrets(text: str, *, key: str) -> str:
    """A message about `key` with stars for what addresses in it may hold of secrets: user, password and query, and the
    path of a webhook."""
    text = re.sub(r"(\w+://)[^/@\s]*@", r"\1***@", text)
    text = re.sub(r"(\w+://[^?\s]*)\?[^\s=]*=[^\s,;)]*", r"\1?***", text)
    if key.startswith("log.webhook"):
        text = re.sub(r"(https?://[^/\s]*)/[^\s:;,]*", r"\1/***", text)
    return text


# Where a value was set that stands in no file.
COMMAND_LINE = "command line"


def chosen_in(origins: Mapping[str, str]) -> frozenset[str]:
    """The dotted paths that the command line sets for this run, by their origins. What a file says is not chosen: it
    sets values for whatever run takes it."""
    return frozenset(key for key, origin in origins.items() if origin == COMMAND_LINE)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a recipe: what is set, which rule it breaks, what to try, where it was set.

    `key` is a dotted path such as `parallelism.tp`, or "" when no single key is at fault.
    """

    key: str
    message: str
    origin: str = ""
    code: str = ""

    def __post_init__(self) -> None:
        """One printable line, whatever a recipe holds."""
        for name in ("key", "message", "origin"):
            object.__setattr__(self, name, printable(getattr(self, name)))
        object.__setattr__(self, "message", without_secrets(self.message, key=self.key))

    def __str__(self) -> str:
        if not self.origin:
            return self.message
        return f"{self.message}   ({self.origin})"

    def as_json(self) -> dict[str, str]:
        """What a program reads."""
        return {"code": self.code, "key": self.key, "message": self.message, "origin": self.origin}


class MegaspecError(Exception):
    """Base of every error that the command line prints without a traceback: a line, or problems, a line each."""

    exit_code = 70

    def __init__(self, problems: Sequence[Problem | str] | str = ""):
        # a text is never split: what looks like a line break in it may be from a file
        if isinstance(problems, str):
            problems = [problems]
        self.problems: list[Problem] = []
        for problem in problems:
            if isinstance(problem, str):
                problem = Problem("", problem)
            self.problems.append(problem)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class RecipeError(MegaspecError):
    """A recipe that can't be run as written: every problem found, at once."""

    exit_code = 64


class UsageError(MegaspecError):
    """A call of the library that can't be done as it was made."""

    exit_code = 64


class MemoryRunOut(MegaspecError):
    """A run that needs more memory than its GPU has: another attempt would, too."""

    exit_code = 64


class DataError(MegaspecError):
    """Training data that is missing, damaged or not what its manifest says."""

    exit_code = 65


class CheckpointError(MegaspecError):
    """A checkpoint that can't be used."""

    exit_code = 66


class WriteError(MegaspecError):
    """A file that can't be written: full disk, read-only folder, quota."""

    exit_code = 73


class HangError(MegaspecError):
    """A collective that did not finish in time, or a rank that failed in one."""

    exit_code = 74


class UnreachableError(MegaspecError):
    """A scheduler that a job should go to, and that does not answer: the same command may do later."""

    exit_code = 74


class Preempted(MegaspecError):
    """The run was asked to stop, and has saved: start it again to go on."""

    exit_code = 75


class NonFiniteError(MegaspecError):
    """A loss or gradient that is NaN or Inf."""

    exit_code = 76


class AlertStop(MegaspecError):
    """An alert of the recipe stopped the run, which has saved: another start would go on to the same numbers."""

    exit_code = 76


class HardwareError(MegaspecError):
    """A machine that is suspected to compute wrongly. `ranks`: those that are suspected, the same on every rank
    that raises it; (): nobody can say which."""

    exit_code = 77

    def __init__(self, problems: Sequence[Problem | str] | str = "", *, ranks: Sequence[int] = ()):
        super().__init__(problems)
        self.ranks = tuple(ranks)


class RunLockedError(MegaspecError):
    """Another job writes to this run folder."""

    exit_code = 78
