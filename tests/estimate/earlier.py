"""The plan as it was for earlier code, for what was measured of that."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from megaspec.estimate import memory, work
from megaspec.estimate.tables import TablesInPlace
from megaspec.recipe import Recipe


def _none_in_place(recipe: Recipe) -> TablesInPlace:
    return TablesInPlace(embedding=False, head=False)


@contextmanager
def tables_made_whole() -> Iterator[None]:
    """For what was measured before 2026-11-25: gradients of the vocabulary's tables were made whole then, in the
    model's format, as they still are with zero2, fsdp and hsdp. The same formulas, told so."""
    with patch.object(memory, "tables_in_place", _none_in_place), patch.object(work, "tables_in_place", _none_in_place):
        yield
