"""What a norm says of itself."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from megaspec.core.part_facts import Execution, Kept, PartFacts, Vector, features

if TYPE_CHECKING:
    from megaspec.nn.norm.spec import NormSpec, WeightForm


def norm_facts(spec: "NormSpec", width: int, *, name: str, acts_on_heads: bool, feeds_product: bool) -> PartFacts:
    """Of any kind; see NormSpec.facts."""
    vectors = spec.vectors(width, name=name)
    if acts_on_heads:
        vectors = tuple(replace(vector, acts_on="heads") for vector in vectors)
    # without a parameter, it is a module that acts on each token all the same
    sites = () if vectors or acts_on_heads else (name,)
    return PartFacts(vectors=vectors, sites=sites, kept=partial(_kept, spec, width, name, acts_on_heads, feeds_product))


def gain_and_bias(form: "WeightForm", width: int, *, name: str, bias: bool = False) -> tuple[Vector, ...]:
    """What a normed input is multiplied by, and what is added to it."""
    vectors = []
    if form != "none":
        start = 1.0 if form == "scale" else 0.0
        vectors.append(Vector(f"{name}.weight", width, start))
    if bias:
        vectors.append(Vector(f"{name}.bias", width, 0.0))
    return tuple(vectors)


def _kept(
    spec: "NormSpec", width: int, name: str, acts_on_heads: bool, feeds_product: bool, execution: Execution
) -> Iterator[Kept]:
    """Its input, its row's sums, and its output."""
    numbers = (features(width),)
    wide = spec.wide_copies(execution)
    if spec.has_kernel and not acts_on_heads and "norm" in execution.fused:
        wide = 0
    # the gradient of its weight is made of what it normed, or makes that again of its input and the row's sums
    of_vector = ""
    if wide == 0:
        of_vector = name
    stream = Kept(f"{name}.stream", numbers, "stream", of_vector=of_vector)
    # to make wide copies again takes the input as it came
    if wide == 0 or "norm" in execution.recomputed:
        yield stream
    if wide:
        yield Kept(f"{name}.wide", numbers, "stream", "wide", freed_by=("norm",))
    if wide > 1:
        # the normed input, which the weight's gradient is made of
        yield Kept(f"{name}.normed", numbers, "stream", "wide", freed_by=("norm",), times=wide - 1, for_weights=True)
    if spec.statistics:
        sums = (features(spec.statistics),)
        yield Kept(f"{name}.statistics", sums, "stream", "statistic", freed_by=("norm",), of_vector=of_vector)
    if feeds_product:
        # The gather of the forward pass and that of the backward pass are one operation to the compiler, which keeps
        # its result: the whole sequence, not this rank's part of it.
        tokens = "all" if execution.is_compiled else "stream"
        yield Kept(f"{name}.out", numbers, tokens, "product", freed_by=("norm",), for_weights=True)
