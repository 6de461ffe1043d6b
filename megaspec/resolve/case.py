"""What a rule looks at."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megaspec.core.errors import Problem
from megaspec.nn.spec import MlaSpec, MoeSpec
from megaspec.recipe import Recipe
from megaspec.resolve.batch import data_parallel
from megaspec.resolve.facts import Facts
from megaspec.resolve.target import Target
from megaspec.train.batch_schedule import BatchSchedule


@dataclass(frozen=True)
class Case:
    """A filled recipe, and what it was filled for."""

    recipe: Recipe
    target: Target
    facts: Facts
    decided: frozenset[str]
    """Paths that the resolver filled."""

    @property
    def tp(self) -> int:
        return self.recipe.parallelism.tp

    @property
    def pp(self) -> int:
        return self.recipe.parallelism.pp

    @property
    def cp(self) -> int:
        return self.recipe.parallelism.cp

    @property
    def ep(self) -> int:
        return self.recipe.parallelism.ep

    @property
    def etp(self) -> int:
        return self.recipe.parallelism.etp

    @property
    def dp(self) -> int:
        return data_parallel(self.recipe.parallelism)

    @property
    def moe(self) -> MoeSpec | None:
        """The experts of the model; None where it has none."""
        return getattr(self.recipe.model, "moe", None)

    @property
    def mla(self) -> MlaSpec | None:
        """The latent attention of the model; None where it has none."""
        return getattr(self.recipe.model, "mla", None)

    @property
    def micro_batches(self) -> int:
        """Micro batches of a rank in the smallest step; 0 when the batch does not divide."""
        train = self.recipe.train
        return min(BatchSchedule(train).batches) // (train.micro_batch * self.dp)


Rule = Callable[[Case], Problem | None]


def divisors(n: int) -> list[int]:
    """Of n, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def nearest(value: int, legal: Sequence[int], *, most: int = 6) -> list[int]:
    """The `most` legal values that are closest to a value, ascending."""
    return sorted(sorted(legal, key=lambda one: abs(one - value))[:most])


def multiples(value: int, of: int) -> list[int]:
    """The multiples of a number next to a value: below (when there is one) and above."""
    below = value // of * of
    return [m for m in (below, below + of) if m > 0]
