"""What feed-forward layers say of themselves."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from megaspec.core.part_facts import Execution, Kept, Linear, Moved, PartFacts, Purpose, Tokens, Width, features


@dataclass(frozen=True)
class FeedForwardPlace:
    """Where a feed-forward layer stands."""

    name: str
    """Of its module, from the layer on: `mlp`."""
    input_kept: str
    """What it takes, by the name of the kept tensor: `norm2.out`."""
    purpose: Purpose = "mlp"
    freed_by: tuple[str, ...] = ("mlp",)
    """Parts of parallelism.recompute.parts that make it again, the one that its products belong to first."""
    dropout: bool = False
    """Its output has a site of it that drops."""


@dataclass(frozen=True)
class ActivationFacts:
    """What lies between the first product and the last."""

    gates: int = 1
    """Parts of the first product that it takes, each of the width between."""
    keeps_input: bool = True
    """Its backward pass takes what went into it. False: its own result is enough."""
    kept_between: int = 0
    """Results of its operations that wait for the backward pass, where they are not compiled into one."""
    operation: str = ""
    """Of kernels/: computes it where that has a kernel of its own."""


def mlp_facts(
    activation: ActivationFacts, *, into: str, bias: bool, d_model: int, d_ffn: int, place: FeedForwardPlace
) -> PartFacts:
    """A feed-forward layer of width `d_ffn`: a product called `into`, an activation, and another called w_down."""
    gates = activation.gates
    inner = features(d_ffn, "tp")
    first = Linear(
        f"{place.name}.{into}",
        features(d_model),
        (inner,) * gates,
        place.purpose,
        bias=bias,
        recomputed_with=place.freed_by[0],
        input_kept=place.input_kept,
        # with a bias, whose gradient is made of the output's, the layer quantises that
        gradient_by="" if bias else activation.operation,
    )
    last = Linear(
        f"{place.name}.w_down",
        inner,
        (features(d_model),),
        place.purpose,
        bias=bias,
        is_residual=True,
        recomputed_with=place.freed_by[0],
        input_kept=f"{place.name}.out",
        input_by=first.gradient_by,
    )
    return PartFacts(
        linears=(first, last),
        sites=(f"{place.name}.dropout",),
        kept=partial(_kept, activation, features(d_model), inner, place),
        moved=(_moves(activation, inner),),
        gradient=(inner,) * gates,
    )


def _kept(
    activation: ActivationFacts, d_model: Width, inner: Width, place: FeedForwardPlace, execution: Execution
) -> Iterator[Kept]:
    """What goes into the activation, and what comes out of it."""
    by_activation = ("activation", *place.freed_by)
    # compiled, it computes everything again from what went in
    if activation.keeps_input or execution.is_compiled:
        # the gate and what it multiplies are views of one product
        yield Kept(f"{place.name}.in", (inner,) * activation.gates, freed_by=place.freed_by)
    is_one_kernel = execution.is_compiled or activation.operation in execution.fused
    if activation.kept_between and not is_one_kernel:
        between = activation.kept_between
        yield Kept(f"{place.name}.activated", (inner,), freed_by=by_activation, times=between)
    # an activation whose own result is enough for its backward pass keeps that
    for_weights = activation.keeps_input or execution.is_compiled
    yield Kept(f"{place.name}.out", (inner,), element="product", freed_by=by_activation, for_weights=for_weights)
    if place.dropout:
        yield Kept(f"{place.name}.dropout", (d_model,), "stream", "byte", place.freed_by)


def _moves(activation: ActivationFacts, inner: Width) -> Moved:
    moved = activation_moves(activation.gates, inner)
    if not activation.operation:
        return moved
    return replace(moved, operation=activation.operation, of_kernel=replace(moved, is_fused=True))


def activation_moves(gates: int, inner: Width, *, tokens: Tokens = "all") -> Moved:
    """Reads `gates` inputs and writes one output; backward, reads them and the output's gradient and writes theirs."""
    return Moved("activation", ((gates + 1, inner),), ((2 * gates + 1, inner),), tokens)
