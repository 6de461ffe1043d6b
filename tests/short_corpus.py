"""A quarter of the corpus that ships with Python, for tests that need real text and not all of it."""

import pytest

from megaspec.data import python_corpus


def shorten(patch: pytest.MonkeyPatch) -> None:
    """`megaspec data prepare python`, run in this process, takes every fourth unit: some of each kind."""
    quarter = python_corpus.units()[::4]
    patch.setattr(python_corpus, "units", lambda: quarter)
