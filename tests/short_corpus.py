"""Half of the corpus that ships with Python, for tests that need real text and not all of it."""

import pytest

from megaspec.data import python_corpus


def shorten(patch: pytest.MonkeyPatch) -> None:
    """`megaspec data prepare python`, run in this process, takes every second unit: some of each kind."""
    half = python_corpus.units()[::2]
    patch.setattr(python_corpus, "units", lambda: half)
