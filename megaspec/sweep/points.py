"""The points of a sweep: composed, resolved and checked, all of them before the first starts. Torch-free."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

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
_LEFT_OUT_SHOWN = 3


@dataclass
class Checker:
    """Composes and resolves points for one target, and reads every file once."""

    target: Target
    config_dirs: Sequence[str] = ()
    memory: str = "check"
    facts_of: Callable[[Recipe], Facts] = gather_facts
    """What is known of a point's files."""
    _facts: dict[str, Facts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._search = SearchPath(self.config_dirs)

    def check(self, plain: Sequence[str], overrides: tuple[str, ...]) -> "CheckedPoint":
        """A point, composed and checked; what is wrong is told in `problems`."""
        checked = CheckedPoint(overrides)
        try:
            composed = self._composed([*plain, *overrides])
            checked.recipe = composed.recipe
            checked.left_out = composed.left_out
            checked.ranks = self.spec(composed.recipe, Path("run"), composed.origins).world_size
        except RecipeError as error:
            checked.problems = error.problems
        except DataError as error:
            checked.problems = error.problems
            checked.only_data_is_wrong = True
        return checked

    def _composed(self, words: Sequence[str]) -> Composed:
        try:
            return compose_words(words, self._search)
        except PartlyError as error:
            raise with_rules(error, lambda _: self.target, is_for_training=True) from None

    def spec(self, recipe: Recipe, run_dir: Path, origins: dict[str, str]) -> Spec:
        """The Spec of a point. RecipeError, DataError: it can't be run."""
        # points differ in what they do with the data far more often than in the data: manifests are read once for all
        key = recipe.data.model_dump_json()
        if key not in self._facts:
            self._facts[key] = self.facts_of(recipe)
        refused = partial(start_problems, target=self.target, origins=origins, memory=self.memory)
        facts = replace(self._facts[key], run_dir=str(run_dir))
        return resolve(recipe, self.target, facts, origins, refused=refused)


@dataclass
class CheckedPoint:
    """A point that was composed and checked, before it has a number."""

    overrides: tuple[str, ...]
    recipe: Recipe | None = None
    """None: its words make no recipe."""
    ranks: int = 0
    """World size; 0 where the point can't be run."""
    problems: list[Problem] = field(default_factory=list)
    only_data_is_wrong: bool = False
    left_out: tuple[str, ...] = ()
    """See compose/compose.py."""

    @property
    def fingerprint(self) -> str:
        """Hash of the recipe without name and folder; of the overrides where there is none."""
        fields: Any = self.overrides
        if self.recipe is not None:
            fields = self.recipe.model_dump(mode="json", exclude={"name", "run_dir"})
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def problem_texts(self) -> list[str]:
        """A line for each problem."""
        return [str(problem) for problem in self.problems]

    def point(self, number: int, *, count: int, name: str, folder: Path) -> Point:
        """The point of a number from 1 to `count`, with a name, a folder and a place for copies of its own."""
        run_name = point_folder(number, count, self.overrides)
        recipe = None
        if self.recipe is not None:
            recipe = self.recipe.model_dump(mode="json")
            recipe |= {"name": f"{name}-{run_name.partition('-')[0]}", "run_dir": str(folder / run_name)}
            copies = recipe["checkpoint"]
            if copies["copy_to"] is not None:
                # below what the words say, also where that is swept: another word may turn beside it
                copies["copy_to"] = f"{copies['copy_to'].rstrip('/')}/{recipe['name']}"
        return Point(
            number=number,
            overrides=self.overrides,
            folder=run_name,
            fingerprint=self.fingerprint,
            recipe=recipe,
            ranks=self.ranks,
        )


def grid(words: SweepWords) -> list[tuple[str, ...]]:
    """The overrides of every point, the last word turning fastest."""
    return list(product(*(one.words for one in words.swept)))


def without_repeats(
    checked: Iterable[CheckedPoint],
) -> tuple[list[CheckedPoint], list[tuple[CheckedPoint, CheckedPoint]]]:
    """The points that differ, and pairs of a point that repeats an earlier one and that one."""
    seen: dict[str, CheckedPoint] = {}
    repeats = []
    for point in checked:
        earlier = seen.setdefault(point.fingerprint, point)
        if earlier is not point:
            repeats.append((point, earlier))
    return list(seen.values()), repeats


def refuse_invalid(checked: Sequence[CheckedPoint]) -> None:
    """RecipeError or DataError that names every point that can't be run, with its number and all its problems."""
    invalid = [point for point in checked if point.problems]
    if not invalid:
        return
    # what is wrong with all of them is told once
    everywhere: list[str] = []
    if len(invalid) == len(checked):
        everywhere = _shared_problems(invalid)
    lines = [f"{len(invalid)} of {len(checked)} points can't be run; nothing was started"]
    lines += [f"every point: {text}" for text in everywhere]
    n_named = 0
    for number, point in enumerate(checked, 1):
        texts = [text for text in point.problem_texts if text not in everywhere]
        if not texts:
            continue
        n_named += 1
        if n_named <= _SHOWN:
            lines += [f"point {number} ({' '.join(point.overrides)}): {text}" for text in texts]
    if n_named > _SHOWN:
        lines.append(f"... and {n_named - _SHOWN:,} points more")
    if all(point.only_data_is_wrong for point in invalid):
        raise DataError(lines)
    raise RecipeError([Problem("", line, code="sweep.points") for line in lines])


def point_folder(number: int, count: int, overrides: Sequence[str]) -> str:
    """`03-lr-0.001-tp-2`: a name that is a folder and part of a name of a run."""
    texts = []
    for word in overrides:
        key, _, value = word.partition("=")
        short_key = key.rpartition(".")[2]
        texts.append(re.sub(r"[^A-Za-z0-9.]+", "-", f"{short_key}-{value}").strip("-."))
    # padded with zeros, so that folders are listed in the order of the points
    n_digits = len(str(max(count, 10)))
    return f"{number:0{n_digits}d}-{'-'.join(texts)}"[:_MOST_CHARACTERS].rstrip("-.")


def _shared_problems(checked: Sequence[CheckedPoint]) -> list[str]:
    """What is wrong with every one of the points, in the order in which the first tells it."""
    shared = checked[0].problem_texts
    for point in checked[1:]:
        texts = point.problem_texts
        shared = [text for text in shared if text in texts]
    return shared


def left_out_in_words(points: Sequence[CheckedPoint]) -> list[str]:
    """`left out: ...` for each key that points leave out, with those points where others keep it."""
    points_of: dict[str, list[CheckedPoint]] = {}
    for point in points:
        for text in point.left_out:
            points_of.setdefault(text, []).append(point)
    lines = []
    for text, leaving in points_of.items():
        where = ""
        if len(leaving) < len(points):
            words = [" ".join(point.overrides) for point in leaving[:_LEFT_OUT_SHOWN]]
            where = f" at {', '.join(words)}"
            if len(leaving) > len(words):
                where += f" and {len(leaving) - len(words)} more"
        lines.append(f"left out{where}: {text}")
    return lines
