"""The builders of plugins, in the same dicts as those of megaspec. Only what builds a model comes here."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from megaspec.core.errors import RecipeError
from megaspec.data.loader import SOURCES
from megaspec.log.sinks import OPENERS
from megaspec.optim.optimizer import OPTIMIZERS
from megaspec.plugins import Part, parts
from megaspec.runtime.build import LOSSES, MODELS

_TABLES: dict[str, dict[Any, Any]] = {
    "models": MODELS,
    "sources": SOURCES,
    "optimizers": OPTIMIZERS,
    "losses": LOSSES,
    "sinks": OPENERS,
}


def connect() -> None:
    """Imports the builder of every part that a command line's plugins have added. RecipeError: one is not there."""
    for kind, table in _TABLES.items():
        for part in parts(kind):
            if part.spec not in table:
                table[part.spec] = _builder(part)


def _builder(part: Part) -> Callable[..., Any]:
    module, _, name = part.build.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RecipeError(f"--plugin: {part.build} of {part.spec.__name__} can't be imported: {error}") from None
