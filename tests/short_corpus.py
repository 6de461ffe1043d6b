"""A third of the corpus that ships with Python, for tests that need real text and not all of it."""

import pytest

from megaspec.data import python_corpus


def shorten(patch: pytest.MonkeyPatch) -> None:
    """`megaspec data prepare python`, run in this process, takes every third unit: some of each kind."""
    third = python_corpus.units()[::3]
    patch.setattr(python_corpus, "units", lambda: third)
