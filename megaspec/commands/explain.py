"""`megaspec explain KEY|CODE`: what a key means and where its value is from; what a rule asks, and how it is kept."""

import argparse
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from rich.table import Table

from megaspec.commands.codes import CODES, Known
from megaspec.commands.stated import Stated, stated
from megaspec.compose.compose import Composed, compose, recompose
from megaspec.compose.search_path import SearchPath
from megaspec.compose.words import words_parser
from megaspec.core.errors import COMMAND_LINE, DataError, Problem, RecipeError
from megaspec.core.fields import ENTRY, FieldAt, fields_of, same_path, tags_of
from megaspec.core.marked_yaml import parse_yaml
from megaspec.core.problems import did_you_mean, one_of, show, value_at
from megaspec.core.terminal import escape, terminal
from megaspec.recipe import SECTIONS, Recipe
from megaspec.resolve.fill import FILLS, Draft
from megaspec.resolve.resolver import settle
from megaspec.rules.case import Case
from megaspec.rules.examples import EXAMPLES, Example
from megaspec.rules.reads import fields_read
from megaspec.rules.table import RULES
from megaspec.rules.unbuilt import UNBUILT

_UNITS = ("tokens", "sequences", "steps", "seconds", "bytes", "layers", "ranks", "micro batches")
_ABBREVIATED = ("et al", "e.g", "i.e")
_BY_NAME = {"_seconds": "seconds", "_steps": "steps", "_mb": "MB (10^6 bytes)"}


def add_parser(commands: Any) -> None:
    """The parser of `explain`."""
    text = "what a key means, its type, default, value and rules; or what a code of a problem means"
    command = commands.add_parser(
        "explain", help=text, description=text, allow_abbrev=False, parents=[words_parser()], add_help=True
    )
    command.usage = "megaspec explain KEY|CODE [recipe=NAME a.b=c ...] [--config-dir DIR]"


def run(args: argparse.Namespace) -> int:
    """Print what is known. RecipeError: nothing is; the nearest names."""
    asked = [w for w in args.words if "=" not in w and not w.startswith("~")]
    words = [w for w in args.words if w not in asked]
    if len(asked) != 1:
        raise RecipeError(f"give one key or code, not {len(asked)}: megaspec explain optim.lr, or tp-heads")
    name = asked[0].rstrip(".")  # a completed section ends in a dot
    if name in RULES or name in CODES:
        lines = list(explain_rule(name) if name in RULES else explain_code(CODES[name]))
    else:
        lines = list(explain_key(name, in_recipe(words, args.config_dir)))
    out = terminal()
    out.print(f"[bold]{escape(name)}")
    table = Table.grid(padding=(0, 2))
    for heading, text in lines:
        table.add_row(heading, escape(text))
    out.print(table)
    return 0


def in_recipe(words: list[str], config_dirs: list[str]) -> Stated | None:
    """The recipe in which a key's value is asked for; None where no recipe is named."""
    named = [w.removeprefix("recipe=") for w in words if w.startswith("recipe=")]
    if not named and not words:
        return None
    if len(named) != 1:
        raise RecipeError([Problem("recipe", "name one recipe: recipe=NAME", COMMAND_LINE, "choice.recipe")])
    return stated(named[0], [w for w in words if not w.startswith("recipe=")], config_dirs)


def explain_key(key: str, recipe: Stated | None) -> Iterator[tuple[str, str]]:
    """Lines about a key, or about a section and its keys. RecipeError: there is no such key."""
    every = list(fields_of(Recipe))
    found = [f for f in every if same_path(f.path, key)]
    if not found:
        raise RecipeError([Problem(key, f"{key}: {_nearest(key, every)}", code="key.unknown")])
    if recipe is not None and len(found) > 1:
        content = recipe.recipe.model_dump(mode="json")
        found = [f for f in found if _is_chosen(f, content)] or found
    for alike in [found] if key.endswith(".kind") else _grouped(found):
        kinds = list(dict.fromkeys(f.when for f in alike if f.when))
        if kinds:
            yield "when", one_of(kinds)
        yield from _about(alike)
    if any(f"{key}.".startswith(f"{path}.") for one in UNBUILT for path in one.fields):
        yield "today", "can be planned, not trained yet: train refuses it"
    if recipe is not None:
        yield from _value(key, recipe)
    yield from _keys_of(found, every)
    if key in SECTIONS:
        yield "choices", f"{key}={f', {key}='.join(SearchPath().choices(key))}"
    for code in rules_about(key):
        yield "rule", f"{code}: {RULES[code].__doc__}"


def _grouped(found: list[FieldAt]) -> list[list[FieldAt]]:
    """Fields of several classes at one path, those together that say the same."""
    groups: dict[tuple[str, str, str], list[FieldAt]] = {}
    for field in found:
        groups.setdefault((field.description, field.type_in_words, _default(field)), []).append(field)
    return list(groups.values())


def _about(alike: list[FieldAt]) -> Iterator[tuple[str, str]]:
    field = alike[0]
    if field.description:
        yield "means", field.description
    for model in field.models:
        tags = tags_of(model)
        yield f"kind {one_of(tags)}" if tags and len(field.models) > 1 else "means", str(model.__doc__).splitlines()[0]
    if field.models:
        return
    yield "type", one_of(list(dict.fromkeys(f.type_in_words for f in alike)))
    if "number" in field.type_in_words and (unit := unit_of(field)):
        yield "unit", unit
    if "whole number" in field.type_in_words:
        yield "written", "also as 1e6, 64k, 1.5B or 15T (powers of ten)"
    yield "default", _default(field)


def _default(field: FieldAt) -> str:
    if field.is_required:
        return "none: it must be set"
    default = field.info.get_default(call_default_factory=True)
    return json.dumps(default) if isinstance(default, tuple) else "" if field.models else show(default)


def unit_of(field: FieldAt) -> str:
    """The unit that a field's name or the beginning of its description says; "" where neither does."""
    name = field.path.rpartition(".")[2]
    by_name = next((unit for ending, unit in _BY_NAME.items() if name.endswith(ending)), "")
    first = field.description.split(".")[0].lower()
    places = {unit: first.find(unit) for unit in _UNITS if unit in first.split(":")[-1][:40]}
    return by_name or min(places, key=lambda unit: places[unit], default="")


def _value(key: str, recipe: Stated) -> Iterator[tuple[str, str]]:
    """The value in a recipe, and who set it."""
    name, composed = recipe.recipe.name, recipe.composed
    try:
        spec = recipe.spec()
        content, reasons = spec.model_dump(mode="json"), {d.key: d.reason for d in spec.decisions}
    except (RecipeError, DataError):
        content, reasons = composed.recipe.model_dump(mode="json"), {}
    value = value_at(content, key)
    shown = json.dumps(value) if isinstance(value, list) else "" if isinstance(value, dict) else show(value)
    if isinstance(value, dict):
        return
    origin = composed.origins.get(key, "default")
    if key in reasons:
        origin = f"decided for {recipe.target.gpus} x {recipe.hardware.name}: {reasons[key]}"
    yield f"in {name}", f"{shown}   ({origin})"


def _keys_of(found: list[FieldAt], every: list[FieldAt]) -> Iterator[tuple[str, str]]:
    """The keys of a section, each with the beginning of its description; and which kinds have it, where not all do."""
    sections = {f.path for f in found} | {f"{f.path}.{ENTRY}" for f in found}
    below = [f for f in every if f.path.rpartition(".")[0] in sections and not f.path.endswith(f".{ENTRY}")]
    classes = {f.when for f in below}
    names = dict.fromkeys(f.path.rpartition(".")[2] for f in below)
    if any(len(f.models) > 1 for f in found):
        names.pop("kind", None)  # each kind has a line of its own
    for name in names:
        same = [f for f in below if f.path.rpartition(".")[2] == name]
        only = f"   [{one_of([f.when for f in same])}]" if {f.when for f in same} < classes else ""
        words = one_of(list(dict.fromkeys(word for f in same for word in f.literals))) if name == "kind" else ""
        yield name, f"{words or first_sentence(same[0].description) or same[0].type_in_words}{only}"


def first_sentence(text: str) -> str:
    """The text up to the first full stop that ends a sentence, without it: none inside brackets does."""
    for at in (found.start() for found in re.finditer(r"\.(?= |$)", text)):
        before = text[:at]
        if before.count("(") == before.count(")") and not before.endswith(_ABBREVIATED):
            return before
    return text


def _is_chosen(field: FieldAt, content: Mapping[str, Any]) -> bool:
    if not field.when:
        return True
    kind_key, _, kinds = field.when.partition("=")
    return str(value_at(content, kind_key)) in kinds.replace(" or ", ", ").split(", ")


def _nearest(key: str, every: list[FieldAt]) -> str:
    paths = list(dict.fromkeys(f.path for f in every))
    section, _, name = key.rpartition(".")
    siblings = [p for p in paths if p.rpartition(".")[0] == section and section]
    hint = did_you_mean(key, siblings) or did_you_mean(key, [*paths, *RULES, *CODES])
    elsewhere = [p for p in paths if p.rpartition(".")[2] == name] or [p for p in paths if len(name) > 3 and name in p]
    hint = f"did you mean {one_of(elsewhere[:4])}?" if elsewhere else hint
    return f"neither a key nor a code; {hint or f'sections are {one_of(list(Recipe.model_fields))}'}"


def explain_rule(code: str) -> Iterator[tuple[str, str]]:
    """A rule, an example that breaks it with the message, and what mends it."""
    example = EXAMPLES[code]
    yield "rule", str(RULES[code].__doc__)
    yield "wrong", _command(example, example.overrides)
    yield "says", message_of(code, example)
    yield "mended", shlex.join(example.mended)
    read = read_by(code)
    if read:
        yield "looks at", ", ".join(sorted(read))


def message_of(code: str, example: Example) -> str:
    """What the example is refused with."""
    composed = _composed(example)
    try:
        settle(composed.recipe, example.target, example.facts, composed.origins)
    except RecipeError as error:
        return next(p.message for p in error.problems if p.code == code)
    raise AssertionError(f"the example of {code} breaks no rule")


def _command(example: Example, overrides: tuple[str, ...]) -> str:
    target = example.target
    machine = f"   (on {target.gpus} x {target.gpu})" if target.gpus else ""
    started = f"   (torchrun started {target.world_size} ranks)" if target.world_size else ""
    return f"megaspec plan {shlex.join([f'recipe={example.recipe}', *overrides])}{machine}{started}"


def explain_code(known: Known) -> Iterator[tuple[str, str]]:
    """A code that is no rule."""
    yield "means", known.what
    if known.words or known.yaml:
        shown = known.yaml if len(known.yaml) < 60 else f"{known.yaml[:40]} ..."
        wrong = f"megaspec plan {shlex.join(['recipe=hello', *known.words])}" if known.words else shown
        yield "wrong", wrong
        yield "says", refusal(known)
    yield "way out", known.way_out


def refusal(known: Known) -> str:
    """What the example of a code is refused with."""
    try:
        if known.yaml:
            parse_yaml(known.yaml, label="recipes/mine.yaml")
        else:
            compose("hello", known.words)
    except RecipeError as error:
        return str(error.problems[0])
    raise AssertionError(f"{known} is not refused")


def rules_about(key: str) -> list[str]:
    """Codes of the rules that look at a field, or name it, when they look at their own example."""
    return [code for code in RULES if any(same_path(one, key) for one in read_by(code))]


@cache
def read_by(code: str) -> frozenset[str]:
    """Paths of the fields that a rule looks at in its example, and the one that it names."""
    example = EXAMPLES[code]
    draft = Draft(_composed(example).recipe, example.target, example.facts)
    for fill in FILLS:
        fill(draft)
    filled = Recipe.model_validate_json(json.dumps(draft.content))
    decided = frozenset(d.key for d in draft.decisions)
    return fields_read(RULES[code], Case(filled, example.target, example.facts, decided)) | {example.key}


def _composed(example: Example) -> Composed:
    """By the quick way where no group is chosen: a hundred of them are asked for at once."""
    if all("." in word.partition("=")[0] and not word.startswith("~") for word in example.overrides):
        return recompose(_plain(example.recipe), example.recipe, example.overrides)
    return compose(example.recipe, example.overrides)


@cache
def _plain(name: str) -> dict[str, Any]:
    return compose(name).recipe.model_dump(mode="json")
