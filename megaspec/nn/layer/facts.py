"""A layer's facts: those of its residual sub-layers, one behind the other or side by side."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from megaspec.core.part_facts import (
    AttentionProducts,
    Degrees,
    Execution,
    Kept,
    Linear,
    Moved,
    PartFacts,
    Routing,
    Vector,
    Weight,
    Width,
    features,
)
from megaspec.core.placement import Row

# Features of the residual stream that a norm's backward pass reads and writes. The sum over tokens for the norm's
# weight is a second pass, and both reach about half of the bandwidth (measured on an H200: 1.6 of 4.2 TB/s for 3
# features).
_NORM_BACKWARD = 8
# Of one kernel for all of it: its input, both gradients, and their sum.
_NORM_BACKWARD_OF_KERNEL = 4


@dataclass(frozen=True, eq=False)
class SubLayer:
    """x + post(mix(pre(x))), or one of several branches that take the same x."""

    kind: Literal["attention", "feed-forward", "experts"]
    mix: PartFacts
    pre: PartFacts | None
    """The norm before it. None: it takes the stream as it is, or what an earlier branch has normed."""
    post: PartFacts | None
    """The norm of what it puts out."""
    shared: PartFacts | None = None
    """What every token takes beside its own experts."""
    takes_stream: bool = False
    """Its products take and keep the residual stream itself."""

    @property
    def parts(self) -> Iterator[PartFacts]:
        """In the order in which they run."""
        for part in (self.pre, self.mix, self.shared, self.post):
            if part is not None:
                yield part

    @property
    def weights(self) -> Iterator[Weight]:
        """Every parameter, in the order of the modules."""
        if self.pre is not None:
            yield from self.pre.weights
        # the gate of shared experts stands behind them
        behind = [linear for linear in self.mix.linears if linear.purpose == "shared_experts"]
        yield from replace(self.mix, linears=tuple(one for one in self.mix.linears if one not in behind)).weights
        if self.shared is not None:
            yield from self.shared.weights
        yield from PartFacts(linears=tuple(behind)).weights
        if self.post is not None:
            yield from self.post.weights


@dataclass(frozen=True, eq=False)
class LayerFacts:
    """One layer. Layers that are alike share one object."""

    d_model: int
    sublayers: tuple[SubLayer, ...]
    is_parallel: bool = False
    """All sub-layers take the layer's input; otherwise each takes what the one before has left."""
    runs_backward: bool = True
    """The backward pass comes here: something is trained in it or before it."""
    in_fp8: bool = False
    """Its matrix products take fp8."""

    @cached_property
    def parts(self) -> tuple[PartFacts, ...]:
        return tuple(part for sublayer in self.sublayers for part in sublayer.parts)

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        return tuple(linear for part in self.parts for linear in part.linears)

    @cached_property
    def vectors(self) -> tuple[Vector, ...]:
        return tuple(vector for part in self.parts for vector in part.vectors)

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """Every parameter, in the order of the modules."""
        return tuple(weight for sublayer in self.sublayers for weight in sublayer.weights)

    @cached_property
    def attention(self) -> AttentionProducts | None:
        """None: no token looks at another in this layer."""
        return next((part.attention for part in self.parts if part.attention is not None), None)

    @cached_property
    def routing(self) -> Routing | None:
        """None: the layer has no experts."""
        return next((part.routing for part in self.parts if part.routing is not None), None)

    @property
    def has_experts(self) -> bool:
        return self.routing is not None

    def kept(self, execution: Execution) -> Iterator[Kept]:
        """Every tensor that waits for the backward pass when nothing is recomputed; attention's own products apart."""
        if not self.runs_backward:
            return
        for number, sublayer in enumerate(self.sublayers):
            if sublayer.takes_stream and stream_name(number) in self.trained_inputs:
                tokens = "all" if execution.is_compiled else "stream"
                yield Kept(stream_name(number), (features(self.d_model),), tokens, "product", for_weights=True)
            for part in sublayer.parts:
                for kept in part.kept(execution):
                    is_needed = part.runs_backward and not kept.for_weights
                    is_of_weight = kept.what in self.trained_inputs or kept.of_vector in self.trained_modules
                    if is_needed or is_of_weight:
                        yield kept

    @cached_property
    def trained_modules(self) -> frozenset[str]:
        """Modules of which a vector is trained."""
        return frozenset(vector.module for vector in self.vectors if not vector.is_frozen)

    @cached_property
    def trained_inputs(self) -> frozenset[str]:
        """Of kept tensors, by name, what gradients of trained weights are made of."""
        names = {linear.input_kept for linear in self.linears if not linear.is_frozen}
        names |= {f"{module}.normed" for module in self.trained_modules}
        return frozenset(names)

    @cached_property
    def fp8_inputs(self) -> frozenset[str]:
        """Of kept tensors, by name, those that products in fp8 keep. A router, and experts that every token takes, keep
        theirs in the model's format."""
        if not self.in_fp8:
            return frozenset()
        return frozenset(linear.input_kept for linear in self.linears if linear.takes_fp8)

    @cached_property
    def attends_backward(self) -> bool:
        """The backward pass goes through attention's own products: what goes out of them has a gradient to give on."""
        behind = [linear for one in self.sublayers if one.kind == "attention" for linear in one.mix.linears[-1:]]
        return any(linear.makes_input_gradient for linear in behind)

    @cached_property
    def moved(self) -> tuple[Moved, ...]:
        """What is read and written between matrix products."""
        of_parts = tuple(moved for part in self.parts for moved in part.moved)
        return (*of_parts, self._norms_and_sums())

    def _norms_and_sums(self) -> Moved:
        """A norm writes what it makes, a sum reads all of its terms and writes one; each runs in one kernel with what
        comes before it. The layer's input is read once."""
        norms = 0
        sums = 0
        for sublayer in self.sublayers:
            norms += (sublayer.pre is not None) + (sublayer.post is not None)
            # a term, and unless all are added at once, the stream and the result
            sums += 1 if self.is_parallel else 3
        if self.is_parallel:
            sums += 2
        stream = features(self.d_model)
        forward = ((1 + norms + sums, stream),)
        of_kernel = Moved(
            "norm", forward, ((_NORM_BACKWARD_OF_KERNEL * norms, stream),), tokens="stream", is_fused=True
        )
        return Moved(
            "norm",
            forward,
            ((_NORM_BACKWARD * norms, stream),),
            tokens="stream",
            operation="norm",
            of_kernel=of_kernel,
        )

    @cached_property
    def gradient(self) -> tuple[Width, ...]:
        """The largest gradient of an activation inside: the feed-forward layer's, attention's where there is none."""
        return self.widest.gradient

    @cached_property
    def widest(self) -> PartFacts:
        """The part whose backward pass holds most: the feed-forward layer or the experts, else attention."""
        return next((one.mix for one in self.sublayers if one.kind != "attention"), self.sublayers[-1].mix)

    def rows(self, prefix: str) -> Iterator[Row]:
        """Its placement."""
        for part in self.parts:
            yield from part.rows(prefix)

    def trained_on(self, degrees: Degrees) -> "WeightCount":
        """Of what one rank holds, what is trained."""
        dense = 0
        expert = 0
        for linear in self.linears:
            size = 0
            if not linear.is_frozen:
                size += linear.weights_on(degrees)
            if not linear.is_bias_frozen:
                size += linear.biases_on(degrees)
            if linear.tokens == "routed":
                expert += size
            else:
                dense += size
        for vector in self.vectors:
            if not vector.is_frozen:
                dense += vector.on(degrees)
        return WeightCount(dense, expert)

    def weights_on(self, degrees: Degrees) -> "WeightCount":
        """What one rank holds of it."""
        dense = 0
        expert = 0
        for linear in self.linears:
            size = linear.weights_on(degrees) + linear.biases_on(degrees)
            if linear.tokens == "routed":
                expert += size
            else:
                dense += size
        return WeightCount(dense + sum(vector.on(degrees) for vector in self.vectors), expert)

    def fp8_weights_on(self, degrees: Degrees) -> "WeightCount":
        """Of them, those whose products take fp8."""
        dense = 0
        expert = 0
        for linear in self.linears:
            if not self.in_fp8 or not linear.takes_fp8:
                continue
            if linear.tokens == "routed":
                expert += linear.weights_on(degrees)
            else:
                dense += linear.weights_on(degrees)
        return WeightCount(dense, expert)


@dataclass(frozen=True)
class WeightCount:
    """Numbers of weights that one rank holds, of a layer or of all that lies on it."""

    dense: int
    """All but the routed experts, which are shared out over other ranks than the rest."""
    expert: int

    @property
    def total(self) -> int:
        return self.dense + self.expert


def stream_name(number: int) -> str:
    """The `Kept.what` of the residual stream that sub-layer `number` takes as it is."""
    return f"stream{number}"
