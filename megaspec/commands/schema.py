"""`megaspec schema`: the language as a JSON schema, with which a YAML editor completes, explains and flags.

A recipe and a choice of a group are fragments: they may leave out what another file sets. So nothing is required but in
the entries of lists, and a section of several kinds may be any of them.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaspec.compose.search_path import SearchPath
from megaspec.core.errors import COMMAND_LINE, Problem, RecipeError, printable
from megaspec.core.problems import did_you_mean, one_of
from megaspec.data.files import write_text
from megaspec.recipe import SECTIONS, Recipe

DIALECT = "https://json-schema.org/draft/2020-12/schema"
RECIPE = "recipe"
# `${path.to.key}` stands for a value, `???` for one that has to be set.
_REFERENCE = {"type": "string", "pattern": r"^\?\?\?$|\$\{\.*[A-Za-z0-9_.]+\}"}
# Editors read `1_000` and, some of them, `1e6` as text; recipes read both as numbers, and 15T as well.
_COUNT = {"type": "string", "pattern": r"^[0-9][0-9_]*(\.[0-9]+)?([kKMBT]|[eE]\+?[0-9]+)?$"}
_NUMBER = {"type": "string", "pattern": r"^[-+]?([0-9][0-9_]*)?\.?[0-9]*([eE][-+]?[0-9]+)?$"}
_NAME = {"type": "string", "pattern": r"^/?[A-Za-z0-9_][A-Za-z0-9_./-]*$"}
# pydantic writes bounds in its own words where a field has a validator.
_BOUNDS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}


def add_parser(commands: Any) -> None:
    """The parser of `schema`."""
    text = "print the JSON schema of recipes, or of the choices of a group, for YAML editors"
    more = (
        "Name it in a file with a line `# yaml-language-server: $schema=FILE`, below `# @package` where there is one."
    )
    command = commands.add_parser("schema", help=text, description=f"{text}. {more}", allow_abbrev=False)
    command.add_argument(
        "group", nargs="?", default=RECIPE, metavar="GROUP", help="recipe (default), model, optim, ..."
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="write it there")
    command.add_argument("--config-dir", action="append", default=[], metavar="DIR", help="more groups and recipes")


def run(args: argparse.Namespace) -> int:
    """Print or write it."""
    known = (RECIPE, *SECTIONS)
    if args.group not in known:
        hint = did_you_mean(args.group, known) or f"choose {one_of(known)}"
        raise RecipeError([Problem("", f"{args.group} is no group; {hint}", COMMAND_LINE, "choice.unknown")])
    text = json.dumps(schema(args.group, SearchPath(args.config_dir)), indent=1, ensure_ascii=False) + "\n"
    if args.out is None:
        print(text, end="")
        return 0
    write_text(args.out, text)
    print(printable(f"{args.out}: written; name it in a file: # yaml-language-server: $schema={args.out}"))
    return 0


def schema(group: str, search: SearchPath) -> dict[str, Any]:
    """The schema of recipes, or of the files of one group."""
    whole = Recipe.model_json_schema()
    definitions = whole["$defs"]
    entries = _entries(whole)
    classes = {name: _class(body, is_entry=name in entries) for name, body in definitions.items()}
    head = {"$schema": DIALECT, "title": f"megaspec {group}", "type": "object"}
    if group == RECIPE:
        fields = {"defaults": _defaults(RECIPE, search, SECTIONS)}
        for name, field in whole["properties"].items():
            fields[name] = _property(field)
        return {**head, "properties": fields, "additionalProperties": False, "$defs": classes}
    # a file of a group is one of the section's kinds, and may inherit from another file of it
    inherited = {"defaults": _defaults(group, search, ())}
    allowed = _classes_of(whole["properties"][group])
    options = []
    for name in definitions:
        if name in allowed:
            options.append({**classes[name], "properties": {**inherited, **classes[name]["properties"]}})
    return {**head, "anyOf": options, "$defs": classes}


def _class_name(reference: dict[str, Any]) -> str:
    """`{"$ref": "#/$defs/AdamW"}` -> `AdamW`."""
    return reference["$ref"].rpartition("/")[2]


def _classes_of(section: dict[str, Any]) -> set[str]:
    """Names of the classes that may stand in a section of the top."""
    if "$ref" in section:
        return {_class_name(section)}
    return {_class_name(option) for option in section.get("oneOf", ())}


def _entries(node: Any) -> set[str]:
    """Names of the classes that stand in lists: those are written out whole."""
    names: set[str] = set()
    if isinstance(node, list):
        for inner in node:
            names |= _entries(inner)
    elif isinstance(node, dict):
        items = node.get("items") or {}
        if "$ref" in items:
            names.add(_class_name(items))
        for inner in node.values():
            names |= _entries(inner)
    return names


def _class(body: dict[str, Any], *, is_entry: bool) -> dict[str, Any]:
    """A section: closed, and a fragment unless it is an entry of a list."""
    fields = {name: _property(field) for name, field in body["properties"].items()}
    section = {"type": "object", "properties": fields, "additionalProperties": False}
    if "description" in body:
        section["description"] = " ".join(body["description"].split())
    if is_entry and body.get("required"):
        section["required"] = body["required"]
    return section


def _property(field: dict[str, Any]) -> dict[str, Any]:
    """A field: its values, or a reference to another."""
    values = dict(field)
    values.pop("title", None)
    about = {}
    description = values.pop("description", None)
    if description is not None:
        about["description"] = " ".join(description.split())
    # a section's default says nothing that its keys do not say
    default = values.pop("default", {})
    if not isinstance(default, dict):
        about["default"] = default
    options = _values(values)
    takes_any_text = any(option == {"type": "string"} for option in options)
    if not takes_any_text:
        options.append(_REFERENCE)
    if len(options) == 1:
        return {**about, **options[0]}
    return {**about, "anyOf": options}


def _values(node: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives of a value, flat."""
    for union in ("anyOf", "oneOf"):
        if union in node:
            alternatives: list[dict[str, Any]] = []
            for option in node[union]:
                alternatives += _values(option)
            return alternatives
    plain = {_BOUNDS.get(key, key): value for key, value in node.items() if key not in ("title", "discriminator")}
    if isinstance(plain.get("items"), dict):
        plain["items"] = _property(plain["items"])
    if "prefixItems" in plain:
        plain["prefixItems"] = [_property(entry) for entry in plain["prefixItems"]]
    # numbers may also be written in ways that an editor takes for text
    as_text = {"integer": [_COUNT], "number": [_NUMBER]}.get(plain.get("type", ""), [])
    return [plain, *as_text]


def _defaults(group: str, search: SearchPath, groups: Sequence[str] | dict[str, Any]) -> dict[str, Any]:
    """The list of what a file inherits and, in a recipe, chooses. Names that are known are offered, others allowed."""
    entries: list[dict[str, Any]] = [_name(group, search)]
    if groups:
        chosen = {f"override /{one}": _name(one, search) for one in groups}
        entries.append({"type": "object", "properties": chosen, "additionalProperties": False, "minProperties": 1})
    about = "What this file builds on, in order; `_self_` stands for the file itself."
    return {"description": about, "type": "array", "items": {"anyOf": entries}}


def _name(group: str, search: SearchPath) -> dict[str, Any]:
    return {"anyOf": [{"enum": search.choices(group)}, _NAME]}
