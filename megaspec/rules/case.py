"""What a rule looks at."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import Any

from megaspec.core.divisors import divisors
from megaspec.core.errors import Problem
from megaspec.estimate.batch_sizes import data_parallel
from megaspec.estimate.target import Target
from megaspec.nn.mla.spec import LatentSpec
from megaspec.nn.moe.spec import MoeSpec
from megaspec.recipe import Recipe
from megaspec.rules.kernel_use import use_of
from megaspec.rules.run_facts import Facts
from megaspec.train.batch_schedule import BatchSchedule, ramp_is_too_long
from megaspec_kernels.catalog import Use


@dataclass(frozen=True)
class Case:
    """A filled recipe, and what it was filled for."""

    recipe: Recipe
    target: Target
    facts: Facts
    decided: frozenset[str]
    """Paths that the resolver filled."""
    chosen: frozenset[str] = frozenset()
    """Paths that the command line sets: what the run does not read of them is refused."""
    trial: Callable[[str, Mapping[str, Any]], bool] | None = None
    """Whether changes of settings keep the rule of a code and break no other. None: what is suggested is not tried."""
    mends: Callable[[Mapping[str, Any]], bool] | None = None
    """`trial` for the rule that looks."""

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
    def dp_is_open(self) -> bool:
        """Whether nothing says how many data-parallel ranks there are: they were left to us, and no number fits."""
        parallelism = self.recipe.parallelism
        # the degree that takes what ranks are left
        rest = "parallelism.dp_shard"
        if parallelism.dp_strategy == "replicate":
            rest = "parallelism.dp_replicate"
        product = parallelism.pp * self.dp * parallelism.cp * parallelism.tp
        return rest in self.decided and product != self.recipe.launcher.ranks

    @property
    def moe(self) -> MoeSpec | None:
        """The experts of the model; None where it has none."""
        return self.recipe.model.moe

    @property
    def mla(self) -> LatentSpec | None:
        """The latent attention of the model; None where it has none."""
        attention = self.recipe.model.attention
        if attention.kind != "mla":
            return None
        return attention

    @property
    def dense_layers(self) -> int:
        """Layers with a plain feed-forward layer."""
        return sum("mlp" in mixers for mixers in self.recipe.model.mixers)

    # a rule for each operation asks, and a search asks every rule of every layout
    @cached_property
    def kernel_use(self) -> Use:
        """What the recipe asks of its kernels, see use_of."""
        return use_of(self.recipe)

    @property
    def batches(self) -> tuple[int, ...]:
        """Every global batch that occurs; of a ramp that is too long, which is told elsewhere, only the last."""
        train = self.recipe.train
        if ramp_is_too_long(train):
            return (train.global_batch,)
        return BatchSchedule(train).batches

    @property
    def micro_batches(self) -> int:
        """Micro batches of a rank in the smallest step; 0 when the batch does not divide."""
        return min(self.batches) // (self.recipe.train.micro_batch * self.dp)


Rule = Callable[[Case], Problem | None]


def sequence_unit(case: Case) -> int:
    """What a sequence has to be a multiple of, for all that divides it."""
    # ring and all-gather give each rank an early and a late chunk, so that causal attention is equal work
    chunks = 2
    if case.cp == 1 or case.recipe.parallelism.context.kind == "all_to_all":
        chunks = 1
    unit = chunks * case.cp
    if case.recipe.parallelism.sequence_parallel:
        unit = lcm(unit, case.cp * case.tp)
    return unit


def can_split_sequences(*, tp: int, cp: int, seq_len: int, max_seq_len: int) -> bool:
    """Whether tensor-parallel ranks can share sequences out: those of the training and the longest there may be."""
    return tp > 1 and seq_len // cp % tp == 0 and max_seq_len % (cp * tp) == 0


def legal_tp(case: Case) -> list[int]:
    """Tensor-parallel degrees that divide everything of the model that they have to divide; 1 at least."""
    model = case.recipe.model
    moe = case.moe
    widths = []
    if moe is None or case.dense_layers:
        widths.append(model.d_ffn)
    if moe is not None and moe.d_shared:
        widths.append(moe.d_shared)
    legal = []
    for tp in divisors(model.n_heads):
        # a key and value head may be held by several ranks, each with other queries
        fits_kv_heads = model.n_kv_heads % tp == 0 or tp % model.n_kv_heads == 0
        if fits_kv_heads and all(width % tp == 0 for width in widths):
            legal.append(tp)
    return legal
