"""From a recipe's name and overrides to a typed Recipe. Only this package knows Hydra and OmegaConf.

Hydra reads the overrides' grammar and orders the defaults lists. Reading files, merging, `${...}` and typing are ours,
so that nothing in a YAML file can run code, read the environment or reach a file outside the search path. Hydra takes
a tenth of a second to import, so that is done where something is composed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from megaspec.checkable import Checkable, PartlyError, checkable
from megaspec.compose.interpolation import interpolate
from megaspec.compose.left_out import replaced_kinds
from megaspec.compose.plain import plain_content
from megaspec.compose.search_path import SearchPath, SourceFile
from megaspec.core.errors import COMMAND_LINE, Problem, RecipeError
from megaspec.core.marked_yaml import MAX_DEPTH, Quoted
from megaspec.core.problems import did_you_mean, one_of, origin_of, quoted_counts, show, typed_problems, value_at
from megaspec.recipe import SECTIONS, Recipe

if TYPE_CHECKING:
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
    search = config_dirs if isinstance(config_dirs, SearchPath) else SearchPath(config_dirs)
    parsed = _parse(overrides)
    problems = _choice_problems(search, {"recipe": recipe_name}, {"recipe": f"recipe={recipe_name}"})
    chosen, values = _split(search, parsed, problems)
    if not problems:
        problems += search.check_defaults(f"recipe/{recipe_name}", GROUPS) + search.check_defaults("base", GROUPS)
    if problems:
        raise RecipeError(problems)
    tree = _Tree()
    for package, file in _ordered(search, recipe_name, chosen):
        tree.add(package, file)
    if tree.content.get("name") is None:
        tree.content["name"], tree.origins["name"] = recipe_name.replace("/", "-"), f"recipe={recipe_name}"
    left_out = _leave_out(tree, search, recipe_name, chosen, values)
    return replace(_finish(tree, values, search), left_out=left_out)


def recompose(
    saved: Mapping[str, Any], label: str, overrides: Sequence[str] = (), config_dirs: Sequence[str | Path] = ()
) -> Composed:
    """Overrides on a recipe that was composed before and kept as JSON; `label` names it in origins."""
    search = SearchPath(config_dirs)
    problems: list[Problem] = []
    chosen, values = _split(search, _parse(overrides), problems)
    problems += [p for group, choice in chosen.items() for p in search.check_defaults(f"{group}/{choice}", GROUPS)]
    if problems:
        raise RecipeError(problems)
    tree = _Tree()
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
    search = config_dirs if isinstance(config_dirs, SearchPath) else SearchPath(config_dirs)
    problems: list[Problem] = []
    labels = ["dict"] if len(contents) == 1 else [f"dict {number + 1}" for number in range(len(contents))]
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
    for config_path in ["base"] if start is None else [f"recipe/{start}", "base"]:
        problems += search.check_defaults(config_path, GROUPS)
    for group, choice in chosen.items():
        problems += search.check_defaults(f"{group}/{choice}", GROUPS)
    if problems:
        raise RecipeError(problems)
    tree = _Tree()
    for package, file in _ordered(search, start, chosen):
        tree.add(package, file)
    left_out = [] if start is None else list(_leave_out(tree, search, start, chosen, []))
    for body, label in zip(bodies, labels, strict=True):
        left_out += _replace_kinds(tree, body, label)
        tree.merge(body, lambda key, label=label: label)
    if tree.content.get("name") is None and start is not None:
        tree.content["name"], tree.origins["name"] = start.replace("/", "-"), "start"
    return replace(_finish(tree, [], search), left_out=tuple(left_out))


def _take_choices(bodies: list[dict[str, Any]], labels: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Takes sections that are texts out of the bodies, with what bodies before them say of the section. -> the choice
    of each group, and where it is from"""
    chosen: dict[str, str] = {}
    from_where: dict[str, str] = {}
    for number, body in enumerate(bodies):
        for group in [name for name, value in body.items() if name in SECTIONS and isinstance(value, str)]:
            chosen[group], from_where[group] = body[group], labels[number]
            for earlier in bodies[: number + 1]:
                earlier.pop(group, None)
    return chosen, from_where


def _replace_kinds(tree: _Tree, body: Mapping[str, Any], label: str) -> list[str]:
    """Takes away the sections whose kind a dict changes. -> the keys that are left out with them; see Composed"""
    left_out = []
    for group in SECTIONS:
        kind, written = value_at(body, f"{group}.kind"), value_at(tree.content, f"{group}.kind")
        if kind is None or written is None or kind == written:
            continue
        for name in tree.content[group]:
            if name != "kind":
                origin = origin_of(tree.origins, f"{group}.{name}")
                left_out.append(f"{group}.{name} ({origin}): {label} says {group}.kind={show(kind)}")
        tree.drop(group)
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
    plain, swept, problems = [], [], []
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
    from hydra.core.override_parser.types import Glob, RangeSweep

    key, values = one.key_or_group, one.value()
    if one.is_interval_sweep():
        bounds = (values.start, values.end)
        return Swept(key, (), bounds=bounds if values.start < values.end else None, is_log="log" in values.tags)
    if isinstance(values, Glob):
        texts = values.filter(search.choices(key)) if key in GROUPS else []
    elif isinstance(values, RangeSweep) and not values.step:
        texts = []
    else:
        texts = list(islice(one.sweep_string_iterator(), MOST_VALUES))
    return Swept(key, tuple(f"{one.get_key_element()}={text}" for text in texts), is_range=one.is_range_sweep())


@dataclass
class _Tree:
    """Plain data that grows by merging, with the origin of every path."""

    content: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def add(self, package: str, file: SourceFile) -> None:
        """Merge a file at a dotted path of the tree."""
        prefix = f"{package}." if package else ""
        body = deepcopy(file.body)
        for part in reversed(package.split(".") if package else []):
            body = {part: body}
        self.merge(body, lambda key: file.origin(key.removeprefix(prefix)))

    def merge(self, body: dict[str, Any], origin: Any) -> None:
        self._merge(self.content, body, "", origin)

    def drop(self, key: str) -> None:
        """Forget the origins of a path and of everything below it, and its value when it is a section of the top."""
        self.content.pop(key, None)
        self._forget(key)

    def take(self, key: str) -> str:
        """Take away a key of a section, with all below it. -> its origin."""
        section, _, name = key.partition(".")
        origin = self.origins[key]
        del self.content[section][name]
        self._forget(key)
        return origin

    def set(self, override: Override) -> Problem | None:
        """Apply one `path=value` of the command line; deletions too."""
        key, value = override.key_or_group, _value_of(override)
        where: Any = self.content
        *above, last = key.split(".")
        for depth, part in enumerate(above):
            path = ".".join(above[: depth + 1])
            inner = where[int(part)] if _indexes(where, part) else where.get(part) if isinstance(where, dict) else None
            if inner is None and isinstance(where, dict) and not override.is_delete():
                inner = where[part] = {}
                self.origins[path] = COMMAND_LINE
            if not isinstance(inner, dict | list):
                what = f"{path} is not a section" if inner is not None else f"{path} is not set"
                return Problem(key, f"{override.input_line}: {what}", COMMAND_LINE, "override.path")
            where = inner
        if override.is_delete():
            if not isinstance(where, dict) or last not in where:
                hint = did_you_mean(last, where) if isinstance(where, dict) else ""
                text = f"{override.input_line}: {key} is not set, so it can't be taken away; {hint or 'drop it'}"
                return Problem(key, text, COMMAND_LINE, "override.delete")
            del where[last]
            self._forget(key)
        elif _indexes(where, last):
            where[int(last)] = value
        elif isinstance(where, list):
            text = f"{override.input_line}: {'.'.join(above)} has entries 0 to {len(where) - 1}"
            return Problem(key, text, COMMAND_LINE, "override.path")
        else:
            self._merge(where, {last: value}, f"{'.'.join(above)}." if above else "", lambda _: COMMAND_LINE)
        return None

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
        self.origins[key] = origin(key)
        parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for name, inner in parts:
            self._mark(f"{key}.{name}", inner, origin)

    def _forget(self, key: str) -> None:
        for known in [k for k in self.origins if k == key or k.startswith(f"{key}.")]:
            del self.origins[known]


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
    parser, parsed, problems = OverridesParser.create(), [], []

    def refuse(text: str, what: str, code: str) -> None:
        problems.append(Problem("", f"{show(text)}: {what}", COMMAND_LINE, code))

    for text in overrides:
        if len(text) > MAX_WORD or _depth(text) > MAX_DEPTH:
            limit = f"longer than {MAX_WORD} characters" if len(text) > MAX_WORD else f"nested deeper than {MAX_DEPTH}"
            refuse(text, f"{limit}; write it in a recipe", "override.size")
            continue
        try:
            one = parser.parse_overrides([text])[0]
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
    steps = (1 if c in "[{(" else -1 for c in text if c in "[{()}]")
    return max(accumulate(steps), default=0)


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
            options = search.choices(group)
            hint = did_you_mean(choice, options) or f"choose {one_of(options)}"
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
    search.orders[tuple(lines)] = [(one.package or "", search.read(one.config_path)) for one in ordered.defaults]
    return search.orders[tuple(lines)]


def _leave_out(
    tree: _Tree, search: SearchPath, recipe_name: str, chosen: Mapping[str, str], values: Sequence[Override]
) -> tuple[str, ...]:
    """Take away what files set for a kind that a choice of the command line replaces; see Composed.left_out.

    A key that the command line names itself stays, so that it is refused, or taken away by its own word.
    """
    left_out = []
    named = {part for value in values for part in accumulate(value.key_or_group.split("."), "{}.{}".format)}
    for one in replaced_kinds(chosen, _ordered(search, recipe_name, {}), _ordered(search, recipe_name, chosen)):
        for key in one.keys:
            if key in tree.origins and key not in named:
                left_out.append(f"{key} ({tree.take(key)}): no key of {one.group}.kind={one.kind}")
        key, written = f"{one.group}.kind", value_at(tree.content, f"{one.group}.kind")
        if written not in (None, one.kind) and key not in named:
            left_out.append(f"{key}={show(written)} ({tree.take(key)}): {one.group}={one.choice} is chosen")
            tree.merge({one.group: {"kind": one.kind}}, lambda _, origin=one.origin: origin)
    return tuple(left_out)


def _finish(tree: _Tree, values: Sequence[Override], search: SearchPath) -> Composed:
    problems = [p for one in values if (p := tree.set(one)) is not None]
    content, origins = interpolate(tree.content, tree.origins, problems)
    for key, origin in sorted(origins.items()):
        if key.rpartition(".")[2].startswith("_") and key.endswith("_"):
            problems.append(Problem(key, f"{key}: a recipe is data, it can't name code; drop it", origin, "key.code"))
    for key in _missing(content):
        text = f"{key}=??? must be set; in the recipe, or on the command line: {key}=..."
        problems.append(Problem(key, text, origin_of(origins, key), "key.missing"))
    bad = {p.key for p in problems if p.key}
    try:
        recipe = Recipe.model_validate_json(json.dumps(content))
    except ValidationError as error:
        recipe = None
        choices = {group: search.choices(group) for group in SECTIONS}
        typed = typed_problems(error, model=Recipe, content=content, origins=origins, choices=choices)
        problems += [p for p in typed if p.key not in bad and "${" not in str(value_at(content, p.key))]
    readable = checkable(content, origins, bad) if recipe is None else Checkable(recipe, frozenset(bad), origins)
    if readable is not None:
        held = readable.recipe.model_dump(mode="json")
        quoted = quoted_counts(content, held, origins, but=readable.bad)
        problems += quoted
        bad |= {p.key for p in quoted}
    if recipe is not None and not problems:
        return Composed(recipe, origins)
    raise PartlyError(problems, checkable(content, origins, bad))


def _missing(content: Any, prefix: str = "") -> list[str]:
    if content == MISSING:
        return [prefix]
    parts = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [key for name, inner in parts for key in _missing(inner, f"{prefix}.{name}" if prefix else str(name))]
