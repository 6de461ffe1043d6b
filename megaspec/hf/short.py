"""The section `model` of a recipe, as short as it says the same. Torch-free."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from megaspec.model.decoder.spec import DecoderSpec


def short_section(spec: DecoderSpec) -> dict[str, Any]:
    """What differs from the defaults, and every `kind`."""
    return _short(spec)


def _short(spec: BaseModel) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, field in type(spec).model_fields.items():
        value = getattr(spec, name)
        default = field.default
        if field.default_factory is not None:
            default = field.get_default(call_default_factory=True)
        if name != "kind" and default is not PydanticUndefined and value == default:
            continue
        found[name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return _short(value)
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value
