"""Linear layers whose three products take fp8 (Micikevicius et al. 2022; Noune et al. 2022).

Note "Roles". Each product sums along one dimension of its factors, and both factors lie along it in memory. So the
input, the weight and the output's gradient are quantised in two layouts, `rows` as they are and `columns` transposed:

y  = x Wᵀ     input in rows, weight in rows          sums over inputs
dx = dy W     gradient in rows, weight in columns    sums over outputs
dW = dyᵀ x    gradient in columns, input in columns  sums over tokens

Which elements share a scale follows from the recipe (BLOCKS). Kept for the backward pass is the input in columns, a
byte a number. Weights are quantised once for each update, in both layouts. In columns values lie [K, M]; with mxfp8
(fp8_mx.py), whose tensor cores take factors that lie along the other dimension, [M, K] as in rows, and with nvfp4
(fp4.py) [K, M / 2], two numbers a byte.

Note "Whole tensors". Where ranks hold parts of one tensor, a block that goes across them has the largest element of all
of them: `Split` says which dimension of the layer's weight they divide, and `largest` asks the other ranks.

Note "Tokens". Under sequence parallelism ranks hold tokens of an input whose product divides outputs, and of the
gradient of an output whose product divides inputs, and gather what the others hold. Where a scale in rows is that of
the whole tensor, or of a token, each quantises its own tokens first (`fp8_tokens`), by what all agree on where blocks
go across tokens: the bits are those of the whole tensor quantised by one rank, and a byte a number is sent. A whole
tensor's columns are its rows turned round, without loss (`fp8_columns`). Which recipes do so: fp8_facts.py.

Note "Producers". A kernel that makes an input or a gradient may write it in fp8 itself, in both layouts and without a
copy in the model's format, where the scale is known before its elements are (recipe delayed, not its first step). It
asks the layer that takes the matrix: `layer_of(linear.fp8.ticket).known(role)` is the scale that it divides by, and
where it records the largest finite element (an atomic maximum) and how many saturated; None: no scale is known yet,
so it makes the matrix as usual and has the layer `quantise` it. Both are done within the producer's own operation, so
that compiled code does not depend on it. It returns rows [M, K], columns [K, M] and a copy of the scale [1, 1], for

an input: Linear takes an `Fp8Input` of them in x's place. Its `carrier` stands for x to autograd: of x's shape and
format, but one number spread out (`carrier_of`); its gradient is x's. The producer's autograd.Function returns all
four, the three in fp8 marked as not differentiable. Of tokens that ranks gather first (note "Tokens") it returns this
rank's rows, and no columns; so it may for a frozen weight.
a gradient: `Linear.with_slots(x)` returns y and `Fp8Slots`. The producer's autograd.Function takes both in its forward
pass; in its backward pass it returns None for y and rows, columns and scale as the gradients of the three slots.

The layer needs no copy of either in the model's format, so it must not have a bias (its gradient sums dy) where it has
slots.

Note "Operations". Each pass of a layer is one operation that torch.compile leaves whole. What it does to the layer's
own state (weights that are quantised once, largest elements that are remembered) is found by a ticket, as sums of
weight gradients are: see linear.py, note "Tickets".
"""

# M tokens, I inputs, O outputs; B sequences, T tokens

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from megaspec.nn.fp8_layouts import ALL, BLOCKS, COLUMNS, FORMATS, SHORT_LINES, Blocks, Recipe, Role, scale_in_columns
from megaspec_kernels.fp8_cast.formats import COLUMN, ROW, SHORT_COLUMN, Block, Known, scale_of
from megaspec_kernels.operation import fake_of, operation
from megaspec_kernels.registry import Fp8CastKernel, ScaledProductKernel

Split = Literal["none", "outputs", "inputs"]
"""The dimension of a layer's weight, and of what it multiplies, that ranks divide among them."""

REMEMBERED: tuple[Role, ...] = ("input", "gradient")
"""Whose largest elements delayed scales are made of. A weight is quantised once for each update: its own is at hand."""


@dataclass(frozen=True)
class Fp8Form:
    """How the layers of a model compute in fp8."""

    recipe: Recipe
    gradient_format: Literal["e4m3", "e5m2"]
    """Of gradients of outputs; everything else is e4m3."""
    margin: int
    """Delayed scales leave room for elements 2^margin times as large as those that they were made of."""
    cast: Fp8CastKernel
    product: ScaledProductKernel

    counts_saturated = True
    takes_written = True
    """Whether layers take what norms, gates and rotations write in fp8."""

    def blocks(self, role: Role) -> Blocks:
        return BLOCKS[self.recipe][role]

    def memory_dtype(self, wide: torch.dtype) -> torch.dtype:
        """Of what is remembered. `wide`: at least fp32."""
        return wide

    def dtype(self, role: Role) -> torch.dtype:
        return FORMATS[self.gradient_format if role == "gradient" else "e4m3"]

    def delayed_scale(self, amax: Tensor, role: Role) -> Tensor:
        """Of elements up to `amax`, with room for larger ones."""
        return scale_of(amax, self.dtype(role), margin=self.margin)


class Fp8Tensor(NamedTuple):
    """A matrix in fp8, in one layout."""

    values: Tensor
    """[M, K] in rows, [K, M] in columns; with mxfp8 [M, K] in both."""
    scale: Tensor
    """Of its blocks, in the same layout: [m, k] or [k, m], in at least fp32; with mxfp8 [m, k] in both, in bytes."""


class Fp8Pair(NamedTuple):
    """A matrix in both layouts, of which one may not have been asked for."""

    rows: Fp8Tensor | None
    columns: Fp8Tensor | None


class Fp8Input(NamedTuple):
    """An input that arrives in fp8, see note "Producers"."""

    carrier: Tensor
    """[..., I], what stands for it in autograd: its numbers are nobody's."""
    rows: Tensor
    """[M, I]"""
    columns: Tensor
    """[I, M]; [0] where ranks gather the rows first, see note "Tokens", and may be where the weight is frozen."""
    scale: Tensor
    """[1, 1], of both."""


class Fp8Slots(NamedTuple):
    """What stands for an output so that its gradient arrives in fp8, see note "Producers". Numbers are nobody's."""

    rows: Tensor
    """[M, O]"""
    columns: Tensor
    """[O, M]"""
    scale: Tensor
    """[1, 1]"""


@dataclass
class Fp8Memory:
    """What delayed scales of one layer are made of, as views of what all layers of a rank have."""

    scales: Tensor
    """[2]: of REMEMBERED, in this step; nobody's of those that are `fresh`."""
    seen: Tensor
    """[2]: the largest elements that this rank saw in this step."""
    saturated: Tensor
    """int64 [1]: elements that were beyond the largest number of their format, of all layers."""
    not_counted: Tensor = field(init=False)
    """int64 [1]: those that are counted elsewhere, before the backward pass computed them again or on another rank:
    nobody reads it."""
    fresh: frozenset[Role] = frozenset(REMEMBERED)
    """Those of REMEMBERED of which no step has seen an element other than zero: scales are those of the tensors
    themselves."""

    def __post_init__(self) -> None:
        self.not_counted = torch.zeros_like(self.saturated)

    def saturated_in(self, role: Role) -> Tensor:
        """What counts them now."""
        # an input that is quantised while a backward pass runs is computed again
        is_again = role == "input" and torch._C._current_graph_task_id() != -1
        return self.not_counted if is_again else self.saturated


@dataclass
class Fp8Shared:
    """What the layers of a built model agree on."""

    version: int = 0
    """Of the weights: a new one for each update, and whenever else they may have changed."""
    is_recording: bool = False
    """Whether what is quantised now is part of a training step."""
    met_fresh: bool = False
    """Whether this step has quantised, or had nothing to quantise, of what is `fresh` in a layer's memory."""


# The dimension of a matrix that ranks divide, where they divide one.
_DIVIDED: dict[tuple[Split, Role], int] = {
    ("outputs", "weight"): 0,
    ("inputs", "weight"): 1,
    ("inputs", "input"): 1,
    ("outputs", "gradient"): 1,
}


def _alone(amax: Tensor) -> Tensor:
    return amax


@dataclass(eq=False)
class Fp8Linear:
    """One linear layer's side of it. `largest`: the elementwise maximum over the ranks that hold parts of the layer."""

    form: Fp8Form
    shared: Fp8Shared
    split: Split = "none"
    largest: Callable[[Tensor], Tensor] = _alone
    memory: Fp8Memory | None = None
    """None: scales are not delayed."""
    of_tokens: frozenset[Role] = frozenset()
    """What ranks quantise before they gather it, each its own tokens: see note "Tokens"."""
    group: Any = None
    """The process group of those ranks, for kernels that ask it themselves."""
    counts_alike: bool = True
    """Whether it counts what saturates of what all ranks that hold parts of the layer have alike: one of them does."""
    gathered: Fp8Tensor | None = field(default=None, init=False)
    """The weight in rows, where ranks have gathered it in fp8: its own memory is empty then."""
    _weight: Fp8Pair | None = field(default=None, init=False)
    _weight_version: int = field(default=-1, init=False)
    _known: dict[Role, Known] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.number = next(_numbers)
        _layer_of_number[self.number] = self

        if self.memory is not None:
            for role in REMEMBERED:
                place = REMEMBERED.index(role)
                scale = self.memory.scales[place].view(1)
                seen = self.memory.seen[place].view(1)
                self._known[role] = Known(scale, seen, self.memory.saturated, self.form.dtype(role))

    def known(self, role: Role) -> Known | None:
        """What a kernel needs that writes fp8 without having seen all of a matrix. None: no scale is known before."""
        self.meet(role)
        return None if self.is_fresh(role) else self._recorded(role)

    def is_fresh(self, role: Role) -> bool:
        """Whether nothing is remembered of what scales of steps before would be made of."""
        return self.memory is not None and role in self.memory.fresh

    def meet(self, role: Role) -> None:
        """A training step has come to it: where it is fresh, the step's end looks at what was seen of it. All ranks
        that share the layer have to meet it in the same steps."""
        if self.shared.is_recording and self.is_fresh(role):
            self.shared.met_fresh = True

    def _recorded(self, role: Role) -> Known | None:
        """What is known and recorded of a role, if anything is; fresh or not."""
        known = self._known.get(role)
        if known is None:
            return None
        saturated = self.memory.saturated_in(role)
        if not self.counts_alike and not self.is_divided(role):
            saturated = self.memory.not_counted
        known = known._replace(saturated=saturated)
        if self.shared.is_recording:
            return known
        return known._replace(seen=None)

    @property
    def ticket(self) -> Tensor:
        """What stands for the layer in compiled code: int64 [1] on the CPU."""
        return torch.tensor([self.number], dtype=torch.int64, device="cpu")

    def quantise(self, x_MK: Tensor, role: Role, *, rows: bool = True, columns: bool = True) -> Fp8Pair:
        """A matrix in the layouts that are asked for."""
        blocks = self.form.blocks(role)
        if blocks.rows == blocks.columns:
            scale = self._scale(x_MK, role, blocks.rows)
            return self._cast(x_MK, role, blocks.rows, scale, rows=rows, columns=columns)
        if rows and columns:
            return self._quantise_lines(x_MK, role)
        in_rows = None
        in_columns = None
        if rows:
            scale = self._scale(x_MK, role, blocks.rows)
            in_rows = self._cast(x_MK, role, blocks.rows, scale, rows=True, columns=False).rows
        if columns:
            scale = self._scale(x_MK, role, blocks.columns)
            in_columns = self._cast(x_MK, role, blocks.columns, scale, rows=False, columns=True).columns
        return Fp8Pair(in_rows, in_columns)

    def _quantise_lines(self, x_MK: Tensor, role: Role) -> Fp8Pair:
        """In both layouts, each by scales of the lines along which a product sums."""
        cast = self.form.cast
        dtype = self.form.dtype(role)
        if self.form.blocks(role) == SHORT_LINES:
            both = cast.quantise_short_lines(x_MK, dtype=dtype)
            column_scale = scale_in_columns(both.column_scale, SHORT_COLUMN)
            return Fp8Pair(Fp8Tensor(both.rows, both.row_scale), Fp8Tensor(both.columns, column_scale))
        both = cast.quantise_lines(x_MK, dtype=dtype, amax=self._agreed_amax_of_lines(x_MK, role))
        in_columns = Fp8Tensor(both.columns, scale_in_columns(both.column_scale, COLUMN))
        return Fp8Pair(Fp8Tensor(both.rows, both.row_scale), in_columns)

    def _agreed_amax_of_lines(self, x_MK: Tensor, role: Role) -> tuple[Tensor, Tensor] | None:
        """Of each row [M, 1], and of each column [1, K], where lines go across ranks. None: x has all of them."""
        rows_cross = self._goes_across_ranks(role, ROW)
        columns_cross = self._goes_across_ranks(role, COLUMN)
        if not (rows_cross or columns_cross):
            return None
        row_amax, column_amax = self.form.cast.amax_of_lines(x_MK)
        if rows_cross:
            row_amax = self.largest(row_amax)
        if columns_cross:
            column_amax = self.largest(column_amax)
        return row_amax, column_amax

    def for_columns(self, x_MI: Tensor, in_rows: Fp8Tensor) -> Fp8Tensor:
        """An input as it lies, by the scales that it has in columns. `in_rows`: as it was quantised in rows."""
        blocks = self.form.blocks("input")
        if blocks.rows == blocks.columns:
            return in_rows
        scale = self._scale(x_MI, "input", blocks.columns)
        return self._cast(x_MI, "input", blocks.columns, scale, rows=True, columns=False).rows

    def weight(self, weight_OI: Tensor) -> Fp8Pair:
        """The weight in both layouts, quantised once for each version of it."""
        if self._weight is None or self._weight_version != self.shared.version:
            if self.gathered is None:
                self._weight = self.quantise(weight_OI, "weight")
            else:
                values, scale = self.gathered
                self._weight = Fp8Pair(self.gathered, Fp8Tensor(self.columns(values), scale))
            self._weight_version = self.shared.version
        return self._weight

    def columns(self, values_MK: Tensor) -> Tensor:
        """fp8 as it lies -> [K, M]."""
        return self.form.cast.columns(values_MK)

    def forget_weight(self) -> None:
        """Frees what was quantised: the weight itself is about to be freed."""
        self._weight = None
        self.gathered = None

    def product(
        self,
        a: Fp8Tensor,
        b: Fp8Tensor,
        roles: tuple[Role, Role],
        *,
        along: str,
        dtype: torch.dtype,
        into: Tensor | None = None,
        overwrite: bool = False,
    ) -> Tensor:
        """a bᵀ. `along`: the layout of both, or of a and then of b. `into`, in `dtype`: what it is added to, or
        replaces where it is to `overwrite`."""
        layout_a, _, layout_b = along.partition(" ")
        return self.form.product(
            a.values,
            b.values,
            a.scale,
            b.scale,
            a_block=self._block(roles[0], layout_a),
            b_block=self._block(roles[1], layout_b or layout_a),
            dtype=dtype,
            # as others do: fewer bits in the sums of the forward pass alone
            fast=roles == ("input", "weight"),
            into=into,
            overwrite=overwrite,
        )

    def _block(self, role: Role, layout: str) -> Block:
        """Of the matrix as it lies in a layout."""
        blocks = self.form.blocks(role)
        return blocks.rows if layout == "rows" else blocks.columns[::-1]

    def _scale(self, x_MK: Tensor, role: Role, block: Block) -> Tensor:
        """A scale for each block of a matrix."""
        known = self.known(role)
        if known is not None:
            return known.scale.view(1, 1)
        cast = self.form.cast
        dtype = self.form.dtype(role)
        if not self._goes_across_ranks(role, block):
            return cast.scale(x_MK, block=block, dtype=dtype)
        amax = self.largest(cast.amax(x_MK, block=block))
        return cast.scale_of(amax, dtype)

    def _goes_across_ranks(self, role: Role, block: Block) -> bool:
        """Whether blocks hold elements of several ranks, which hold parts of one matrix."""
        divided = self._divided(role)
        return divided is not None and block[divided] is None

    def is_divided(self, role: Role) -> bool:
        """Whether ranks hold parts of the matrix."""
        return self._divided(role) is not None

    def _divided(self, role: Role) -> int | None:
        """The dimension of the matrix that ranks divide while it is quantised; None: each has all of it."""
        if role in self.of_tokens:
            return 0
        return _DIVIDED.get((self.split, role))

    def _cast(self, x_MK: Tensor, role: Role, block: Block, scale: Tensor, *, rows: bool, columns: bool) -> Fp8Pair:
        recorded = self._recorded(role)
        seen = None
        saturated = None
        copy = None
        if recorded is not None:
            seen = recorded.seen
            saturated = recorded.saturated
            # compiled code may give the memory of what an operation returns to something else, so it returns a copy
            copy = torch.empty_like(scale)
        by_rows, by_columns = self.form.cast.cast(
            x_MK,
            scale,
            block=block,
            dtype=self.form.dtype(role),
            rows=rows,
            columns=columns,
            seen=seen,
            saturated=saturated,
            scale_copy=copy,
        )
        if copy is not None:
            scale = copy
        in_rows = None
        in_columns = None
        if rows:
            in_rows = Fp8Tensor(by_rows, scale)
        if columns:
            in_columns = Fp8Tensor(by_columns, scale_in_columns(scale, block))
        return Fp8Pair(in_rows, in_columns)


_numbers = count()
_layer_of_number: WeakValueDictionary[int, Fp8Linear] = WeakValueDictionary()


def layer_of(ticket: Tensor) -> Fp8Linear:
    """The layer that a ticket stands for."""
    return _layer_of_number[int(ticket)]


class Fp8Use(NamedTuple):
    """What a linear layer hands on to its operations."""

    ticket: Tensor
    recipe: str
    gradient_format: str
    """Both are the same for all layers of a model: shapes and formats follow from them."""
    gathers_bytes: bool = False
    """What ranks gather of their tokens is in fp8: see note "Tokens"."""


@operation("megaspec::fp8_forward")
def fp8_forward(
    x: Tensor, weight: Tensor, ticket: Tensor, recipe: str, keeps: bool, part: int, parts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """[..., I], [O, I] -> x Wᵀ [..., O], and where it `keeps` it, the input for the weight gradient with its scales.

    With `parts` of 1 that is the input in columns, [I, M]. Otherwise x is [B, T, I] and what is kept are the tokens of
    the `part`: [B, T / parts, I], by the scales of all of x, for `fp8_columns` once they are gathered.
    """
    layer = layer_of(ticket)
    x_MI = x.flatten(0, -2)
    turns = keeps and parts == 1
    pair = layer.quantise(x_MI, "input", columns=turns)
    if turns:
        kept, kept_scale = pair.columns
    elif keeps:
        whole = layer.for_columns(x_MI, pair.rows)
        # a copy, also where it lies in one piece: the tokens of other ranks are not kept
        by_tokens = whole.values.view(COLUMNS[recipe].parts_shape(x.shape))
        kept = by_tokens.chunk(parts, 1)[part].clone(memory_format=torch.contiguous_format)
        kept_scale = whole.scale
        if recipe in BLOCKS:
            kept_scale = scale_in_columns(whole.scale, BLOCKS[recipe]["input"].columns)
    else:
        kept, kept_scale = _nothing(x)
    y_MO = layer.product(pair.rows, layer.weight(weight).rows, ("input", "weight"), along="rows", dtype=x.dtype)
    return y_MO.view(*x.shape[:-1], weight.shape[0]), kept, kept_scale


@fake_of(fp8_forward)
def _(
    x: Tensor, weight: Tensor, ticket: Tensor, recipe: str, keeps: bool, part: int, parts: int
) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty(*x.shape[:-1], weight.shape[0])
    if not keeps:
        return y, *_nothing(x)
    shape = (x.numel() // x.shape[-1], x.shape[-1])
    layout = COLUMNS[recipe]
    kept_shape = layout.shape(shape)
    if parts > 1:
        rows, tokens, *rest = layout.parts_shape(x.shape)
        kept_shape = (rows, tokens // parts, *rest)
    kept = x.new_empty(kept_shape, dtype=layout.dtype("e4m3"))
    return y, kept, layout.empty_scale(x, "input", shape)


@operation("megaspec::fp8_forward_of")
def fp8_forward_of(rows: Tensor, scale: Tensor, weight: Tensor, ticket: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, I] in fp8, [O, I] -> x Wᵀ [M, O] in `dtype`. See note "Producers"."""
    layer = layer_of(ticket)
    return layer.product(
        Fp8Tensor(rows, scale), layer.weight(weight).rows, ("input", "weight"), along="rows", dtype=dtype
    )


@fake_of(fp8_forward_of)
def _(rows: Tensor, scale: Tensor, weight: Tensor, ticket: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0], dtype=dtype)


@operation("megaspec::fp8_tokens")
def fp8_tokens(
    x: Tensor, ticket: Tensor, recipe: str, gradient_format: str, is_gradient: bool
) -> tuple[Tensor, Tensor]:
    """A rank's tokens [B, T, K] of an input or of the gradient of an output, before others gather them -> in fp8 by the
    scales in rows: of the whole tensor [1, 1], or of each token [B, T, 1]. See note "Tokens"."""
    role = "gradient" if is_gradient else "input"
    rows = layer_of(ticket).quantise(x.flatten(0, -2), role, columns=False).rows
    scale = rows.scale
    if BLOCKS[recipe][role].rows != ALL:
        scale = scale.view(*x.shape[:-1], 1)
    return rows.values.view(x.shape), scale


@fake_of(fp8_tokens)
def _(x: Tensor, ticket: Tensor, recipe: str, gradient_format: str, is_gradient: bool) -> tuple[Tensor, Tensor]:
    role = "gradient" if is_gradient else "input"
    scale_shape = (1, 1)
    if BLOCKS[recipe][role].rows != ALL:
        scale_shape = (*x.shape[:-1], 1)
    values = x.new_empty(x.shape, dtype=FORMATS[gradient_format if is_gradient else "e4m3"])
    return values, x.new_empty(scale_shape, dtype=torch.promote_types(x.dtype, torch.float32))


@operation("megaspec::fp8_tokens_for_columns")
def fp8_tokens_for_columns(x: Tensor, ticket: Tensor) -> tuple[Tensor, Tensor]:
    """A rank's tokens [B, T, I] of an input -> in fp8 by the scales [I, 1] that features have over the tokens of all
    ranks, for `fp8_columns` once they are gathered: a recipe in which those are others than in rows."""
    layer = layer_of(ticket)
    whole = layer.for_columns(x.flatten(0, -2), None)
    return whole.values.view(x.shape), whole.scale.t().contiguous()


@fake_of(fp8_tokens_for_columns)
def _(x: Tensor, ticket: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape, dtype=FORMATS["e4m3"]), x.new_empty(x.shape[-1], 1, dtype=wide)


def columns_of_tokens(kept: Tensor, fp8: Fp8Use, n_in: int) -> Tensor:
    """The parts of an input that ranks have kept, put together -> in columns. `n_in`: its features."""
    layout = COLUMNS[fp8.recipe]
    if layout.is_turned:
        return fp8_columns(kept, fp8.ticket)
    return layout.joined(kept, n_in)


def carrier_of(like: Tensor, *shape: int) -> Tensor:
    """What stands for an input in fp8: of a shape, in the format and on the device of `like`, one number in memory."""
    return like.new_empty(1).expand(shape)


def slots_of(y_MO: Tensor, gradient_format: str) -> Fp8Slots:
    """What stands for an output, a number each in memory."""
    outputs = y_MO.shape[-1]
    tokens = y_MO.numel() // outputs
    one = y_MO.new_empty(1, dtype=FORMATS[gradient_format])
    scale = y_MO.new_empty(1, 1, dtype=torch.promote_types(y_MO.dtype, torch.float32))
    return Fp8Slots(one.expand(tokens, outputs), one.expand(outputs, tokens), scale)


@operation("megaspec::fp8_columns")
def fp8_columns(values_BTK: Tensor, ticket: Tensor) -> Tensor:
    """All tokens of a matrix in fp8 by a scale that columns have as well, [B, T, K] -> in columns [K, M]."""
    # as bytes: they are moved, not computed with
    values_MK = values_BTK.view(torch.uint8).flatten(0, -2).view(values_BTK.dtype)
    return layer_of(ticket).columns(values_MK)


@fake_of(fp8_columns)
def _(values_BTK: Tensor, ticket: Tensor) -> Tensor:
    K = values_BTK.shape[-1]
    return values_BTK.new_empty(K, values_BTK.numel() // K)


@operation("megaspec::fp8_backward")
def fp8_backward(
    grad_out: Tensor,
    weight: Tensor,
    ticket: Tensor,
    recipe: str,
    gradient_format: str,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """[..., O], [O, I] -> dy W [..., I], and the gradient in columns [O, M] with its scales; empty what is not
    needed."""
    layer = layer_of(ticket)
    grad_MO = grad_out.flatten(0, -2)
    pair = layer.quantise(grad_MO, "gradient", rows=needs_x, columns=needs_weight)
    grad_x = grad_out.new_empty(0)
    if needs_x:
        grad_x = layer.product(
            pair.rows,
            layer.weight(weight).columns,
            ("gradient", "weight"),
            along="rows columns",
            dtype=grad_out.dtype,
        ).view(*grad_out.shape[:-1], weight.shape[1])
    columns, scale = _nothing(grad_out)
    if needs_weight:
        columns, scale = pair.columns
    return grad_x, columns, scale


@fake_of(fp8_backward)
def _(
    grad_out: Tensor,
    weight: Tensor,
    ticket: Tensor,
    recipe: str,
    gradient_format: str,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x = grad_out.new_empty(0)
    if needs_x:
        grad_x = grad_out.new_empty(*grad_out.shape[:-1], weight.shape[1])
    if not needs_weight:
        return grad_x, *_nothing(grad_out)
    shape = (grad_out.numel() // grad_out.shape[-1], grad_out.shape[-1])
    layout = COLUMNS[recipe]
    columns = grad_out.new_empty(layout.shape(shape), dtype=layout.dtype(gradient_format))
    return grad_x, columns, layout.empty_scale(grad_out, "gradient", shape)


@operation("megaspec::fp8_backward_of")
def fp8_backward_of(rows: Tensor, scale: Tensor, weight: Tensor, ticket: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, O] in fp8, [O, I] -> dy W [M, I] in `dtype`. See note "Producers"."""
    layer = layer_of(ticket)
    return layer.product(
        Fp8Tensor(rows, scale),
        layer.weight(weight).columns,
        ("gradient", "weight"),
        along="rows columns",
        dtype=dtype,
    )


@fake_of(fp8_backward_of)
def _(rows: Tensor, scale: Tensor, weight: Tensor, ticket: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1], dtype=dtype)


@operation("megaspec::fp8_weight_gradient")
def fp8_weight_gradient(
    grad_OM: Tensor, grad_scale: Tensor, x_IM: Tensor, x_scale: Tensor, like: Tensor, ticket: Tensor
) -> Tensor:
    """Both in columns -> dyᵀ x, [O, I] in the format of `like`."""
    return weight_gradient_of(ticket, grad_OM, grad_scale, x_IM, x_scale, dtype=like.dtype)


@fake_of(fp8_weight_gradient)
def _(grad_OM: Tensor, grad_scale: Tensor, x_IM: Tensor, x_scale: Tensor, like: Tensor, ticket: Tensor) -> Tensor:
    return like.new_empty(like.shape)


def weight_gradient_of(
    ticket: Tensor,
    grad_OM: Tensor,
    grad_scale: Tensor,
    x_IM: Tensor,
    x_scale: Tensor,
    *,
    dtype: torch.dtype,
    into: Tensor | None = None,
    overwrite: bool = False,
) -> Tensor:
    """Both in columns -> dyᵀ x, [O, I]. `into`: see Fp8Linear.product."""
    return layer_of(ticket).product(
        Fp8Tensor(grad_OM, grad_scale),
        Fp8Tensor(x_IM, x_scale),
        ("gradient", "input"),
        along="columns",
        dtype=dtype,
        into=into,
        overwrite=overwrite,
    )


def _nothing(like: Tensor) -> tuple[Tensor, Tensor]:
    return like.new_empty(0, dtype=FORMATS["e4m3"]), like.new_empty(0, dtype=torch.float32)
