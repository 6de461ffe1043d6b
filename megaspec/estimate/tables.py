"""Which tables of the vocabulary have their gradients summed in place: see megaspec/nn/linear.py, note "Tables"."""

from dataclasses import dataclass

from megaspec.estimate.trained import facts_of
from megaspec.recipe import Recipe


@dataclass(frozen=True)
class TablesInPlace:
    """The embedding's table, and the output head's: of a tied one both or neither."""

    embedding: bool
    head: bool


def tables_in_place(recipe: Recipe) -> TablesInPlace:
    """Of a filled recipe. A table that is not trained counts as one whose gradient is made nowhere else."""
    # sums have memory in the forward pass
    keeps_sums = recipe.parallelism.dp_strategy in ("replicate", "zero1")
    # plain operations leave the gradient to autograd, and so does a loss of a plug-in
    adds = recipe.kernels.cross_entropy != "reference" and recipe.train.loss is None
    head = keeps_sums and adds
    embedding = keeps_sums
    if facts_of(recipe).is_tied:
        embedding = head
    return TablesInPlace(embedding, head)
