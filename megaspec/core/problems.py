"""Typing errors in the words of a recipe: path=value, the rule, the nearest legal key or value, where it was set."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from megaspec.core.errors import Problem
from megaspec.core.frozen import parse_count
from megaspec.core.kinds import annotation_of, is_open, models_of, options_of, tags_of
from megaspec.core.marked_yaml import Quoted, plain_scalar

_PLANNING = {
    "hardware": "a run takes the machine that it is on",
    "gpus": "a run takes launcher.ranks=N",
    "throughput": "a run does without",
}
"""Words of commands that are often taken for keys, and what stands in their place."""
_WORDS = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
    "model_type": "a section (a mapping of keys to values)",
    "model_attributes_type": "a section (a mapping of keys to values)",
    "dict_type": "a section (a mapping of keys to values)",
    "finite_number": "a finite number",
}
# Errors of a key that is not there.
_ABSENT = ("missing", "union_tag_not_found")
MOST_PROBLEMS = 50
_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
    "too_short": ("a list whose length is at least", "min_length"),
    "too_long": ("a list whose length is at most", "max_length"),
}


def origin_of(origins: Mapping[str, str], key: str) -> str:
    """Where a dotted path was set: its own origin, else that of the nearest section around it, else ""."""
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return ""


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """`did you mean a or b?`, or "" when nothing is near."""
    options = list(options)
    near = get_close_matches(word, options, n=3, cutoff=0.6)
    if not near:
        # d_ffn is near to D-FFN once case and underscores are out of the way
        by_plain_name = {option.replace("_", "").lower(): option for option in options}
        plain_matches = get_close_matches(word.replace("_", "").lower(), by_plain_name, n=3, cutoff=0.7)
        near = [by_plain_name[plain] for plain in plain_matches]
    if not near:
        return ""
    return f"did you mean {one_of(near)}?"


def one_of(options: Sequence[object]) -> str:
    """`a, b or c`."""
    words = [str(option) for option in options]
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} or {words[-1]}"


def show(value: object) -> str:
    """A value as a recipe writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = f"{value}"
    if len(text) > 80:
        return f"{text[:77]}..."
    return text


def as_word(value: object) -> str:
    """A plain value or a list of names, whole, as it stands behind `path=` on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    # a layout's letters mean something to the shell and to Hydra
    if isinstance(value, str) and not re.fullmatch(r"\w+", value):
        return f"'{value}'"
    return show(value)


def in_a_shell(override: str) -> str:
    """An override with the quotes that a shell takes away from it."""
    if "'" in override:
        return f'"{override}"'
    return override


def value_at(content: Any, key: str) -> Any:
    """The value at a dotted path of plain data; None where nothing is."""
    for part in filter(None, key.split(".")):
        if isinstance(content, Mapping):
            content = content.get(part)
        elif isinstance(content, Sequence) and not isinstance(content, str) and part.isdigit():
            number = int(part)
            if number >= len(content):
                return None
            content = content[number]
        else:
            return None
    return content


def parts_of(content: Any) -> Iterable[tuple[str | int, Any]]:
    """What lies directly in plain data: keys and values of a mapping, numbers and values of a list, else nothing."""
    if isinstance(content, Mapping):
        return content.items()
    if isinstance(content, list):
        return enumerate(content)
    return ()


def path_below(path: str, name: object) -> str:
    """The dotted path of what a section or list at `path` holds under a name or number; "" is the path of the top."""
    if not path:
        return str(name)
    return f"{path}.{name}"


@dataclass(frozen=True)
class _RefusedRecipe:
    """A recipe that pydantic refuses, and what messages about it need."""

    model: type[BaseModel]
    content: Mapping[str, Any]
    origins: Mapping[str, str]
    """Dotted path -> where it was set."""
    choices: Mapping[str, Sequence[str]]
    """Section -> its shipped options."""


def typed_problems(
    error: ValidationError,
    *,
    model: type[BaseModel],
    content: Mapping[str, Any],
    origins: Mapping[str, str],
    choices: Mapping[str, Sequence[str]],
) -> list[Problem]:
    """Every typing error of a recipe, one Problem per key. `choices` lists the shipped options of each section."""
    recipe = _RefusedRecipe(model, content, origins, choices)
    # A union of types yields one error for each of its alternatives: they belong to one key, and become one message.
    errors_of: dict[str, list[dict[str, Any]]] = {}
    owner_of: dict[str, type[BaseModel] | None] = {}
    for one in error.errors(include_url=False):
        key, owner = _path(model, one["loc"])
        if one["type"] == "too_short" and len(value_at(content, key)) >= one["ctx"]["min_length"]:
            continue  # long enough: its entries are wrong, and told themselves
        if one["type"] not in _ABSENT and not _is_said(content, key):
            continue  # it follows another value, which is told itself
        if one["type"].startswith("union_tag"):
            # pydantic names the section; what is wrong or missing is its `kind`, given in quotes
            key = f"{key}.{one['ctx']['discriminator'].strip(chr(39))}"
        errors_of.setdefault(key, []).append(one)
        owner_of[key] = owner
    for key in list(errors_of):
        # a list or section of the right form: that it is no word such as auto either adds nothing to what is in it
        has_wrong_entries = any(other.startswith(f"{key}.") for other in errors_of)
        if has_wrong_entries and all(one["type"] == "literal_error" for one in errors_of[key]):
            del errors_of[key]
    problems = []
    for key in list(errors_of)[:MOST_PROBLEMS]:
        problems.append(_problem(recipe, key, errors_of[key], owner=owner_of[key]))
    rest = len(errors_of) - len(problems)
    if rest:
        problems.append(Problem("", f"{rest} more keys are wrong; mend these first", code="key.more"))
    return problems


def _problem(
    recipe: _RefusedRecipe, key: str, errors: list[dict[str, Any]], *, owner: type[BaseModel] | None
) -> Problem:
    """What is wrong with one key. `owner`: the class that its last name was looked up in."""
    kind = errors[0]["type"]
    if kind == "extra_forbidden":
        text = _unknown_key(recipe, key, owner)
        return Problem(key, text, origin_of(recipe.origins, key), "key.unknown")
    if kind in _ABSENT:
        section = key.rpartition(".")[0]
        return Problem(key, _missing_key(recipe, key), origin_of(recipe.origins, section), "key.missing")
    text = _wrong_value(recipe, key, errors)
    return Problem(key, text, origin_of(recipe.origins, key), "key.type")


def _is_said(content: Mapping[str, Any], key: str) -> bool:
    """Whether something stands at a dotted path of plain data, or the path is that of its top."""
    section, _, name = key.rpartition(".")
    holder = value_at(content, section)
    if isinstance(holder, Mapping):
        return not key or name in holder
    # an entry of a list, or a text that stands for a section
    return holder is not None


def _missing_key(recipe: _RefusedRecipe, key: str) -> str:
    """Of a key that has to be set: how to set it."""
    section, _, name = key.rpartition(".")
    if name.isdigit():
        entries = show(value_at(recipe.content, section))
        return f"{section}={entries} has too few entries: entry {name} is missing"
    # a section without its kind is best chosen as a whole
    chosen = section if name == "kind" else key
    if chosen in recipe.choices:
        options = f", {chosen}=".join(recipe.choices[chosen])
        return f"{key} is missing; choose one: {chosen}={options}"
    return f"{key} is missing; set it in the recipe, or on the command line: {key}=..."


def _wrong_value(recipe: _RefusedRecipe, key: str, errors: list[dict[str, Any]]) -> str:
    """Of a value that is none of the alternatives: each alternative's rule, and what it may have been meant to be."""
    value = value_at(recipe.content, key)
    text = f"{key}={show(value)} must be {_rules_in_words(errors)}"
    if not isinstance(value, str):
        return text
    options: list[str] = []
    for error in errors:
        options += _literals(error)
    hint = did_you_mean(value, options)
    section, _, name = key.rpartition(".")
    if name == "kind" and any(is_open(one) for one in _annotations(recipe.model, section)):
        # after the nearest of ours: it may be a plug-in's that is named alike
        hint = f"{hint} --plugin PACKAGE adds kinds".lstrip()
    if hint:
        return f"{text}; {hint}"
    if any(is_open(one) for one in _annotations(recipe.model, key)):
        return f"{text}; write {key}={{kind: {value}}}, of a plug-in with --plugin PACKAGE"
    rules = [_rule(error) for error in errors]
    wants_no_text = any("number" in rule or rule == "true or false" for rule in rules)
    if wants_no_text:
        return f"{text}; {_why_text(value)}"
    return text


def _why_text(value: str) -> str:
    """Why what stands for a number is none."""
    is_a_number_without = not isinstance(plain_scalar(value), str) or parse_count(value) != value
    if isinstance(value, Quoted) and is_a_number_without:
        return f"{value!r} is text in quotes, take them away"
    return f"{value!r} reads as text"


def quoted_counts(
    content: Mapping[str, Any], typed: Mapping[str, Any], origins: Mapping[str, str], *, but: Iterable[str]
) -> list[Problem]:
    """Quoted texts such as '15T' that were taken for whole numbers. `typed`: the recipe that was made of the content;
    `but`: paths that say nothing in it, with all below them."""
    problems = []
    for key, value in _quoted(content, ""):
        is_unknown = any(key == one or key.startswith(f"{one}.") for one in but)
        if not is_unknown and isinstance(value_at(typed, key), int):
            text = f"{key}={show(value)} must be a whole number; {_why_text(value)}"
            problems.append(Problem(key, text, origin_of(origins, key), "key.type"))
    return problems


def _quoted(content: Any, prefix: str) -> Iterator[tuple[str, Quoted]]:
    """Every quoted text of plain data, with its dotted path."""
    if isinstance(content, Quoted):
        yield prefix, content
        return
    for name, inner in parts_of(content):
        yield from _quoted(inner, path_below(prefix, name))


def _unknown_key(recipe: _RefusedRecipe, key: str, owner: type[BaseModel] | None) -> str:
    """Of a key that its section does not have: whose key it is, or which one is near."""
    section, _, name = key.rpartition(".")
    value = value_at(recipe.content, key)
    written = key
    if not isinstance(value, dict):
        written = f"{key}={show(value)}"
    text = f"{written}: {name} is no key{_where(recipe, section)}"
    if key in _PLANNING:
        return f"{text}, but a word for plan, tune and verify; {_PLANNING[key]}"
    # other kinds of the same section that have it
    siblings = [model for model in _section_models(recipe.model, section) if name in model.model_fields]
    if siblings:
        return f"{text} but of {_of_other_kinds(recipe, key, siblings)}, or take it away with ~{key}"
    keys_here: list[str] = []
    if owner is not None:
        keys_here = [field for field in owner.model_fields if field != "kind"]
    hint = did_you_mean(name, keys_here)
    if not hint:
        hint = _same_name_elsewhere(recipe.model, name, value)
    if not hint:
        hint = f"its keys are {', '.join(keys_here)}"
    return f"{text}; {hint}"


def _of_other_kinds(recipe: _RefusedRecipe, key: str, others: Sequence[type[BaseModel]]) -> str:
    """Of a key that only other kinds of its section have: which they are, what is wrong with its value for them all,
    and the words that choose one which takes it."""
    section, _, name = key.rpartition(".")
    value = value_at(recipe.content, key)
    kinds = []
    ways = []
    taking = []
    errors = []
    for model in others:
        found = _errors_of_value(model, name, value)
        errors += found
        for tag in tags_of(model):
            kinds.append(f"{section}.kind={tag}")
            ways.append(_choosing(recipe, section, tag))
            if not found:
                taking.append(ways[-1])
    if taking:
        return f"{one_of(kinds)}; set {one_of(taking)}"
    text = f"{one_of(kinds)}, where it must be {_rules_in_words(errors)};"
    if isinstance(value, str):
        hint = did_you_mean(value, dict.fromkeys(word for error in errors for word in _literals(error)))
        text = f"{text} {hint}".rstrip()
    return f"{text} set {one_of(ways)}"


def _choosing(recipe: _RefusedRecipe, section: str, tag: str) -> str:
    """What chooses a kind of a section: its option where one is shipped, which sets all that the kind needs."""
    if tag in recipe.choices.get(section, ()):
        return f"{section}={tag}"
    return f"{section}.kind={tag}"


def _errors_of_value(model: type[BaseModel], name: str, value: Any) -> list[dict[str, Any]]:
    """What pydantic refuses of a plain value of a field; nothing of a section or list, whose parts have errors of their
    own."""
    if isinstance(value, dict | list):
        return []
    tag = tags_of(model)[0]
    try:
        model.model_validate_json(to_json({"kind": tag, name: value}))
    except ValidationError as error:
        return [one for one in error.errors(include_url=False) if one["loc"][:1] == (name,)]
    return []


def _where(recipe: _RefusedRecipe, section: str) -> str:
    """` of parallelism`, ` when optim.kind=sgd`, ` of a recipe`."""
    kind_here = value_at(recipe.content, f"{section}.kind")
    if kind_here:
        return f" when {section}.kind={kind_here}"
    if section:
        return f" of {section}"
    return " of a recipe"


def _same_name_elsewhere(model: type[BaseModel], name: str, value: Any) -> str:
    """`did you mean train.steps?`, or "" where no section has a key of that name."""
    known = field_paths(model)
    near = [path for path in known if path.rpartition(".")[2] == name]
    if not near:
        return ""
    return f"did you mean {one_of([_meant(path, value, known) for path in near[:3]])}?"


def _meant(path: str, value: Any, known: Sequence[str]) -> str:
    """Where a value may belong, so that it is told from where it was put: of a section with one key that key,
    `profile.steps`; at the top of a recipe with the value, `name=x`."""
    if not isinstance(value, dict):
        return path if "." in path else f"{path}={show(value)}"
    if len(value) == 1:
        inner = path_below(path, next(iter(value)))
        near = get_close_matches(inner, [one for one in known if one.startswith(f"{path}.")], n=1)
        if near:
            return near[0]
    return path if "." in path else f"{path} at the top of the recipe"


def _section_models(model: type[BaseModel], section: str) -> list[type[BaseModel]]:
    """The alternatives of a section that has several."""
    here: list[type[BaseModel]] = []
    for annotation in _annotations(model, section):
        here += models_of(annotation)
    if len(here) < 2:
        return []
    return list(dict.fromkeys(here))


def _annotations(model: type[BaseModel], key: str) -> list[Any]:
    """Of the field at a dotted path, or of the entries of a list or mapping: one of each class that may hold it."""
    owners = [model]
    found: list[Any] = []
    for name in filter(None, key.split(".")):
        entries = [_entry_annotation(annotation) for annotation in found]
        is_named = any(named_annotation(annotation) is not None for annotation in found)
        if name.isdigit() or is_named:
            found = entries
        else:
            found = [annotation_of(owner.model_fields[name]) for owner in owners if name in owner.model_fields]
        owners = []
        for annotation in found:
            owners += models_of(annotation)
    return found


def _rules_in_words(errors: Iterable[dict[str, Any]]) -> str:
    """What a value must be for one of its alternatives."""
    return " or ".join(dict.fromkeys(_rule(error) for error in errors))


def _rule(error: dict[str, Any]) -> str:
    """What a value must be, of one of pydantic's errors: `a whole number`, `at least 1`."""
    kind = error["type"]
    context = error.get("ctx", {})
    if kind in _WORDS:
        return _WORDS[kind]
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"{words} {context[name]}"
    if kind in ("literal_error", "union_tag_invalid"):
        return one_of(_literals(error)) or "a plug-in's"
    if kind == "string_pattern_mismatch":
        return f"text that matches {context['pattern']}"
    return error["msg"][0].lower() + error["msg"][1:]


def _literals(error: dict[str, Any]) -> list[str]:
    context = error.get("ctx", {})
    text = context.get("expected_tags") or context.get("expected") or ""
    if not text or not isinstance(text, str) or error["type"] not in ("literal_error", "union_tag_invalid"):
        return []
    return [w.strip(" '") for w in text.replace(" or ", ", ").split(",")]


def _path(model: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[str, type[BaseModel] | None]:
    """The dotted path of an error's location, without the union tags and type names that pydantic puts in, and the
    class that the last key was looked up in."""
    parts: list[str] = []
    # the annotation that the path has led to so far; None where it leads out of the model
    here: Any = model
    owner: type[BaseModel] | None = model
    for element in loc:
        models = models_of(here)
        tagged = _model_tagged(models, element)
        if tagged is not None:
            here = tagged
        elif isinstance(element, int) or named_annotation(here) is not None:
            parts.append(str(element))
            here = _entry_annotation(here)
            owner = None
        elif len(models) == 1:
            parts.append(str(element))
            owner = models[0]
            field = owner.model_fields.get(str(element))
            here = None if field is None else annotation_of(field)
    return ".".join(parts), owner


def _model_tagged(models: Sequence[type[BaseModel]], element: int | str) -> type[BaseModel] | None:
    """The alternative that an element of a location chooses by its tag; None: it is no tag."""
    if len(models) < 2:
        return None
    for model in models:
        if element in tags_of(model):
            return model
    return None


def _entry_annotation(annotation: Any) -> Any:
    """The annotation of the entries of a list or of a mapping of names; None for what is neither."""
    for option in options_of(annotation):
        if get_origin(option) in (tuple, list):
            return get_args(option)[0]
    return named_annotation(annotation)


def named_annotation(annotation: Any) -> Any:
    """The annotation of what a mapping of names holds; None for what is none."""
    for option in options_of(annotation):
        if get_origin(option) is dict:
            return get_args(option)[1]
    return None


def field_paths(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted paths of every field below a model, every alternative of a section included."""
    paths: list[str] = []
    for name, field in model.model_fields.items():
        paths.append(f"{prefix}{name}")
        for inner in models_of(annotation_of(field)):
            paths += field_paths(inner, f"{prefix}{name}.")
    return list(dict.fromkeys(paths))
