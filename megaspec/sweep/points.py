"""The points of a sweep: composed, resolved and checked, all of them before the first starts. Torch-free."""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path

from megaspec.checkable import PartlyError
from megaspec.compose.compose import Composed
from megaspec.compose.search_path import SearchPath
from megaspec.compose.words import compose_words
from megaspec.core.errors import DataError, Problem, RecipeError
from megaspec.estimate.target import Target
from megaspec.recipe import Recipe
from megaspec.resolve.beside import with_rules
from megaspec.resolve.gather import gather_facts
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.search.fits import start_problems
from megaspec.spec import Spec
from megaspec.sweep.state import Point
from megaspec.sweep.words import SweepWords

# Characters of a folder that tell the overrides.
_MOST_CHARACTERS = 80
_SHOWN = 20


@dataclass
class Checker:
    """Composes and resolves points for one target, and reads every file once."""

    target: Target
    config_dirs: Sequence[str] = ()
    memory: str = "check"
    _facts: dict[str, Facts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._search = SearchPath(self.config_dirs)

    def draft(self, plain: Sequence[str], overrides: tuple[str, ...]) -> "Draft":
        """A point, composed and checked; what is wrong is told in `problems`."""
        made = Draft(overrides)
        try:
            composed = self._composed([*plain, *overrides])
            made.recipe = composed.recipe
            made.ranks = self.spec(composed.recipe, Path("run"), composed.origins).world_size
        except RecipeError as error:
            made.problems = error.problems
        except DataError as error:
            made.problems, made.is_data = error.problems, True
        return made

    def _composed(self, words: Sequence[str]) -> Composed:
        try:
            return compose_words(words, self._search)
        except PartlyError as error:
            raise with_rules(error, lambda _: self.target, is_for_training=True) from None

    def spec(self, recipe: Recipe, run_dir: Path, origins: dict[str, str]) -> Spec:
        """The Spec of a point. RecipeError, DataError: it can't be run."""
        key = recipe.data.model_dump_json()
        if key not in self._facts:
            self._facts[key] = gather_facts(recipe)
        refused = partial(start_problems, target=self.target, origins=origins, memory=self.memory)
        facts = replace(self._facts[key], run_dir=str(run_dir))
        return resolve(recipe, self.target, facts, origins, refused=refused)


@dataclass
class Draft:
    """A point that was composed and checked."""

    overrides: tuple[str, ...]
    recipe: Recipe | None = None
    ranks: int = 0
    problems: list[Problem] = field(default_factory=list)
    is_data: bool = False
    """Nothing but the data is wrong."""

    @property
    def fingerprint(self) -> str:
        """Hash of the recipe without name and folder; of the overrides where there is none."""
        fields = self.recipe.model_dump(mode="json", exclude={"name", "run_dir"}) if self.recipe else self.overrides
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    def point(self, number: int, *, count: int, name: str, folder: Path) -> Point:
        """The point of a number from 1 to `count`, with a name and a folder of its own."""
        place = point_folder(number, count, self.overrides)
        recipe = None
        if self.recipe is not None:
            recipe = self.recipe.model_dump(mode="json")
            recipe |= {"name": f"{name}-{place.partition('-')[0]}", "run_dir": str(folder / place)}
        return Point(
            number=number,
            overrides=self.overrides,
            folder=place,
            fingerprint=self.fingerprint,
            recipe=recipe,
            ranks=self.ranks,
        )


def grid(words: SweepWords) -> list[tuple[str, ...]]:
    """The overrides of every point, the last word turning fastest."""
    return list(product(*(one.words for one in words.swept)))


def without_repeats(drafts: Iterable[Draft]) -> tuple[list[Draft], list[tuple[Draft, Draft]]]:
    """The drafts that differ, and pairs of a draft that repeats an earlier one and that one."""
    seen: dict[str, Draft] = {}
    repeats = []
    for one in drafts:
        earlier = seen.setdefault(one.fingerprint, one)
        if earlier is not one:
            repeats.append((one, earlier))
    return list(seen.values()), repeats


def refuse_invalid(drafts: Sequence[Draft]) -> None:
    """RecipeError or DataError that names every point that can't be run, with its number and all its problems."""
    bad = [(number, one) for number, one in enumerate(drafts, 1) if one.problems]
    if not bad:
        return
    kind = DataError if all(one.is_data for _, one in bad) else RecipeError
    everywhere = _shared([one for _, one in bad]) if len(bad) == len(drafts) else []
    lines = [f"{len(bad)} of {len(drafts)} points can't be run; nothing was started"]
    lines += [f"every point: {text}" for text in everywhere]
    own = [(number, one, [str(p) for p in one.problems if str(p) not in everywhere]) for number, one in bad]
    named = [(number, one, texts) for number, one, texts in own if texts]
    for number, one, texts in named[:_SHOWN]:
        lines += [f"point {number} ({' '.join(one.overrides)}): {text}" for text in texts]
    if len(named) > _SHOWN:
        lines.append(f"... and {len(named) - _SHOWN:,} points more")
    if kind is DataError:
        raise DataError(lines)
    raise RecipeError([Problem("", line, code="sweep.points") for line in lines])


def point_folder(number: int, count: int, overrides: Sequence[str]) -> str:
    """`03-lr-0.001-tp-2`: a name that is a folder and part of a name of a run."""
    texts = []
    for word in overrides:
        key, _, value = word.partition("=")
        texts.append(re.sub(r"[^A-Za-z0-9.]+", "-", f"{key.rpartition('.')[2]}-{value}").strip("-."))
    return f"{number:0{len(str(max(count, 10)))}d}-{'-'.join(texts)}"[:_MOST_CHARACTERS].rstrip("-.")


def _shared(drafts: Sequence[Draft]) -> list[str]:
    first = [str(p) for p in drafts[0].problems]
    return [text for text in first if all(text in [str(p) for p in one.problems] for one in drafts)]
