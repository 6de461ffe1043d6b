"""The plan as it was for earlier code, for what was measured of that."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from megaspec.estimate import memory, work
from megaspec.estimate.tables import TablesInPlace
from megaspec.recipe import Recipe
from megaspec_kernels.catalog import CATALOG, Operation

# What `auto` took first.
_FIRST = {"norm": "reference", "gated": "reference", "adamw": "torch"}


def _none_in_place(recipe: Recipe) -> TablesInPlace:
    return TablesInPlace(embedding=False, head=False)


@contextmanager
def earlier_code() -> Iterator[None]:
    """For what was measured before 2026-11-25: gradients of the vocabulary's tables were made whole then, in the
    model's format, as they still are with zero2, fsdp and hsdp, and `auto` took plain norms and gates and torch's
    AdamW. The same formulas, told so."""
    first = {}
    for operation, name in _FIRST.items():
        implementations = CATALOG[operation].implementations
        first[operation] = Operation({name: implementations[name]} | implementations)
    with ExitStack() as stack:
        stack.enter_context(patch.dict(CATALOG, first))
        for module in (memory, work):
            stack.enter_context(patch.object(module, "tables_in_place", _none_in_place))
        yield
