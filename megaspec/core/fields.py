"""The fields of a recipe's classes, by dotted path, in words: for `explain`, completion and the editor's schema."""

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megaspec.core.problems import models_of, one_of, options_of

# Stands for the number of an entry in the path of a list's entries.
ENTRY = "*"

_PLAIN = {int: "whole number", float: "number", bool: "true or false", str: "text"}
# A bound from here on only keeps arithmetic exact.
_NO_LIMIT = 10**12
_BOUNDS = (("gt", "above"), ("ge", "at least"), ("lt", "below"), ("le", "at most"))


@dataclass(frozen=True)
class FieldAt:
    """A field of one class, and where that class stands."""

    path: str
    """Dotted, entries of lists as `*`."""
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
        return tuple(models_of(self.info.annotation))

    @property
    def literals(self) -> tuple[str, ...]:
        """The words that it may be, where they are fixed."""
        return tuple(dict.fromkeys(_literals(self.info.annotation)))

    @property
    def type_in_words(self) -> str:
        """`whole number above 0 or auto`."""
        return _words(self.info.annotation, self.info.metadata)


def fields_of(model: type[BaseModel], prefix: str = "", when: str = "") -> Iterator[FieldAt]:
    """Every field below a class, each alternative of a section and the entries of lists included; sections first."""
    for name, info in model.model_fields.items():
        path = f"{prefix}{name}"
        yield FieldAt(path, info, when)
        yield from _below(info.annotation, path, when)


def _below(annotation: Any, path: str, when: str) -> Iterator[FieldAt]:
    models = models_of(annotation)
    for one in models:
        tags = tags_of(one)
        here = f"{path}.kind={one_of(tags)}" if len(models) > 1 and tags else when
        yield from fields_of(one, f"{path}.", here)
    for option in options_of(annotation):
        if get_origin(option) is tuple:
            yield from _below(get_args(option)[0], f"{path}.{ENTRY}", when)


def tags_of(model: type[BaseModel]) -> tuple[str, ...]:
    """The values of `kind` that choose a class."""
    info = model.model_fields.get("kind")
    return get_args(info.annotation) if info is not None and get_origin(info.annotation) is Literal else ()


def same_path(pattern: str, path: str) -> bool:
    """True where a path names the field at `pattern`; any number stands for an entry."""
    ours, theirs = pattern.split("."), path.split(".")
    return len(ours) == len(theirs) and all(
        a == b or (a == ENTRY and b.isdigit()) for a, b in zip(ours, theirs, strict=True)
    )


def _literals(annotation: Any) -> Iterator[str]:
    for option in options_of(annotation):
        if get_origin(option) is Literal:
            yield from (str(word) for word in get_args(option))
        elif option is bool:
            yield from ("true", "false")
        elif option is type(None):
            yield "null"


def _words(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return _words(inner, [*more, *metadata])
    if origin in (Union, types.UnionType):
        parts = list(dict.fromkeys(_words(a) for a in get_args(annotation)))
        return one_of([part.replace(" or ", ", ") if part != "true or false" else part for part in parts])
    if origin is Literal:
        return one_of(get_args(annotation))
    if origin is tuple:
        inner = get_args(annotation)
        of = _words(inner[0])
        size = f" of {len(inner)}" if inner[-1] is not Ellipsis else ""
        return f"list{size}, each {of}{_bounds(metadata)}"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        tags = tags_of(annotation)
        return f"section with kind {one_of(tags)}" if tags else "section"
    return f"{_PLAIN.get(annotation, str(annotation))}{_bounds(metadata)}"


def _bounds(metadata: Sequence[Any]) -> str:
    """` above 0 and below 1`, from pydantic's and annotated-types' marks."""
    marks = [m for one in metadata for m in (one.metadata if isinstance(one, FieldInfo) else [one])]
    limits = [(word, getattr(m, name)) for m in marks for name, word in _BOUNDS if hasattr(m, name)]
    words = [f"{word} {limit:,}" for word, limit in limits if limit < _NO_LIMIT]
    words += [f"with at least {m.min_length}" for m in marks if getattr(m, "min_length", None)]
    return f" {' and '.join(words)}" if words else ""
