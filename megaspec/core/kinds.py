"""Sections of several kinds that plug-ins may add to: `Annotated[OneSpec | OtherSpec, Kinds()]`."""

import types
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter, ValidationInfo
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticKnownError, core_schema, to_json

_BY_KIND = {"discriminator": "'kind'"}


class Kinds:
    """Marks a union of classes that `kind` tells apart, and holds the classes that plug-ins have added to it.

    Which classes there are is looked up whenever a value is read: a class with such a field is made before a plug-in is
    loaded, and stays as it is.
    """

    def __init__(self) -> None:
        self._union: Any = None
        """What it marks: our own classes. None: no class with such a field was made yet."""
        self._added: tuple[type[BaseModel], ...] = ()
        self._adapter: TypeAdapter[Any] | None = None
        """Reads all classes; None: not made since one was added."""
        _EVERY.append(self)

    @property
    def ours(self) -> tuple[type[BaseModel], ...]:
        """What it marks."""
        return tuple(models_of(self._union))

    @property
    def added(self) -> tuple[type[BaseModel], ...]:
        """In the order in which they came."""
        return self._added

    def add(self, one: type[BaseModel]) -> None:
        """Another class, for the rest of the process. Whether its name is free is for the caller to see."""
        self._added = (*self._added, one)
        self._adapter = None

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # a function, since pydantic writes down here for good what a field takes
        self._union = union
        return core_schema.with_info_plain_validator_function(self._read)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        classes = (*self.ours, *self._added)
        if not classes:
            return {"type": "object"}
        made = handler(core_schema.union_schema([self._reader(classes).core_schema]))
        # pydantic would write out in place what a bare reference names
        return {"oneOf": [made]} if "$ref" in made else made

    def _read(self, value: Any, info: ValidationInfo) -> Any:
        classes = (*self.ours, *self._added)
        if not classes:
            raise _no_kind(value)
        reader = self._reader(classes)
        if info.mode == "json" and not isinstance(value, BaseModel):
            # as JSON again, where a list may stand for a tuple
            return reader.validate_json(to_json(value))
        return reader.validate_python(value)

    def _reader(self, classes: Sequence[type[BaseModel]]) -> TypeAdapter[Any]:
        if self._adapter is None:
            union = reduce(or_, classes)
            if len(classes) > 1:
                union = Annotated[union, Field(discriminator="kind")]
            self._adapter = TypeAdapter(union)
        return self._adapter


# all marks of this process: fields of classes have them
_EVERY: list[Kinds] = []


def all_added() -> tuple[tuple[type[BaseModel], ...], ...]:
    """What plug-ins have added so far, by mark: what is known of the fields of a class changes with it."""
    return tuple(kinds.added for kinds in _EVERY)


def _no_kind(value: Any) -> PydanticKnownError:
    """What is wrong with a value where there is no kind to choose."""
    if not isinstance(value, dict):
        return PydanticKnownError("dict_type")
    if "kind" not in value:
        return PydanticKnownError("union_tag_not_found", _BY_KIND)
    return PydanticKnownError("union_tag_invalid", {**_BY_KIND, "tag": str(value["kind"]), "expected_tags": ""})


def kinds_among(marks: Sequence[Any]) -> Kinds | None:
    """The Kinds among the marks of an Annotated or a field, if there is one."""
    return next((one for one in marks if isinstance(one, Kinds)), None)


def annotation_of(field: FieldInfo) -> Any:
    """A field's annotation with its Kinds, which pydantic keeps apart from it."""
    kinds = kinds_among(field.metadata)
    return field.annotation if kinds is None else Annotated[field.annotation, kinds]


def options_of(annotation: Any) -> list[Any]:
    """The alternatives of an annotation, those of plug-ins included: unions flattened, Annotated taken off."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *marks = get_args(annotation)
        kinds = kinds_among(marks)
        return [*options_of(inner), *(() if kinds is None else kinds.added)]
    if origin in (Union, types.UnionType):
        return [option for one in get_args(annotation) for option in options_of(one)]
    return [annotation]


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """The sections among the alternatives of an annotation."""
    return [one for one in options_of(annotation) if isinstance(one, type) and issubclass(one, BaseModel)]


def is_open(annotation: Any) -> bool:
    """Whether plug-ins may add kinds to a section."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *marks = get_args(annotation)
        return kinds_among(marks) is not None or is_open(inner)
    return origin in (Union, types.UnionType) and any(is_open(one) for one in get_args(annotation))


def tags_of(model: type[BaseModel]) -> tuple[str, ...]:
    """The values of `kind` that choose a class."""
    field = model.model_fields.get("kind")
    if field is None or get_origin(field.annotation) is not Literal:
        return ()
    return get_args(field.annotation)
