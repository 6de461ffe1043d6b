"""The fields of a recipe's classes, by dotted path, in words: for `explain`, completion and the editor's schema."""

import types
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megaspec.core.kinds import all_added, annotation_of, kinds_among, models_of, options_of, tags_of
from megaspec.core.problems import one_of

# Stands for the number of an entry in the path of a list's entries.
ENTRY = "*"
# Stands for a name of the user's own in the path of a section that has one.
NAME = "NAME"

_PLAIN = {int: "whole number", float: "number", bool: "true or false", str: "text"}
# A bound from here on only keeps arithmetic exact.
_NO_LIMIT = 10**12
_BOUNDS = (("gt", "above"), ("ge", "at least"), ("lt", "below"), ("le", "at most"))


@dataclass(frozen=True)
class FieldAt:
    """A field of one class, and where that class stands."""

    path: str
    """Dotted, entries of lists as `*`, sections with names of the user's own as `NAME`."""
    info: FieldInfo
    when: str = ""
    """`optim.kind=adamw`: what chooses the class, where several may stand in its place."""

    @property
    def description(self) -> str:
        """The docstring under the field, in one line."""
        return " ".join((self.info.description or "").split())

    @property
    def is_required(self) -> bool:
        return self.info.is_required()

    @property
    def models(self) -> tuple[type[BaseModel], ...]:
        """The classes of a section; none for a plain value."""
        return tuple(models_of(annotation_of(self.info)))

    @property
    def literals(self) -> tuple[str, ...]:
        """The words that it may be, where they are fixed."""
        return tuple(dict.fromkeys(_literals(self.info.annotation)))

    @property
    def type_in_words(self) -> str:
        """`whole number above 0 or auto`."""
        return _words(self.info.annotation, self.info.metadata)


def fields_of(model: type[BaseModel]) -> tuple[FieldAt, ...]:
    """Every field below a class, each alternative of a section, the entries of lists and named sections included;
    sections first."""
    return _fields_of(model, all_added())


# 860 fields of a recipe, for which `explain` asks once a rule and a composition once a choice
@lru_cache(maxsize=16)
def _fields_of(model: type[BaseModel], _: Hashable) -> tuple[FieldAt, ...]:
    """Anew when a plug-in has added a kind."""
    return tuple(_fields_in(model))


def _fields_in(model: type[BaseModel], prefix: str = "", when: str = "") -> Iterator[FieldAt]:
    for name, info in model.model_fields.items():
        path = f"{prefix}{name}"
        yield FieldAt(path, info, when)
        yield from _below(annotation_of(info), path, when)


def kinds_below(model: type[BaseModel], section: str) -> dict[str, dict[str, type[BaseModel]]]:
    """Dotted path -> the classes that `kind` chooses, of a section of `model` and of every section inside of it, outer
    ones first; entries of lists and sections with names of the user's own are left out."""
    found: dict[str, dict[str, type[BaseModel]]] = {}
    for field in fields_of(model):
        if field.path == section or field.path.startswith(f"{section}."):
            classes = {tag: one for one in field.models for tag in tags_of(one)}
            if classes and ENTRY not in field.path and NAME not in field.path.split("."):
                found.setdefault(field.path, {}).update(classes)
    return found


def _below(annotation: Any, path: str, when: str) -> Iterator[FieldAt]:
    """The fields of the sections that may stand at a path, and of the entries of a list there."""
    models = models_of(annotation)
    for model in models:
        tags = tags_of(model)
        # only where several classes may stand here does `kind` choose one
        chosen_by = when
        if len(models) > 1 and tags:
            chosen_by = f"{path}.kind={one_of(tags)}"
        yield from _fields_in(model, f"{path}.", chosen_by)
    for option in options_of(annotation):
        if get_origin(option) is tuple:
            yield from _below(get_args(option)[0], f"{path}.{ENTRY}", when)
        # named sections may be of classes that have named sections themselves, and so without an end
        elif get_origin(option) is dict and NAME not in path.split("."):
            named = FieldInfo.from_annotation(get_args(option)[1])
            yield FieldAt(f"{path}.{NAME}", named, when)
            yield from _below(annotation_of(named), f"{path}.{NAME}", when)


def same_path(pattern: str, path: str) -> bool:
    """True where a path names the field at `pattern`; any number stands for an entry, any word for a name."""
    expected = pattern.split(".")
    names = path.split(".")
    if len(expected) != len(names):
        return False
    for one, name in zip(expected, names, strict=True):
        is_entry = one == ENTRY and name.isdigit()
        if one not in (name, NAME) and not is_entry:
            return False
    return True


def _literals(annotation: Any) -> Iterator[str]:
    for option in options_of(annotation):
        if get_origin(option) is Literal:
            yield from (str(word) for word in get_args(option))
        elif option is bool:
            yield from ("true", "false")
        elif option is type(None):
            yield "null"


def _words(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type in words. `metadata`: pydantic's and annotated-types' marks on it, which hold the bounds."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return _words(inner, [*more, *metadata])
    kinds = kinds_among(metadata)
    if kinds is not None:
        sections = [_words(model) for model in models_of(Annotated[annotation, kinds])]
        return one_of(sections) or "section of a plug-in"
    if origin in (Union, types.UnionType):
        return _union_in_words(get_args(annotation))
    if origin is Literal:
        return one_of(get_args(annotation))
    if origin is tuple:
        inner = get_args(annotation)
        size = ""
        if inner[-1] is not Ellipsis:
            size = f" of {len(inner)}"
        return f"list{size}, each {_words(inner[0])}{_bounds(metadata)}"
    if origin is dict:
        return f"mapping of names, each a {_words(get_args(annotation)[1])}"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        tags = tags_of(annotation)
        if not tags:
            return "section"
        return f"section with kind {one_of(tags)}"
    return f"{_PLAIN.get(annotation, str(annotation))}{_bounds(metadata)}"


def _union_in_words(alternatives: Sequence[Any]) -> str:
    """`a, b, c or d`, also where alternatives are unions of words themselves; `true or false` stays whole."""
    parts = []
    for alternative in alternatives:
        words = _words(alternative)
        if words != "true or false":
            words = words.replace(" or ", ", ")
        parts.append(words)
    return one_of(list(dict.fromkeys(parts)))


def _bounds(metadata: Sequence[Any]) -> str:
    """` above 0 and below 1`, from pydantic's and annotated-types' marks."""
    marks: list[Any] = []
    for one in metadata:
        if isinstance(one, FieldInfo):
            marks += one.metadata
        else:
            marks.append(one)
    words = []
    for mark in marks:
        for name, word in _BOUNDS:
            limit = getattr(mark, name, None)
            if limit is not None and limit < _NO_LIMIT:
                words.append(f"{word} {limit:,}")
    words += [f"with at least {mark.min_length}" for mark in marks if getattr(mark, "min_length", None)]
    if not words:
        return ""
    return f" {' and '.join(words)}"
