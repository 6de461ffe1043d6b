"""From a recipe's name and overrides to a typed Recipe. Only this package knows Hydra and OmegaConf.

Hydra reads the overrides' grammar and orders the defaults lists. Reading files, merging, `${...}` and typing are ours,
so that nothing in a YAML file can run code, read the environment or reach a file outside the search path. Hydra takes
a tenth of a second to import, so that is done where something is composed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from megaspec.checkable import Checkable, PartlyError, checkable
from megaspec.compose.interpolation import interpolate
from megaspec.compose.left_out import replaced_kinds
from megaspec.compose.plain import plain_content
from megaspec.compose.search_path import SearchPath, SourceFile, choice_hint, search_path
from megaspec.core.errors import COMMAND_LINE, Problem, RecipeError
from megaspec.core.fields import kinds_below
from megaspec.core.marked_yaml import MAX_DEPTH, Quoted
from megaspec.core.problems import (
    did_you_mean,
    one_of,
    origin_of,
    parts_of,
    path_below,
    quoted_counts,
    show,
    typed_problems,
    value_at,
)
from megaspec.recipe import SECTIONS, Recipe

if TYPE_CHECKING:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override

GROUPS = ("recipe", *SECTIONS)
MISSING = "???"
MAX_WORD = 16_384
# Of one word of a sweep; no sweep has as many points.
MOST_VALUES = 10_001


@dataclass(frozen=True)
class Composed:
    """A typed recipe, and where each of its values is from."""

    recipe: Recipe
    origins: dict[str, str]
    """Dotted path -> `file:line` or `command line`. A value that no one set (a class default) has no entry."""
    left_out: tuple[str, ...] = ()
    """Keys that files set, left out because the command line chooses another kind: `key (file:line): why`."""


def compose(
    recipe_name: str, overrides: Sequence[str] = (), config_dirs: Sequence[str | Path] | SearchPath = ()
) -> Composed:
    """Compose base.yaml, the groups that the recipe picks, the recipe and the overrides, in this order.

    `overrides` are `path=value`, `group=choice` or `~path` in Hydra's grammar. `config_dirs` hold more groups and a
    folder of recipes; `./recipes` is always searched. A SearchPath in their place reads each file once for all that is
    composed with it. RecipeError lists everything that is wrong, at once.
    """
    search = search_path(config_dirs)
    parsed = _parse(overrides)
    problems = _choice_problems(search, {"recipe": recipe_name}, {"recipe": f"recipe={recipe_name}"})
    chosen, values = _split(search, parsed, problems)
    if not problems:
        problems += search.check_defaults(f"recipe/{recipe_name}", GROUPS) + search.check_defaults("base", GROUPS)
    if problems:
        raise RecipeError(problems)
    tree = _RecipeTree()
    for package, file in _ordered(search, recipe_name, chosen):
        tree.add(package, file)
    tree.name_after(recipe_name, origin=f"recipe={recipe_name}")
    left_out = _leave_out(tree, search, recipe_name, chosen, values)
    return replace(_finish(tree, values, search), left_out=left_out)


def recompose(
    saved: Mapping[str, Any], label: str, overrides: Sequence[str] = (), config_dirs: Sequence[str | Path] = ()
) -> Composed:
    """Overrides on a recipe that was composed before and kept as JSON; `label` names it in origins."""
    search = search_path(config_dirs)
    problems: list[Problem] = []
    chosen, values = _split(search, _parse(overrides), problems)
    if problems:
        # a choice that does not exist can't be read
        raise RecipeError(problems)
    for group, choice in chosen.items():
        problems += search.check_defaults(f"{group}/{choice}", GROUPS)
    if problems:
        raise RecipeError(problems)
    tree = _RecipeTree()
    tree.merge(deepcopy(dict(saved)), lambda key: label)
    for group, choice in chosen.items():
        tree.drop(group)
        for config_path in search.closure(f"{group}/{choice}"):
            tree.add(group, search.read(config_path))
    return _finish(tree, values, search)


def compose_dicts(
    *contents: Mapping[str, Any],
    start: str | None = None,
    config_dirs: Sequence[str | Path] | SearchPath = (),
) -> Composed:
    """The recipe that Python data says, checked as a file is: dicts of sections, each laid over those before it.

    A text in place of a section chooses one that has a name, `{"model": "llama3_8b"}`: a later dict sets single keys of
    it. A section with another `kind` than what it is laid over replaces it. What no dict says is that of the recipe
    `start`, or without one what every run starts from. `config_dirs`: see `compose`. RecipeError lists everything that
    is wrong, at once.
    """
    search = search_path(config_dirs)
    problems: list[Problem] = []
    labels = ["dict"]
    if len(contents) != 1:
        labels = [f"dict {number + 1}" for number in range(len(contents))]
    bodies = [plain_content(one, label, problems) for one, label in zip(contents, labels, strict=True)]
    chosen, from_where = _take_choices(bodies, labels)
    problems += _choice_problems(search, chosen, from_where)
    if start is not None:
        problems += _choice_problems(search, {"recipe": start}, {"recipe": "start"})
    for label, body in zip(labels, bodies, strict=True):
        if "defaults" in body:
            text = "defaults: a dict chooses with {'model': 'hello'}, and inherits with start='hello'"
            problems.append(Problem("defaults", text, label, "defaults"))
    if problems:
        raise RecipeError(problems)
    if start is not None:
        problems += search.check_defaults(f"recipe/{start}", GROUPS)
    problems += search.check_defaults("base", GROUPS)
    for group, choice in chosen.items():
        problems += search.check_defaults(f"{group}/{choice}", GROUPS)
    if problems:
        raise RecipeError(problems)
    tree = _RecipeTree()
    for package, file in _ordered(search, start, chosen):
        tree.add(package, file)
    left_out: list[str] = []
    if start is not None:
        left_out += _leave_out(tree, search, start, chosen, [])
    for body, label in zip(bodies, labels, strict=True):
        left_out += _replace_kinds(tree, body, label)
        tree.merge(body, lambda key, label=label: label)
    if start is not None:
        tree.name_after(start, origin="start")
    return replace(_finish(tree, [], search), left_out=tuple(left_out))


def _take_choices(bodies: list[dict[str, Any]], labels: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Takes sections that are texts out of the bodies, with what bodies before them say of the section. -> the choice
    of each group, and where it is from"""
    chosen: dict[str, str] = {}
    from_where: dict[str, str] = {}
    for number, body in enumerate(bodies):
        groups = [name for name, value in body.items() if name in SECTIONS and isinstance(value, str)]
        for group in groups:
            chosen[group] = body[group]
            from_where[group] = labels[number]
            # up to this body itself: what later ones say of the section is laid over the choice
            for overruled in bodies[: number + 1]:
                overruled.pop(group, None)
    return chosen, from_where


def _replace_kinds(tree: _RecipeTree, body: Mapping[str, Any], label: str) -> list[str]:
    """Takes away the sections whose kind a dict changes. -> the keys that are left out with them; see Composed"""
    left_out = []
    sections: list[str] = []
    for group in SECTIONS:
        if group in body:
            # outer ones first: what lies in a section that is gone is gone
            sections += kinds_below(Recipe, group)
    for section in sections:
        kind = value_at(body, f"{section}.kind")
        written = value_at(tree.content, f"{section}.kind")
        if kind is None or written is None or kind == written:
            continue
        for name in value_at(tree.content, section):
            if name != "kind":
                origin = origin_of(tree.origins, f"{section}.{name}")
                left_out.append(f"{section}.{name} ({origin}): {label} says {section}.kind={show(kind)}")
        tree.drop(section)
    return left_out


@dataclass(frozen=True)
class Swept:
    """A word of a sweep: a key and what it takes."""

    key: str
    words: tuple[str, ...]
    """One override for each value, in order; empty for an interval."""
    is_range: bool = False
    """The values are evenly spaced numbers."""
    bounds: tuple[float, float] | None = None
    """Ends of an interval; whole numbers where both are."""
    is_log: bool = False
    """The interval is searched in logarithms."""


def split_sweep(words: Sequence[str], config_dirs: Sequence[str | Path] = ()) -> tuple[list[str], list[Swept]]:
    """Words that say one value, and those that sweep: `a.b=1,2`, range(1,8), glob(*) for groups, interval(1e-4,1e-2).

    RecipeError: what can't be read.
    """
    search = SearchPath(config_dirs)
    plain: list[str] = []
    swept: list[Swept] = []
    problems: list[Problem] = []
    for one in _parse(words, sweeps=True):
        if not one.is_sweep_override():
            plain.append(str(one.input_line))
            continue
        found = _swept(one, search)
        if not found.words and not found.bounds:
            text = f"{one.input_line}: no value at all; write a.b=1,2, range(1,8), glob(*) or interval(1e-4,1e-2)"
            problems.append(Problem(found.key, text, COMMAND_LINE, "sweep.empty"))
        swept.append(found)
    if problems:
        raise RecipeError(problems)
    return plain, swept


def plain_values(words: Sequence[str]) -> dict[str, Any]:
    """Dotted path -> value of `path=value` words that are no part of a recipe. RecipeError: what can't be read."""
    return {one.key_or_group: one.value() for one in _parse(words)}


def _swept(one: Override, search: SearchPath) -> Swept:
    """What a word of a sweep takes; no words and no bounds where that is no value at all."""
    from hydra.core.override_parser.types import Glob, RangeSweep

    key = one.key_or_group
    values = one.value()
    if one.is_interval_sweep():
        bounds = None
        if values.start < values.end:
            bounds = (values.start, values.end)
        return Swept(key, (), bounds=bounds, is_log="log" in values.tags)
    texts: list[str] = []
    if isinstance(values, Glob):
        if key in GROUPS:
            texts = values.filter(search.choices(key))
    elif not isinstance(values, RangeSweep) or values.step:  # a range with step 0 would never end
        texts = list(islice(one.sweep_string_iterator(), MOST_VALUES))
    return Swept(key, tuple(f"{one.get_key_element()}={text}" for text in texts), is_range=one.is_range_sweep())


@dataclass
class _RecipeTree:
    """Plain data that grows by merging, with the origin of every path."""

    content: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def add(self, package: str, file: SourceFile) -> None:
        """Merge a file at a dotted path of the tree; "" is its top."""
        body = deepcopy(file.body)
        prefix = ""
        if package:
            prefix = f"{package}."
            for part in reversed(package.split(".")):
                body = {part: body}
        self.merge(body, lambda key: file.origin(key.removeprefix(prefix)))

    def name_after(self, recipe_name: str, *, origin: str) -> None:
        """Name the run after its recipe, where nothing names it."""
        if self.content.get("name") is None:
            self.content["name"] = recipe_name.replace("/", "-")
            self.origins["name"] = origin

    def merge(self, body: dict[str, Any], origin: Any) -> None:
        self._merge(self.content, body, "", origin)

    def drop(self, key: str) -> None:
        """Forget a section, where there is one, with its origins and those of everything below it."""
        above, _, name = key.rpartition(".")
        holder = value_at(self.content, above)
        if isinstance(holder, dict):
            holder.pop(name, None)
        self._forget(key)

    def take(self, key: str) -> str:
        """Take away a key of a section, with all below it. -> its origin."""
        section, _, name = key.rpartition(".")
        origin = self.origins[key]
        del value_at(self.content, section)[name]
        self._forget(key)
        return origin

    def set(self, override: Override) -> Problem | None:
        """Apply one `path=value` of the command line; deletions too. -> what is wrong with it"""
        key = override.key_or_group
        *above, last = key.split(".")
        try:
            section = self._section_of(above, make=not override.is_delete())
        except _NoSection as error:
            return Problem(key, f"{override.input_line}: {error}", COMMAND_LINE, "override.path")
        if override.is_delete():
            return self._delete(override, section, last)
        value = _value_of(override)
        if _indexes(section, last):
            section[int(last)] = value
        elif isinstance(section, list):
            text = f"{override.input_line}: {'.'.join(above)} has entries 0 to {len(section) - 1}"
            return Problem(key, text, COMMAND_LINE, "override.path")
        else:
            prefix = "".join(f"{part}." for part in above)
            self._merge(section, {last: value}, prefix, lambda _: COMMAND_LINE)
        return None

    def _section_of(self, parts: Sequence[str], *, make: bool) -> Any:
        """The section or list at a path, or _NoSection. `make`: sections that are not there yet are made."""
        here: Any = self.content
        path = ""
        for part in parts:
            path = path_below(path, part)
            inner = None
            if _indexes(here, part):
                inner = here[int(part)]
            elif isinstance(here, dict):
                inner = here.get(part)
                if inner is None and make:
                    inner = here[part] = {}
                    self.origins[path] = COMMAND_LINE
            if inner is None:
                raise _NoSection(f"{path} is not set")
            if not isinstance(inner, dict | list):
                raise _NoSection(f"{path} is not a section")
            here = inner
        return here

    def _delete(self, override: Override, section: Any, name: str) -> Problem | None:
        """Take a key away from its section. -> the problem where it has none of that name"""
        key = override.key_or_group
        if isinstance(section, dict) and name in section:
            del section[name]
            self._forget(key)
            return None
        hint = ""
        if isinstance(section, dict):
            hint = did_you_mean(name, section)
        text = f"{override.input_line}: {key} is not set, so it can't be taken away; {hint or 'drop it'}"
        return Problem(key, text, COMMAND_LINE, "override.delete")

    def _merge(self, into: dict[str, Any], body: Mapping[str, Any], prefix: str, origin: Any) -> None:
        for name, value in body.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict) and isinstance(into.get(name), dict):
                self.origins.setdefault(key, origin(key))
                self._merge(into[name], value, f"{key}.", origin)
                continue
            if name in into:
                self._forget(key)
            into[name] = value
            self._mark(key, value, origin)

    def _mark(self, key: str, value: Any, origin: Any) -> None:
        """Note the origin of a value and of everything in it."""
        self.origins[key] = origin(key)
        for name, inner in parts_of(value):
            self._mark(f"{key}.{name}", inner, origin)

    def _forget(self, key: str) -> None:
        for known in list(self.origins):
            if known == key or known.startswith(f"{key}."):
                del self.origins[known]


class _NoSection(Exception):
    """A path that leads to no section or list; the text says which part of it does not."""


def _indexes(where: Any, part: str) -> bool:
    return isinstance(where, list) and part.isdigit() and int(part) < len(where)


def _parse(overrides: Sequence[str], *, sweeps: bool = False) -> list[Override]:
    """Hydra's grammar, with what a recipe can't mean refused, and what a single run can't unless `sweeps`.

    `a=1`, `+a=1` and `++a=1` all set.
    """
    from hydra import version
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if version.getbase() is None or not hasattr(version.getbase(), "major"):
        version.setbase("1.3")
    parser = OverridesParser.create()
    parsed: list[Override] = []
    problems: list[Problem] = []

    def refuse(text: str, what: str, code: str) -> None:
        problems.append(Problem("", f"{show(text)}: {what}", COMMAND_LINE, code))

    for text in overrides:
        # the parser's time and stack grow with both
        if len(text) > MAX_WORD:
            refuse(text, f"longer than {MAX_WORD} characters; write it in a recipe", "override.size")
            continue
        if _depth(text) > MAX_DEPTH:
            refuse(text, f"nested deeper than {MAX_DEPTH}; write it in a recipe", "override.size")
            continue
        try:
            one = _parse_one(parser, text)
        except (HydraException, ValueError):  # ValueError: a number of thousands of digits
            what = "not an override; write path=value, and where the value has spaces, commas or brackets"
            refuse(text, f"{what} \"path='value'\", for the shell takes the outer quotes", "override.syntax")
            continue
        if one.is_sweep_override() and not sweeps:
            what = "several values; train -m runs each; write a list as [1,2], text with a comma as '\"1,2\"'"
            refuse(text, what, "override.sweep")
        elif one.package is not None or one.key_or_group.startswith("hydra"):
            refuse(text, "neither @packages nor hydra settings belong to a recipe; drop it", "override.hydra")
        elif not one.is_sweep_override() and not _is_data(one.value()):
            refuse(text, "not plain data; write numbers, text, lists [..] and sections {a: 1}", "override.data")
        else:
            parsed.append(one)
    if problems:
        raise RecipeError(problems)
    return parsed


def _parse_one(parser: OverridesParser, text: str) -> Override:
    """An override, whose value may also be a list or a section in JSON, as programs print it: Hydra's grammar has no
    quotes around names of keys. HydraException, ValueError."""
    from hydra.errors import HydraException

    try:
        [one] = parser.parse_overrides([text])
    except HydraException:
        key, _, value = text.partition("=")
        if not value.startswith(("[", "{")):
            raise
        [one] = parser.parse_overrides([f"{key}={_in_hydras_words(json.loads(value))}"])
        one.input_line = text
    return one


def _in_hydras_words(content: Any) -> str:
    """Plain data of JSON as Hydra's grammar writes it. A name of a key that is no plain word keeps its quotes, so that
    it is refused."""
    from hydra.core.override_parser.types import Quote, QuotedString

    if isinstance(content, dict):
        entries = []
        for name, value in content.items():
            word = name
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                word = json.dumps(name)
            entries.append(f"{word}: {_in_hydras_words(value)}")
        return f"{{{', '.join(entries)}}}"
    if isinstance(content, list):
        return f"[{', '.join(map(_in_hydras_words, content))}]"
    if isinstance(content, str):
        return QuotedString(text=content, quote=Quote.double).with_quotes()
    return json.dumps(content)


def _value_of(override: Override) -> Any:
    """The value of an override, in which a quoted text is still known as one."""
    return _keep_quotes(override._value)  # what override.value() takes the quotes off


def _keep_quotes(value: Any) -> Any:
    from hydra.core.override_parser.types import QuotedString

    if isinstance(value, QuotedString):
        return Quoted(value.text)
    if isinstance(value, list):
        return [_keep_quotes(one) for one in value]
    if isinstance(value, dict):
        return {str(_keep_quotes(name)): _keep_quotes(one) for name, one in value.items()}
    return value


def _depth(text: str) -> int:
    """How deep the brackets of a word are nested, those in quotes counted too."""
    depth = deepest = 0
    for character in text:
        if character in "[{(":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")}]":
            depth -= 1
    return deepest


def _is_data(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_data(v) for k, v in value.items())
    if isinstance(value, list):
        return all(_is_data(v) for v in value)
    return value is None or isinstance(value, str | int | float)


def _split(
    search: SearchPath, parsed: Sequence[Override], problems: list[Problem]
) -> tuple[dict[str, str], list[Override]]:
    """Group choices and value overrides; a choice that does not exist is added to `problems`."""
    chosen: dict[str, str] = {}
    values: list[Override] = []
    for one in parsed:
        key = one.key_or_group
        if key == "recipe":
            problems.append(Problem("recipe", f"{one.input_line}: a run has one recipe", COMMAND_LINE, "choice.recipe"))
        elif key not in SECTIONS or isinstance(one.value(), dict):
            values.append(one)
        elif one.is_delete() or not isinstance(one.value(), str):
            options = one_of(search.choices(key))
            text = f"{one.input_line}: {key} is a section; choose {options}, or set its keys: {key}.<key>=..."
            problems.append(Problem(key, text, COMMAND_LINE, "choice.kind"))
        else:
            problems += _choice_problems(search, {key: one.value()}, {key: COMMAND_LINE})
            chosen[key] = one.value()
    return chosen, values


def _choice_problems(search: SearchPath, choices: Mapping[str, str], origins: Mapping[str, str]) -> list[Problem]:
    problems = []
    for group, choice in choices.items():
        if not search.exists(f"{group}/{choice}"):
            hint = choice_hint(group, choice, search.choices(group))
            problems.append(
                Problem(group, f"{group}={choice} does not exist; {hint}", origins[group], "choice.unknown")
            )
    return problems


def _ordered(search: SearchPath, recipe_name: str | None, chosen: Mapping[str, str]) -> list[tuple[str, SourceFile]]:
    """(package, file) of everything that takes part, in the order in which it is merged."""
    lines = [f"{group}={choice}" for group, choice in chosen.items()]
    if recipe_name is not None:
        lines.insert(0, f"recipe={recipe_name}")
    if tuple(lines) in search.orders:
        return search.orders[tuple(lines)]
    from hydra._internal.defaults_list import create_defaults_list
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    from megaspec.compose.choices import Repository

    try:
        ordered = create_defaults_list(
            repo=Repository(search, GROUPS),
            config_name="base",
            overrides_list=OverridesParser.create().parse_overrides(lines),
            prepend_hydra=False,
            skip_missing=False,
        )
    except HydraException as error:
        text = " ".join(str(error).split("Config search path")[0].split())
        raise RecipeError([Problem("defaults", text, " ".join(lines[:1]), "defaults.order")]) from None
    files = [(one.package or "", search.read(one.config_path)) for one in ordered.defaults]
    search.orders[tuple(lines)] = files
    return files


def _leave_out(
    tree: _RecipeTree, search: SearchPath, recipe_name: str, chosen: Mapping[str, str], values: Sequence[Override]
) -> tuple[str, ...]:
    """Take away what files set for a kind that a choice of the command line replaces; see Composed.left_out.

    A key that the command line names itself stays, so that it is refused, or taken away by its own word.
    """
    named = _paths_to(values)
    written_files = _ordered(search, recipe_name, {})
    chosen_files = _ordered(search, recipe_name, chosen)
    left_out = []
    for replaced in replaced_kinds(chosen, written_files, chosen_files):
        for key in replaced.keys:
            if key in tree.origins and key not in named:
                left_out.append(f"{key} ({tree.take(key)}): no key of {replaced.section}.kind={replaced.kind}")
        key = f"{replaced.section}.kind"
        written = value_at(tree.content, key)
        if written not in (None, replaced.kind) and key not in named:
            left_out.append(f"{key}={show(written)} ({tree.take(key)}): {replaced.group}={replaced.choice} is chosen")
            body: Any = replaced.kind
            for part in reversed(key.split(".")):
                body = {part: body}
            tree.merge(body, lambda _, origin=replaced.origin: origin)
    return tuple(left_out)


def _paths_to(values: Sequence[Override]) -> set[str]:
    """The dotted paths that overrides name, and those of the sections around them."""
    paths = set()
    for value in values:
        path = ""
        for part in value.key_or_group.split("."):
            path = path_below(path, part)
            paths.add(path)
    return paths


def _finish(tree: _RecipeTree, values: Sequence[Override], search: SearchPath) -> Composed:
    """The recipe of a merged tree and the values of the command line. PartlyError: everything that is wrong with it,
    and what of it can be checked all the same."""
    problems: list[Problem] = []
    for value in values:
        problem = tree.set(value)
        if problem is not None:
            problems.append(problem)
    content, origins = interpolate(tree.content, tree.origins, problems)
    for key, origin in sorted(origins.items()):
        name = key.rpartition(".")[2]
        # Hydra's _target_, _args_ and their like
        if name.startswith("_") and name.endswith("_"):
            problems.append(Problem(key, f"{key}: a recipe is data, it can't name code; drop it", origin, "key.code"))
    for key in _missing(content):
        text = f"{key}=??? must be set; in the recipe, or on the command line: {key}=..."
        problems.append(Problem(key, text, origin_of(origins, key), "key.missing"))
    # keys whose problem is known: typing has nothing to add to it
    bad = {problem.key for problem in problems if problem.key}
    try:
        recipe = Recipe.model_validate_json(json.dumps(content))
        readable = Checkable(recipe, frozenset(bad), origins)
    except ValidationError as error:
        recipe = None
        readable = checkable(content, origins, bad)
        choices = {group: search.choices(group) for group in SECTIONS}
        for problem in typed_problems(error, model=Recipe, content=content, origins=origins, choices=choices):
            is_reference = "${" in str(value_at(content, problem.key))
            if problem.key not in bad and not is_reference:
                problems.append(problem)
    if readable is not None:
        typed = readable.recipe.model_dump(mode="json")
        quoted = quoted_counts(content, typed, origins, but=readable.bad)
        problems += quoted
        bad |= {problem.key for problem in quoted}
    if recipe is not None and not problems:
        return Composed(recipe, origins)
    raise PartlyError(problems, checkable(content, origins, bad))


def _missing(content: Any, prefix: str = "") -> list[str]:
    """Dotted paths of what is `???` still."""
    if content == MISSING:
        return [prefix]
    paths: list[str] = []
    for name, inner in parts_of(content):
        paths += _missing(inner, path_below(prefix, name))
    return paths
