"""Rules of which parameters a run trains."""

import re

from megaspec.core.errors import Problem
from megaspec.core.problems import did_you_mean, show
from megaspec.rules.case import Case
from megaspec.rules.model_rules import flat_layers_and_experts_agree
from megaspec.train.trainable import Trained, names_of, trained

_KEY = "train.trainable"


def patterns_fit_parameters(case: Case) -> Problem | None:
    """Every pattern of what is trained fits a parameter."""
    idle = _trained(case).idle
    if not idle:
        return None
    pattern = idle[0]
    text = f"{_KEY}: {show(pattern)} fits no parameter of this model"
    if len(idle) > 1:
        text += f", nor do {len(idle) - 1} more patterns"
    return Problem(_KEY, f"{text}; {_near(case, pattern)}")


def something_is_trained(case: Case) -> Problem | None:
    """A run trains a parameter."""
    found = _trained(case)
    if found.idle or not found.names or found.names & case.recipe.model.facts.weights().keys():
        return None
    text = f"{_KEY}={show(list(case.recipe.train.trainable))} fits routers' biases alone, which no gradient moves"
    return Problem(_KEY, f"{text}; add what is to be trained, or set {_KEY}=null to train everything")


def _trained(case: Case) -> Trained:
    """Nothing, and nothing idle, where everything is trained or the model has no parameters yet, which another rule
    tells."""
    if case.recipe.train.trainable is None or flat_layers_and_experts_agree(case) is not None:
        return Trained(frozenset(), ())
    return trained(names_of(case.recipe.model.facts), case.recipe.train.trainable)


def _near(case: Case, pattern: str) -> str:
    """What may have been meant."""
    facts = case.recipe.model.facts
    for tied, name in facts.tied_names.items():
        if trained([tied], [pattern]).names:
            return f"its output head is the embedding (model.tied_embeddings=true), write {name}"
    names = names_of(facts)
    # as one writes them for all layers at once
    of_all_layers = [re.sub(r"^layers\.\d+\.", "layers.*.", name) for name in names]
    options = list(dict.fromkeys([*of_all_layers, *names]))
    near = did_you_mean(pattern, options)
    return near or f"names are like {options[0]} and {options[1]}, see megaspec checkpoint inspect"
