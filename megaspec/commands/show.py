"""`megaspec show recipe=NAME a.b=c ...`: the whole recipe as YAML, as composed or as resolved; or the one of a run."""

import argparse
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megaspec.commands.paragraphs import Paragraphs
from megaspec.commands.planned import Planned, plan_words
from megaspec.compose.words import tell_left_out, words_parser
from megaspec.core.errors import COMMAND_LINE, Problem, RecipeError, printable
from megaspec.core.problems import did_you_mean, one_of, parts_of, path_below, value_at
from megaspec.core.yaml_text import yaml_lines
from megaspec.plugins import loaded
from megaspec.recipe import SECTIONS, Recipe
from megaspec.resolve.gather import gather_facts
from megaspec.resolve.resolver import resolve
from megaspec.run_folder import RECIPE, read_run
from megaspec.spec import Spec
from megaspec_launchers.recipe_file import whole_recipe

_DEFAULT = "default"
_DESCRIPTION = """Print the whole composed, typed recipe as YAML: what files and the command line set, and the default
of everything else. Nothing is asked of it but that it can be typed; `auto` stays auto. Saved as recipes/NAME.yaml it is
the same recipe.

recipe=NAME a.b=c ...: as of `plan`, its hardware= and gpus= too. A path alone (parallelism, optim.schedule) restricts
it. RUN: the folder of a run, for what that trains."""


def add_parser(commands: Any) -> None:
    """The parser of `show`."""
    text = "print the whole composed recipe as YAML: recipe=NAME a.b=c ... [PATH ...], or the one of a run: RUN"
    command = commands.add_parser(
        "show",
        help=text,
        description=_DESCRIPTION,
        formatter_class=Paragraphs,
        allow_abbrev=False,
        parents=[words_parser()],
    )
    command.add_argument("--origins", action="store_true", help="behind each value the file and line that set it")
    command.add_argument(
        "--resolved", action="store_true", help="every auto as the resolver decides it, for the machine that plan takes"
    )


@dataclass(frozen=True)
class Shown:
    """A recipe as plain data, and what is said about it."""

    content: dict[str, Any]
    what: str
    """In the first line."""
    origin: Callable[[str], str]
    """Of the value at a dotted path."""


def run(args: argparse.Namespace) -> int:
    """Compose and print; resolve before that where it is asked for."""
    settings, paths, runs = _sorted_words(args.words)
    if runs:
        shown = _of_run(runs, settings)
    else:
        planned = plan_words(settings, args.config_dir)
        shown = _of_recipe(planned, settings, is_resolved=args.resolved)
        tell_left_out(planned.composed)
    remark = shown.origin if args.origins else None
    if paths:
        lines = yaml_lines(_restricted(shown.content, paths), remark)
    else:
        lines = _whole(shown, remark)
    for line in lines:
        print(printable(line))
    return 0


def _sorted_words(words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """-> settings, paths in a recipe, and folders of runs."""
    settings = []
    paths = []
    runs = []
    for word in words:
        if "=" in word or word.startswith("~"):
            settings.append(word)
        elif _is_folder(word):
            runs.append(word)
        else:
            paths.append(word)
    return settings, paths, runs


def _is_folder(word: str) -> bool:
    """True where a word is no path in a recipe; data/ is a folder next to many recipes, and `data` is a section."""
    is_path = word.partition(".")[0] in Recipe.model_fields
    return "/" in word or (Path(word).is_dir() and not is_path)


def _of_run(runs: Sequence[str], settings: Sequence[str]) -> Shown:
    """What a run trains, as its Spec says."""
    if settings or len(runs) > 1:
        text = f"{' '.join([*runs, *settings])}: a run is shown by itself, as it is; give its folder alone"
        raise RecipeError([Problem("", text, COMMAND_LINE)])
    folder = Path(runs[0])
    spec = read_run(folder).spec
    origins = _decided(spec)
    said = printable(str(folder / RECIPE))
    return Shown(_recipe_of(spec), f"what {folder} trains", lambda key: origins.get(key, said))


def _of_recipe(planned: Planned, settings: Sequence[str], *, is_resolved: bool) -> Shown:
    """A recipe as composed, or as resolved for the machine that is asked about."""
    composed = planned.composed
    content = composed.recipe.model_dump(mode="json")
    origins = composed.origins
    what = f"{shlex.join(settings)} as composed"
    if is_resolved:
        facts = replace(gather_facts(composed.recipe), problems=())
        spec = resolve(composed.recipe, planned.target, facts, origins)
        content = _recipe_of(spec)
        origins = origins | _decided(spec)
        what = f"{shlex.join(settings)} as resolved ({planned.why})"
    return Shown(content, what, partial(_origin, origins))


def _origin(origins: Mapping[str, str], key: str) -> str:
    """Where the value at a path was set; what no one set is its class's default."""
    return printable(origins.get(key, _DEFAULT))


def _decided(spec: Spec) -> dict[str, str]:
    """Dotted path -> why the resolver decided it."""
    return {decision.key: printable(f"decided: {decision.reason}") for decision in spec.decisions}


def _recipe_of(spec: Spec) -> dict[str, Any]:
    """The part of a Spec that a recipe can say."""
    return spec.model_dump(mode="json", include=set(Recipe.model_fields))


def _whole(shown: Shown, remark: Callable[[str], str] | None) -> Iterator[str]:
    """The lines of a recipe that is complete in itself."""
    how = "complete: it can be saved as recipes/NAME.yaml"
    if loaded():
        how += f", for commands with --plugin {' --plugin '.join(loaded())}"
    yield f"# {printable(shown.what)}; {how}"
    yield from whole_recipe(shown.content, remark)


def _restricted(content: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """What lies at these paths, in the order of the recipe. RecipeError: nothing does."""
    known = list(_paths(content))
    problems = []
    for path in paths:
        if path not in known:
            hint = did_you_mean(path, known) or f"sections are {one_of(list(SECTIONS))}"
            problems.append(Problem(path, f"{path}: no section or key of this recipe; {hint}", COMMAND_LINE))
    if problems:
        raise RecipeError(problems)
    kept: dict[str, Any] = {}
    for path in paths:
        *above, last = path.split(".")
        section = kept
        for part in above:
            section = section.setdefault(part, {})
        section[last] = value_at(content, path)
    return kept


def _paths(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted paths of all sections and values, entries of lists left out."""
    for name, value in parts_of(content):
        path = path_below(prefix, name)
        yield path
        if isinstance(value, Mapping):
            yield from _paths(value, path)
