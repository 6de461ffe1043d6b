"""What commands share: the words of a command line that make a recipe."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megaspec.compose.compose import Composed, compose
from megaspec.compose.search_path import SearchPath, search_path
from megaspec.core.errors import COMMAND_LINE, Problem, RecipeError, printable
from megaspec.core.problems import one_of


def words_parser() -> argparse.ArgumentParser:
    """A parent parser of `a.b=c` words and --config-dir."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("words", nargs="*", default=[], metavar="a.b=c", help="path=value, group=choice or ~path")
    parser.add_argument(
        "--config-dir", action="append", default=[], metavar="DIR", help="more groups (DIR/<group>/) and DIR/recipes/"
    )
    return parser


def compose_words(words: Sequence[str], config_dirs: Sequence[str | Path] | SearchPath = ()) -> Composed:
    """The recipe of `recipe=NAME a.b=c ...`. RecipeError: no name, several, two values for a key, or what `compose`
    raises."""
    names = [word.removeprefix("recipe=") for word in words if word.startswith("recipe=")]
    if not names:
        _refuse_lone_name(words, config_dirs)
        _refuse_name("is missing", config_dirs)
    if len(names) > 1:
        _refuse_name("is given more than once", config_dirs)
    if not names[0]:
        _refuse_name("is empty", config_dirs)
    settings = [word for word in words if not word.startswith("recipe=")]
    refuse_two_answers(settings)
    return compose(names[0], settings, config_dirs)


def _refuse_lone_name(words: Sequence[str], config_dirs: Sequence[str | Path] | SearchPath) -> None:
    """RecipeError: a word is the bare name of a recipe."""
    options = search_path(config_dirs).choices("recipe")
    for word in words:
        if word in options:
            text = f"{word} is no setting; write recipe={word}"
            raise RecipeError([Problem("recipe", text, COMMAND_LINE, "choice.recipe")])


def _refuse_name(what: str, config_dirs: Sequence[str | Path] | SearchPath) -> NoReturn:
    options = one_of(search_path(config_dirs).choices("recipe"))
    raise RecipeError([Problem("recipe", f"recipe=NAME {what}; choose {options}", COMMAND_LINE, "choice.recipe")])


def tell_left_out(composed: Composed) -> None:
    """On stderr: what files set and the command line's choices leave out."""
    for text in composed.left_out:
        print(printable(f"left out: {text}"), file=sys.stderr)


def refuse_two_answers(words: Sequence[str]) -> None:
    """RecipeError: a key that is given two values."""
    given: dict[str, str] = {}
    problems = []
    for word in words:
        key, equals, _ = word.partition("=")
        key = key.lstrip("+")
        if equals and given.setdefault(key, word) != word:
            text = f"{key} is set twice, {given[key]} and {word}; keep one"
            problems.append(Problem(key, text, COMMAND_LINE, "override.twice"))
    if problems:
        raise RecipeError(problems)


def take(words: list[str], name: str, options: tuple[str, ...]) -> tuple[str, list[str]]:
    """The value of a word that is no field of a recipe, the first option where it is not given; and the other words.
    RecipeError: it is no option, or two are given."""
    value = options[0]
    mine = [word for word in words if word.startswith(f"{name}=")]
    others = [word for word in words if word not in mine]
    refuse_two_answers(mine)
    for word in mine:
        value = word.partition("=")[2]
        if value not in options:
            text = f"{name}={value} must be {one_of(options)}"
            raise RecipeError([Problem(name, text, COMMAND_LINE, "choice.unknown")])
    return value, others
