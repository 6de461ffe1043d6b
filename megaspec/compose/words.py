"""What commands share: the words of a command line that make a recipe."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megaspec.compose.compose import Composed, compose
from megaspec.compose.search_path import SearchPath
from megaspec.core.errors import COMMAND_LINE, Problem, RecipeError, printable
from megaspec.core.problems import one_of


def words_parser() -> argparse.ArgumentParser:
    """A parent parser of `a.b=c` words and --config-dir."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("words", nargs="*", metavar="a.b=c", help="path=value, group=choice or ~path")
    parser.add_argument(
        "--config-dir", action="append", default=[], metavar="DIR", help="more groups (DIR/<group>/) and DIR/recipes/"
    )
    return parser


def compose_words(words: Sequence[str], config_dirs: Sequence[str | Path] | SearchPath = ()) -> Composed:
    """The recipe of `recipe=NAME a.b=c ...`. RecipeError: no name, several, two values for a key, or what `compose`
    raises."""
    names = [w.removeprefix("recipe=") for w in words if w.startswith("recipe=")]
    if len(names) != 1 or not names[0]:
        what = "is missing" if not names else "is given more than once" if len(names) > 1 else "is empty"
        search = config_dirs if isinstance(config_dirs, SearchPath) else SearchPath(config_dirs)
        options = one_of(search.choices("recipe"))
        raise RecipeError([Problem("recipe", f"recipe=NAME {what}; choose {options}", COMMAND_LINE, "choice.recipe")])
    settings = [w for w in words if not w.startswith("recipe=")]
    refuse_two_answers(settings)
    return compose(names[0], settings, config_dirs)


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
    """The value of a word that is no field of a recipe, the first option where it is not given; and the other words."""
    given = [w.partition("=")[2] for w in words if w.startswith(f"{name}=")]
    for value in given:
        if value not in options:
            raise RecipeError(
                [Problem(name, f"{name}={value} must be {one_of(options)}", COMMAND_LINE, "choice.unknown")]
            )
    return (given[-1] if given else options[0]), [w for w in words if not w.startswith(f"{name}=")]
