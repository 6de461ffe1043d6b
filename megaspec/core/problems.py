"""Typing errors in the words of a recipe: path=value, the rule, the nearest legal key or value, where it was set."""

import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from megaspec.core.errors import Problem
from megaspec.core.frozen import parse_count
from megaspec.core.marked_yaml import Quoted, plain_scalar

_PLANNING = {
    "hardware": "a run takes the machine that it is on",
    "gpus": "a run takes launcher.ranks=N",
    "ceilings": "a run does without",
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
    plain = {o.replace("_", "").lower(): o for o in options}
    near = get_close_matches(word, options, n=3, cutoff=0.6)
    near = near or [plain[p] for p in get_close_matches(word.replace("_", "").lower(), plain, n=3, cutoff=0.7)]
    return f"did you mean {one_of(near)}?" if near else ""


def one_of(options: Sequence[object]) -> str:
    """`a, b or c`."""
    words = [str(o) for o in options]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}" if words else ""


def show(value: object) -> str:
    """A value as a recipe writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = f"{value}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def as_word(value: object) -> str:
    """A plain value or a list of names, whole, as it stands behind `path=` on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    # a layout's letters mean something to the shell and to Hydra
    return f"'{value}'" if isinstance(value, str) and not re.fullmatch(r"\w+", value) else show(value)


def in_a_shell(override: str) -> str:
    """An override with the quotes that a shell takes away from it."""
    return f'"{override}"' if "'" in override else override


def value_at(content: Any, key: str) -> Any:
    """The value at a dotted path of plain data; None where nothing is."""
    for part in filter(None, key.split(".")):
        if isinstance(content, Mapping):
            content = content.get(part)
        elif isinstance(content, Sequence) and not isinstance(content, str) and part.isdigit():
            content = content[int(part)] if int(part) < len(content) else None
        else:
            return None
    return content


def typed_problems(
    error: ValidationError,
    *,
    model: type[BaseModel],
    content: Mapping[str, Any],
    origins: Mapping[str, str],
    choices: Mapping[str, Sequence[str]],
) -> list[Problem]:
    """Every typing error of a recipe, one Problem per key. `choices` lists the shipped options of each section."""
    grouped: dict[str, list[dict[str, Any]]] = {}
    owners: dict[str, type[BaseModel] | None] = {}
    for one in error.errors(include_url=False):
        key, owner = _path(model, one["loc"])
        if one["type"] == "too_short" and len(value_at(content, key)) >= one["ctx"]["min_length"]:
            continue  # long enough: its entries are wrong, and told themselves
        if one["type"].startswith("union_tag"):
            key = f"{key}.{one['ctx']['discriminator'].strip(chr(39))}"
        grouped.setdefault(key, []).append(one)
        owners[key] = owner
    told = [
        _problem(key, errors, owner=owners[key], model=model, content=content, origins=origins, choices=choices)
        for key, errors in list(grouped.items())[:MOST_PROBLEMS]
    ]
    rest = len(grouped) - len(told)
    more = f"{rest} more keys are wrong; mend these first"
    return [*told, Problem("", more, code="key.more")] if rest else told


def _problem(
    key: str,
    errors: list[dict[str, Any]],
    *,
    owner: type[BaseModel] | None,
    model: type[BaseModel],
    content: Mapping[str, Any],
    origins: Mapping[str, str],
    choices: Mapping[str, Sequence[str]],
) -> Problem:
    kind = errors[0]["type"]
    section, _, name = key.rpartition(".")
    value = value_at(content, key)
    if kind == "extra_forbidden":
        return Problem(key, _unknown_key(key, value, owner, model, content), origin_of(origins, key), "key.unknown")
    if kind in ("missing", "union_tag_not_found"):
        text = f"{key} is missing"
        chosen = section if name == "kind" else key
        if name.isdigit():
            text = f"{section}={show(value_at(content, section))} has too few entries: entry {name} is missing"
        elif chosen in choices:
            text += f"; choose one: {chosen}={f', {chosen}='.join(choices[chosen])}"
        else:
            text += f"; set it in the recipe, or on the command line: {key}=..."
        return Problem(key, text, origin_of(origins, section), "key.missing")
    rules = list(dict.fromkeys(_rule(e) for e in errors))
    options = [w for e in errors for w in _literals(e)]
    text = f"{key}={show(value)} must be {' or '.join(rules)}"
    if isinstance(value, str):
        hint = did_you_mean(value, options)
        wants_number = any("number" in r or r == "true or false" for r in rules)
        if hint:
            text += f"; {hint}"
        elif wants_number:
            text += f"; {_why_text(value)}"
    return Problem(key, text, origin_of(origins, key), "key.type")


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
    elif isinstance(content, Mapping | list):
        parts = content.items() if isinstance(content, Mapping) else enumerate(content)
        for name, inner in parts:
            yield from _quoted(inner, f"{prefix}.{name}" if prefix else str(name))


def _unknown_key(
    key: str, value: object, owner: type[BaseModel] | None, model: type[BaseModel], content: Mapping[str, Any]
) -> str:
    section, _, name = key.rpartition(".")
    kind_here = value_at(content, f"{section}.kind")
    where = f" when {section}.kind={kind_here}" if kind_here else f" of {section}" if section else " of a recipe"
    text = f"{key}{'' if isinstance(value, dict) else f'={show(value)}'}: {name} is no key{where}"
    if key in _PLANNING:
        return f"{text}, but a word for plan, tune and verify; {_PLANNING[key]}"
    own = [f for f in owner.model_fields if f != "kind"] if owner else []
    siblings = [tag for m in _section_models(model, section) if name in m.model_fields for tag in _tag(m)]
    if siblings:
        return f"{text} but of {one_of([f'{section}.kind={tag}' for tag in siblings])}; take it away with ~{key}"
    elsewhere = [path for path in field_paths(model) if path.rpartition(".")[2] == name]
    hint = did_you_mean(name, own) or (f"did you mean {one_of(elsewhere[:3])}?" if elsewhere else "")
    return f"{text}; {hint or 'its keys are ' + ', '.join(own)}"


def _section_models(model: type[BaseModel], section: str) -> list[type[BaseModel]]:
    """The alternatives of a section that has several."""
    here = [model]
    for part in filter(None, section.split(".")):
        here = [inner for m in here if part in m.model_fields for inner in models_of(m.model_fields[part].annotation)]
    return list(dict.fromkeys(here)) if len(here) > 1 else []


def _rule(error: dict[str, Any]) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind in _WORDS:
        return _WORDS[kind]
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"{words} {context[name]}"
    if kind in ("literal_error", "union_tag_invalid"):
        return one_of(_literals(error))
    if kind == "string_pattern_mismatch":
        return f"text that matches {context['pattern']}"
    return error["msg"][0].lower() + error["msg"][1:]


def _literals(error: dict[str, Any]) -> list[str]:
    context = error.get("ctx", {})
    text = context.get("expected_tags") or context.get("expected") or ""
    if not isinstance(text, str) or error["type"] not in ("literal_error", "union_tag_invalid"):
        return []
    return [w.strip(" '") for w in text.replace(" or ", ", ").split(",")]


def options_of(annotation: Any) -> list[Any]:
    """The alternatives of an annotation: unions flattened, Annotated taken off."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return options_of(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [o for a in get_args(annotation) for o in options_of(a)]
    return [annotation]


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """The sections among the alternatives of an annotation."""
    return [o for o in options_of(annotation) if isinstance(o, type) and issubclass(o, BaseModel)]


def _tag(model: type[BaseModel]) -> tuple[str, ...]:
    annotation = model.model_fields["kind"].annotation if "kind" in model.model_fields else None
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _path(model: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[str, type[BaseModel] | None]:
    """The dotted path of an error's location, without the union tags and type names that pydantic puts in, and the
    class that the last key was looked up in."""
    parts: list[str] = []
    here: Any = model
    owner: type[BaseModel] | None = model
    for element in loc:
        models = models_of(here)
        tagged = next((m for m in models if element in _tag(m)), None) if len(models) > 1 else None
        if tagged is not None:
            here = tagged
        elif isinstance(element, int):
            parts.append(str(element))
            inner = next((o for o in options_of(here) if get_origin(o) in (tuple, list)), None)
            here, owner = (get_args(inner)[0] if inner else None), None
        elif len(models) == 1:
            parts.append(str(element))
            owner = models[0]
            field = owner.model_fields.get(str(element))
            here = field.annotation if field else None
    return ".".join(parts), owner


def field_paths(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted paths of every field below a model, every alternative of a section included."""
    paths: list[str] = []
    for name, field in model.model_fields.items():
        paths.append(f"{prefix}{name}")
        for inner in models_of(field.annotation):
            paths += field_paths(inner, f"{prefix}{name}.")
    return list(dict.fromkeys(paths))
