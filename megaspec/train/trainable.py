"""Which parameters a run trains, by the patterns of `train.trainable`. Pure: rules ask it before a run, the estimate
for `plan`, ranks when they build."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megaspec.nn.model_facts import ModelFacts

Patterns = Sequence[str] | None
"""None: everything is trained."""


@dataclass(frozen=True)
class Trained:
    """What patterns say of the parameters of a model."""

    names: frozenset[str]
    """Those that are trained, by global name; of routers' biases, which no gradient moves, those that move."""
    idle: tuple[str, ...]
    """Patterns that fit nothing."""


def names_of(facts: ModelFacts) -> list[str]:
    """Global names that patterns may fit: of all parameters, and of routers' biases."""
    names = list(facts.weights())
    for name, vector in facts.vectors():
        if not vector.is_trained:
            names.append(name)
    return names


def trained(names: Iterable[str], patterns: Patterns) -> Trained:
    """Those of the names that a pattern fits."""
    if patterns is None:
        return Trained(frozenset(names), ())
    found: set[str] = set()
    fitting: set[str] = set()
    for name in names:
        for pattern in patterns:
            if fnmatchcase(name, pattern):
                found.add(name)
                fitting.add(pattern)
    return Trained(frozenset(found), tuple(pattern for pattern in patterns if pattern not in fitting))


def trained_names(facts: ModelFacts, patterns: Patterns) -> frozenset[str]:
    """See Trained.names."""
    return trained(names_of(facts), patterns).names
