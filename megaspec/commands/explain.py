"""`megaspec explain KEY|CODE`: what a key means and where its value is from; what a rule asks, and how it is kept."""

import argparse
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from rich.table import Table

from megaspec.commands.codes import CODES, KnownCode
from megaspec.commands.stated import Stated, stated
from megaspec.compose.compose import Composed, compose, recompose
from megaspec.compose.search_path import SearchPath
from megaspec.compose.words import words_parser
from megaspec.core.errors import COMMAND_LINE, DataError, Problem, RecipeError, chosen_in
from megaspec.core.fields import ENTRY, NAME, FieldAt, fields_of, same_path
from megaspec.core.kinds import tags_of
from megaspec.core.marked_yaml import parse_yaml
from megaspec.core.problems import did_you_mean, one_of, show, value_at
from megaspec.core.terminal import escape, terminal
from megaspec.recipe import SECTIONS, Recipe
from megaspec.resolve.fill import FILLS, ResolverDraft
from megaspec.resolve.resolver import settle
from megaspec.rules.case import Case
from megaspec.rules.examples import EXAMPLES, Example
from megaspec.rules.reads import fields_read
from megaspec.rules.table import RULES
from megaspec.rules.unbuilt import UNBUILT

# That the beginning of a description may say.
_UNITS = ("tokens", "sequences", "steps", "seconds", "bytes", "layers", "ranks", "micro batches")
# A full stop behind one of these ends no sentence.
_ABBREVIATED = ("et al", "e.g", "i.e")
# Ending of a key -> unit.
_UNIT_BY_ENDING = {"_seconds": "seconds", "_steps": "steps", "_mb": "MB (10^6 bytes)"}


def add_parser(commands: Any) -> None:
    """The parser of `explain`."""
    text = "what a key means, its type, default, value and rules; or what a code of a problem means"
    command = commands.add_parser(
        "explain", help=text, description=text, allow_abbrev=False, parents=[words_parser()], add_help=True
    )
    command.usage = "megaspec explain KEY|CODE [recipe=NAME a.b=c ...] [--config-dir DIR]"


def run(args: argparse.Namespace) -> int:
    """Print what is known. RecipeError: nothing is; the nearest names."""
    asked = []
    recipe_words = []
    for word in args.words:
        if "=" in word or word.startswith("~"):
            recipe_words.append(word)
        else:
            asked.append(word)
    if len(asked) != 1:
        raise RecipeError(f"give one key or code, not {len(asked)}: megaspec explain optim.lr, or tp-heads")
    name = asked[0].rstrip(".")  # a completed section ends in a dot
    if name in RULES:
        lines = explain_rule(name)
    elif name in CODES:
        lines = explain_code(CODES[name])
    else:
        lines = explain_key(name, in_recipe(recipe_words, args.config_dir))
    table = Table.grid(padding=(0, 2))
    for heading, text in lines:
        table.add_row(heading, escape(text))
    out = terminal()
    out.print(f"[bold]{escape(name)}")
    out.print(table)
    return 0


def in_recipe(words: list[str], config_dirs: list[str]) -> Stated | None:
    """The recipe in which a key's value is asked for; None where no recipe is named."""
    if not words:
        return None
    names = [word.removeprefix("recipe=") for word in words if word.startswith("recipe=")]
    if len(names) != 1:
        raise RecipeError([Problem("recipe", "name one recipe: recipe=NAME", COMMAND_LINE, "choice.recipe")])
    overrides = [word for word in words if not word.startswith("recipe=")]
    return stated(names[0], overrides, config_dirs)


def explain_key(key: str, recipe: Stated | None) -> Iterator[tuple[str, str]]:
    """Lines about a key, or about a section and its keys. RecipeError: there is no such key."""
    every = fields_of(Recipe)
    found = [field for field in every if same_path(field.path, key)]
    if not found:
        raise RecipeError([Problem(key, f"{key}: {_nearest(key, every)}", code="key.unknown")])
    if recipe is not None and len(found) > 1:
        content = recipe.recipe.model_dump(mode="json")
        # the recipe's kind of the section is the one that is meant; all of them where it has none of these
        found = [field for field in found if _is_chosen(field, content)] or found
    # `kind` has one meaning, and says in one line which kinds there are
    groups = [found] if key.endswith(".kind") else _grouped(found)
    for alike in groups:
        kinds = _distinct(field.when for field in alike if field.when)
        if kinds:
            yield "when", one_of(kinds)
        yield from _about(alike)
    if _is_unbuilt(key):
        yield "today", "can be planned, not trained yet: train refuses it"
    if recipe is not None:
        yield from _value(key, recipe)
    yield from _keys_of(found, every)
    if key in SECTIONS:
        options = f", {key}=".join(SearchPath().choices(key))
        yield "choices", f"{key}={options}"
    for code in rules_about(key):
        yield "rule", f"{code}: {RULES[code].__doc__}"


def _is_unbuilt(key: str) -> bool:
    """True where some value of a key, or of a section around it, can't be trained yet."""
    for unbuilt in UNBUILT:
        for path in unbuilt.fields:
            if f"{key}.".startswith(f"{path}."):
                return True
    return False


def _distinct(words: Iterable[str]) -> list[str]:
    """Each word once, in the order in which they first come."""
    return list(dict.fromkeys(words))


def _grouped(found: list[FieldAt]) -> list[list[FieldAt]]:
    """Fields of several classes at one path, those together that say the same."""
    groups: dict[tuple[str, str, str], list[FieldAt]] = {}
    for field in found:
        said = (field.description, field.type_in_words, _default(field))
        groups.setdefault(said, []).append(field)
    return list(groups.values())


def _about(alike: list[FieldAt]) -> Iterator[tuple[str, str]]:
    """What fields mean that say the same: of a section its classes, of a plain value its type, unit and default."""
    field = alike[0]
    if field.description:
        yield "means", field.description
    if field.models:
        for model in field.models:
            heading = "means"
            tags = tags_of(model)
            if tags and len(field.models) > 1:
                heading = f"kind {one_of(tags)}"
            yield heading, str(model.__doc__).splitlines()[0]
        return
    yield "type", one_of(_distinct(one.type_in_words for one in alike))
    if "number" in field.type_in_words:
        unit = unit_of(field)
        if unit:
            yield "unit", unit
    if "whole number" in field.type_in_words:
        yield "written", "also as 1e6, 64k, 1.5B or 15T (powers of ten)"
    yield "default", _default(field)


def _default(field: FieldAt) -> str:
    """The default in words; "" for that of a section, whose keys have their own."""
    if field.is_required:
        return "none: it must be set"
    default = field.info.get_default(call_default_factory=True)
    if isinstance(default, tuple):
        return json.dumps(default)
    if field.models:
        return ""
    return show(default)


def unit_of(field: FieldAt) -> str:
    """The unit that a field's name or the beginning of its description says; "" where neither does."""
    name = field.path.rpartition(".")[2]
    for ending, unit in _UNIT_BY_ENDING.items():
        if name.endswith(ending):
            return unit
    sentence = field.description.split(".")[0].lower()
    # behind a colon, as in `bucket: tokens of one ...`, and early: what comes later counts something else
    beginning = sentence.split(":")[-1][:40]
    named = [unit for unit in _UNITS if unit in beginning]
    return min(named, key=sentence.find, default="")


def _value(key: str, recipe: Stated) -> Iterator[tuple[str, str]]:
    """The value in a recipe, and who set it."""
    composed = recipe.composed
    decided: dict[str, str] = {}
    try:
        spec = recipe.spec()
        content = spec.model_dump(mode="json")
        decided = {decision.key: decision.reason for decision in spec.decisions}
    except (RecipeError, DataError):
        content = composed.recipe.model_dump(mode="json")  # what is wrong elsewhere doesn't hide what is written here
    value = value_at(content, key)
    if isinstance(value, dict):
        return
    shown = json.dumps(value) if isinstance(value, list) else show(value)
    origin = composed.origins.get(key, "default")
    if key in decided:
        origin = f"decided for {recipe.target.gpus} x {recipe.hardware.name}: {decided[key]}"
    yield f"in {recipe.recipe.name}", f"{shown}   ({origin})"


def _keys_of(found: list[FieldAt], every: Sequence[FieldAt]) -> Iterator[tuple[str, str]]:
    """The keys of a section, each with the beginning of its description; and which kinds have it, where not all do."""
    sections = set()
    for field in found:
        sections |= {field.path, f"{field.path}.{ENTRY}", f"{field.path}.{NAME}"}
    # name of a key -> the fields of that name, one for each class that has it
    fields_named: dict[str, list[FieldAt]] = {}
    for field in every:
        section, _, name = field.path.rpartition(".")
        if section in sections and name not in (ENTRY, NAME):
            fields_named.setdefault(name, []).append(field)
    all_kinds = set()
    for fields in fields_named.values():
        all_kinds |= {field.when for field in fields}
    if any(len(field.models) > 1 for field in found):
        fields_named.pop("kind", None)  # each kind has a line of its own
    for name, fields in fields_named.items():
        text = ""
        if name == "kind":
            kinds_of_field: list[str] = []
            for field in fields:
                kinds_of_field += field.literals
            text = one_of(_distinct(kinds_of_field))
        if not text:
            text = first_sentence(fields[0].description) or fields[0].type_in_words
        kinds = _distinct(field.when for field in fields)
        if set(kinds) < all_kinds:
            text += f"   [{one_of(kinds)}]"
        yield name, text


def first_sentence(text: str) -> str:
    """The text up to the first full stop that ends a sentence, without it: none inside brackets does."""
    for full_stop in re.finditer(r"\.(?= |$)", text):
        before = text[: full_stop.start()]
        if before.count("(") == before.count(")") and not before.endswith(_ABBREVIATED):
            return before
    return text


def _is_chosen(field: FieldAt, content: Mapping[str, Any]) -> bool:
    """True where a recipe's kinds choose the class of a field; `when` says `optim.kind=adamw or muon`."""
    if not field.when:
        return True
    kind_key, _, kinds = field.when.partition("=")
    return str(value_at(content, kind_key)) in kinds.replace(" or ", ", ").split(", ")


def _nearest(key: str, every: Sequence[FieldAt]) -> str:
    """What a word that is neither a key nor a code may have been meant to be."""
    paths = _distinct(field.path for field in every)
    section, _, name = key.rpartition(".")
    # the same name in another section says most
    elsewhere = [path for path in paths if path.rpartition(".")[2] == name]
    if not elsewhere and len(name) > 3:
        elsewhere = [path for path in paths if name in path]
    hint = ""
    if elsewhere:
        hint = f"did you mean {one_of(elsewhere[:4])}?"
    if not hint and section:
        siblings = [path for path in paths if path.rpartition(".")[0] == section]
        hint = did_you_mean(key, siblings)
    if not hint:
        hint = did_you_mean(key, [*paths, *RULES, *CODES])
    if not hint:
        hint = f"sections are {one_of(list(Recipe.model_fields))}"
    return f"neither a key nor a code; {hint}"


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
        return next(problem.message for problem in error.problems if problem.code == code)
    raise AssertionError(f"the example of {code} breaks no rule")


def _command(example: Example, overrides: tuple[str, ...]) -> str:
    """The command line that says an example, with the machine that it is on."""
    command = f"megaspec plan {shlex.join([f'recipe={example.recipe}', *overrides])}"
    target = example.target
    if target.gpus:
        command += f"   (on {target.gpus} x {target.gpu})"
    if target.world_size:
        command += f"   (torchrun started {target.world_size} ranks)"
    return command


def explain_code(known: KnownCode) -> Iterator[tuple[str, str]]:
    """A code that is no rule."""
    yield "means", known.what
    if known.words:
        yield "wrong", f"megaspec plan {shlex.join(['recipe=hello', *known.words])}"
        yield "says", refusal(known)
    elif known.yaml:
        shown = known.yaml
        if len(shown) >= 60:
            shown = f"{shown[:40]} ..."
        yield "wrong", shown
        yield "says", refusal(known)
    yield "way out", known.way_out


def refusal(known: KnownCode) -> str:
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
    codes = []
    key = _without_last_number(key)
    for code in RULES:
        if any(same_path(path, key) for path in read_by(code)):
            codes.append(code)
    return codes


@cache
def read_by(code: str) -> frozenset[str]:
    """Paths of the fields that a rule looks at in its example, and the one that it names."""
    example = EXAMPLES[code]
    composed = _composed(example)
    draft = ResolverDraft(composed.recipe, example.target, example.facts)
    for fill in FILLS:
        fill(draft)
    filled = Recipe.model_validate_json(json.dumps(draft.content))
    decided = frozenset(decision.key for decision in draft.decisions)
    case = Case(filled, example.target, example.facts, decided, chosen_in(composed.origins))
    # by the names that all recipes have in common: entries without their numbers, sections without the user's names
    key = _without_last_number(example.key)
    named = next(field.path for field in fields_of(Recipe) if same_path(field.path, key))
    return fields_read(RULES[code], case) | {named}


def _without_last_number(key: str) -> str:
    """An entry of a list as a whole has no field of its own: that of its list."""
    of_list, _, last = key.rpartition(".")
    return of_list if last.isdigit() else key


def _composed(example: Example) -> Composed:
    """The example's recipe; by the quick way where neither a group is chosen nor a section of another kind: a hundred
    of them are asked for at once. A recipe that says every key has those of the kind that was chosen before."""
    for word in example.overrides:
        is_single_value = "." in word.partition("=")[0] and not word.startswith("~")
        if not is_single_value or "{kind:" in word:
            return compose(example.recipe, example.overrides)
    return recompose(_plain(example.recipe), example.recipe, example.overrides)


@cache
def _plain(name: str) -> dict[str, Any]:
    return compose(name).recipe.model_dump(mode="json")
