"""resolve: a recipe, a target and facts in, the Spec of the run out. Pure: reads no file, no clock, no environment."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from megaspec import plugins
from megaspec.core.axes import world_size
from megaspec.core.errors import DataError, Problem, RecipeError, chosen_in
from megaspec.core.problems import origin_of, typed_problems
from megaspec.data.spec import ORDER_VERSION
from megaspec.data.urls import RemoteData
from megaspec.estimate.target import Target
from megaspec.recipe import Recipe
from megaspec.resolve.fill import FILLS, ResolverDraft
from megaspec.resolve.trials import trials
from megaspec.rules.case import Case
from megaspec.rules.run_facts import Facts
from megaspec.rules.table import broken_rules, is_legal
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec.spec import Decision, ForkPoint, Origin, Spec, WeightsOrigin
from megaspec.train.batch_schedule import BatchSchedule

# Why a run that keeps every rule can't start.
Refused = Callable[[Spec], list[Problem]]


@dataclass(frozen=True)
class Settled:
    """A recipe with every auto filled and every rule kept."""

    recipe: Recipe
    target: Target
    data_fingerprint: str
    remote: tuple[RemoteData, ...]
    decisions: tuple[Decision, ...]

    def samples(self, moved: int = 0) -> int:
        """Sequences of the training order that the run reaches; `moved`: see Spec.samples_moved."""
        return BatchSchedule(self.recipe.train, moved=moved).consumed(self.recipe.train.steps)

    def spec(
        self,
        segments: tuple[int, ...],
        *,
        moved: int = 0,
        forked_from: Origin = None,
        weights_from: WeightsOrigin | None = None,
    ) -> Spec:
        """The Spec, its training order cut into `segments` (sequences each); `moved`: see Spec.samples_moved."""
        if isinstance(forked_from, ForkPoint):
            forked_from = forked_from.model_dump(mode="json")
        fields = self.recipe.model_dump(mode="json") | {
            "world_size": world_size(self.recipe.parallelism.degrees),
            "device": self.target.device,
            "segments": segments,
            "samples_moved": moved,
            "forked_from": forked_from,
            "weights_from": None if weights_from is None else weights_from.model_dump(mode="json"),
            "data_order": ORDER_VERSION,
            "data_fingerprint": self.data_fingerprint,
            "remote": [record.model_dump(mode="json") for record in self.remote],
            "decisions": [decision.model_dump(mode="json") for decision in self.decisions],
            "plugins": plugins.loaded(),
        }
        return Spec.model_validate_json(json.dumps(fields))


def resolve(
    recipe: Recipe,
    target: Target,
    facts: Facts,
    origins: Mapping[str, str] | None = None,
    *,
    refused: Refused | None = None,
) -> Spec:
    """What will happen, with nothing left open.

    `origins` (see compose) tells problems where a value was set. `refused`: why a run can't start that keeps every
    rule; given for a run only. RecipeError: every rule that is broken, and all else, at once. DataError: nothing but
    the data is wrong.
    """
    settled = settle(recipe, target, facts, origins, refused=refused)
    return settled.spec((settled.samples(),), weights_from=origin_of_weights(facts))


def origin_of_weights(facts: Facts) -> WeightsOrigin | None:
    """Where the weights of a new run begin; None: they are drawn from the seed."""
    source = facts.weights
    if source is None:
        return None
    vocab_size = None
    if source.model is not None:
        vocab_size = source.model.vocab_size
    return WeightsOrigin(
        path=source.path, digest=source.digest, step=source.step, family=source.family, vocab_size=vocab_size
    )


def settle(
    recipe: Recipe,
    target: Target,
    facts: Facts,
    origins: Mapping[str, str] | None = None,
    *,
    kept: frozenset[str] = frozenset(),
    has_begun: bool = False,
    refused: Refused | None = None,
) -> Settled:
    """Fill, then ask every rule. Raises as `resolve` does.

    `kept`: paths that were decided when the run began. `has_begun`: the recipe is that of a run that goes on, which
    may be told again what it does not read.
    """
    origins = origins or {}
    chosen = frozenset() if has_begun else chosen_in(origins)
    draft = ResolverDraft(recipe, target, facts)
    for fill in FILLS:
        fill(draft)
    decisions = tuple(draft.decisions)
    reasons = {decision.key: f"decided: {decision.reason}" for decision in decisions}
    filled = _typed(draft.content, {**origins, **reasons})
    case = Case(filled, target, facts, frozenset(reasons) | kept, chosen)
    problems = []
    # the quick question first: ways out are tried only where a rule is broken
    if not is_legal(case):
        problems = broken_rules(replace(case, trial=trials(recipe, case)), decisions=decisions, origins=origins)
    settled = Settled(filled, target, facts.fingerprint, facts.remote, decisions)
    if refused is not None:
        if problems or draft.problems:
            # no Spec to ask about: what can't be trained is known without one
            problems += unbuilt_problems(filled, origins)
        else:
            problems += refused(settled.spec((settled.samples(),)))
    told = {problem.message for problem in problems}
    data_problems = located([p for p in (*facts.problems, *draft.problems) if p.message not in told], origins)
    if problems:
        raise RecipeError([*problems, *data_problems])
    if data_problems:
        raise DataError(data_problems)
    return settled


def located(problems: Sequence[Problem], origins: Mapping[str, str]) -> list[Problem]:
    """Problems of the data, with where each value was set."""
    return [Problem(p.key, p.message, p.origin or origin_of(origins, p.key), p.code) for p in problems]


def _typed(content: Mapping[str, Any], origins: Mapping[str, str]) -> Recipe:
    """A filled recipe. RecipeError: what follows from the values that were set is out of bounds."""
    try:
        return Recipe.model_validate_json(json.dumps(content))
    except ValidationError as error:
        problems = typed_problems(error, model=Recipe, content=content, origins=origins, choices={})
        raise RecipeError(problems) from None
