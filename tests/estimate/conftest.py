"""What measurements of earlier code are held to."""

import pytest

from megaspec.estimate import memory, work
from megaspec.estimate.tables import TablesInPlace


@pytest.fixture
def tables_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what was measured before 2026-11-25: gradients of the vocabulary's tables were made whole then, in the
    model's format, as they still are with zero2, fsdp and hsdp. The same formulas, told so."""

    def none_in_place(recipe: object) -> TablesInPlace:
        return TablesInPlace(embedding=False, head=False)

    for module in (memory, work):
        monkeypatch.setattr(module, "tables_in_place", none_in_place)
