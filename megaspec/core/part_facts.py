"""What a part of a model says of itself: torch-free records that parameter counts, FLOPs, memory, times, placement,
initial values and Muon's matrices are all counted from.

A part's facts.py yields them for its spec; the model puts them together (megaspec/model/). Nobody else knows a part.
Sizes are those of the whole model. A `Width` says how ranks share it, and the estimate works out what one rank has.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from megaspec.core.placement import Kind, Row

Tokens = Literal["all", "stream", "routed"]
"""Whose tokens an activation is of. all: every token of a rank's micro batch, as matrix products take them. stream:
those between matrix products, which sequence parallelism splits over tp. routed: the rows that experts take."""

Element = Literal["model", "wide", "product", "statistic", "byte", "index"]
"""What an activation is kept in. model: the model's format. wide: at least fp32. product: what matrix products take,
one byte under fp8. statistic: fp32, a row's sum. byte: a mask. index: int64."""

Purpose = Literal["embedding", "positions", "attention", "mlp", "experts", "shared_experts", "router", "norms", "head"]
"""What parameters are counted under."""


@dataclass(frozen=True)
class Degrees:
    """Ranks that divide a layer's matrices."""

    tp: int = 1
    ep: int = 1
    etp: int = 1


@dataclass(frozen=True)
class Width:
    """Columns of a matrix, or features of a token: `count` pieces of `size`, of which a rank holds whole ones."""

    count: int
    size: int = 1
    over: Literal["none", "tp", "etp"] = "none"
    """The ranks that share the pieces. With fewer pieces than ranks, several hold the same piece."""

    @property
    def whole(self) -> int:
        """On one device."""
        return self.count * self.size

    def on(self, degrees: Degrees) -> int:
        """On the rank that has most."""
        if self.over == "none":
            return self.whole
        ranks = degrees.tp if self.over == "tp" else degrees.etp
        return ceil(self.count / ranks) * self.size


def features(width: int, over: Literal["none", "tp", "etp"] = "none") -> Width:
    """So many features, each of which a rank may hold."""
    return Width(width, 1, over)


@dataclass(frozen=True)
class Linear:
    """y = x Wᵀ + b, or as many of them as there are experts, one below the other in W."""

    name: str
    """Of the module, from the layer on: `attn.wqkv`."""
    inputs: Width
    outputs: tuple[Width, ...]
    """Computed together (query, key, value; gate, up); each is initialised and split on its own."""
    purpose: Purpose
    tokens: Tokens = "all"
    bias: bool = False
    is_residual: bool = False
    """It writes into the residual stream, and starts smaller."""
    n_experts: int = 1
    active_experts: int = 1
    """Of `n_experts`, those that one token takes."""
    recomputed_with: str = "projections"
    """What of parallelism.recompute.parts its product belongs to; `projections` is never recomputed alone."""
    in_fp32: bool = False
    """Computed in at least fp32, whatever the model's format."""
    in_flops: bool = True
    """False: left out of FLOPs, as Megatron-LM does with the router's."""
    in_time: bool = True
    """False: too narrow to count among matrix products."""
    is_hidden: bool = True
    """Muon orthogonalises it: it is neither an embedding, an output head nor a router."""
    input_kept: str = ""
    """The `Kept.what` of the tensor that it keeps as its input."""
    input_by: str = ""
    """Of kernels/: the operation that makes its input and may write it in fp8; empty: none can."""
    gradient_by: str = ""
    """The one that makes its output's gradient and may write that."""
    dense_name: str = ""
    """Of experts: what the same product is called in a layer that has a feed-forward layer in their place."""
    is_frozen: bool = False
    """Its weight has no gradient."""
    is_bias_frozen: bool = False
    makes_input_gradient: bool = True
    """Something before it is trained."""

    @property
    def takes_fp8(self) -> bool:
        """Its products take fp8 where its layer does: it is neither a router's, nor so narrow as a gate, nor one of
        experts that every token takes."""
        return self.in_time and not self.in_fp32 and self.purpose in ("attention", "mlp", "experts")

    @property
    def columns(self) -> int:
        """Outputs of one of its matrices on one device."""
        return sum(width.whole for width in self.outputs)

    @property
    def split(self) -> Kind:
        """How tensor or expert parallelism splits it."""
        by_columns = any(width.over != "none" for width in self.outputs)
        by_rows = self.inputs.over != "none"
        if self.tokens == "routed":
            return "expert_columns" if by_columns else "expert_rows"
        if by_columns:
            return "columns"
        return "rows" if by_rows else "sequence"

    @property
    def heads_per_part(self) -> tuple[int, ...] | None:
        """How many heads each part of the outputs holds; None: its outputs are no heads."""
        if all(width.size == 1 for width in self.outputs):
            return None
        return tuple(width.count for width in self.outputs)

    def matrices_on(self, degrees: Degrees) -> int:
        """Its matrices on the rank that has most."""
        return ceil(self.n_experts / degrees.ep)

    def weights_on(self, degrees: Degrees) -> int:
        """Numbers of the weight on a rank, biases left out."""
        columns = sum(width.on(degrees) for width in self.outputs)
        return self.matrices_on(degrees) * self.inputs.on(degrees) * columns

    def biases_on(self, degrees: Degrees) -> int:
        """Numbers of the bias on a rank."""
        if not self.bias:
            return 0
        return self.matrices_on(degrees) * sum(width.on(degrees) for width in self.outputs)


@dataclass(frozen=True)
class Vector:
    """A parameter that acts on each token or head alone: a norm's weight. Every rank holds it whole, unless it is
    `split`."""

    name: str
    """Of the parameter, from the layer on: `norm1.weight`."""
    size: int
    start: float = 1.0
    """Its initial value."""
    purpose: Purpose = "norms"
    acts_on: Literal["tokens", "heads"] = "tokens"
    """heads: each tensor-parallel rank sees a part of the heads, and has a part of the gradient."""
    by_heads: Width | None = None
    """It has numbers for each head, and a rank those of its own heads. None: every rank holds all of it."""
    is_trained: bool = True
    """False: a buffer that a step moves without a gradient."""
    in_flops: bool = False
    """Megatron-LM counts it as a matrix of so many weights."""
    is_frozen: bool = False
    """It has no gradient, and does not move."""

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    def on(self, degrees: Degrees) -> int:
        """Numbers on the rank that has most."""
        if self.by_heads is None:
            return self.size
        return self.by_heads.on(degrees)


@dataclass(frozen=True)
class Weight:
    """One parameter of a linear layer, or a vector."""

    name: str
    """From the layer on: `attn.wqkv.weight`."""
    of: Linear | Vector
    is_bias: bool = False
    """The linear layer's."""

    @property
    def is_frozen(self) -> bool:
        if self.is_bias:
            return self.of.is_bias_frozen
        return self.of.is_frozen

    @property
    def is_matrix(self) -> bool:
        """A linear layer multiplies by it."""
        return isinstance(self.of, Linear) and not self.is_bias

    @property
    def is_expert(self) -> bool:
        return isinstance(self.of, Linear) and self.of.tokens == "routed"

    def shape_on(self, degrees: Degrees) -> tuple[int, ...]:
        """On the rank that has most. Experts' matrices lie one below the other."""
        if isinstance(self.of, Vector):
            return (self.of.on(degrees),)
        rows = self.of.matrices_on(degrees) * sum(width.on(degrees) for width in self.of.outputs)
        if self.is_bias:
            return (rows,)
        return rows, self.of.inputs.on(degrees)


@dataclass(frozen=True)
class Table:
    """Rows by token id or by position: [rows, width]."""

    name: str
    """Of the module, in the model: `embed`."""
    rows: int
    width: int
    purpose: Purpose
    split: Literal["vocab", "sequence"] = "vocab"
    """vocab: its rows are padded and shared out over tp. sequence: every rank holds it whole."""
    bias: bool = False
    """A number for each row is added to what is computed with it, and lies where the row does."""
    is_frozen: bool = False
    """It has no gradient; its bias may have one."""
    is_bias_frozen: bool = False

    @property
    def size(self) -> int:
        """Numbers of it, the bias with them."""
        return self.rows * (self.width + self.bias)


@dataclass(frozen=True)
class Sight:
    """Which of the keys at and before it a query sees."""

    window: int | None = None
    """So many, itself the last. None: all."""
    chunk: int | None = None
    """Those in its own chunk, of so many tokens. None: all."""

    def hides_keys(self, tokens: int) -> bool:
        """Some query of a sequence of `tokens` doesn't see all of its past."""
        return self.twice_the_pairs(tokens) < tokens**2

    def twice_the_pairs(self, tokens: float) -> float:
        """Pairs of a query and a key that it sees in a sequence of `tokens`, times two, where a query with itself is
        half of a pair: the square for all of the past, since Megatron-LM counts causal attention as half of it."""
        if self.window is not None and self.window < tokens:
            # without the two triangles of those that are too far away
            return tokens**2 - (tokens - self.window) ** 2
        if self.chunk is not None and self.chunk < tokens:
            chunks, rest = divmod(tokens, self.chunk)
            return chunks * self.chunk**2 + rest**2
        return tokens**2

    def sum_of_twice_the_pairs(self, most: float) -> float:
        """The sum of `twice_the_pairs` over sequences of 1, 2, ... `most` tokens; a polynomial between them."""
        if self.window is not None and self.window < most:
            window = self.window
            # n² up to the window, 2 n w - w² behind it
            behind = window * (most * (most + 1) - window * (window + 1)) - window**2 * (most - window)
            return _sum_of_squares(window) + behind
        if self.chunk is not None and self.chunk < most:
            chunk = self.chunk
            chunks, rest = divmod(most, chunk)
            # k whole chunks and r tokens: k c² + r², for all r of all whole chunks, and for the last one up to `rest`
            whole = chunk**3 * chunks * (chunks - 1) / 2 + chunks * _sum_of_squares(chunk - 1)
            return whole + (rest + 1) * chunks * chunk**2 + _sum_of_squares(rest)
        return _sum_of_squares(most)


def _sum_of_squares(most: float) -> float:
    """1 + 4 + 9 + ... + most²"""
    return most * (most + 1) * (2 * most + 1) / 6


ALL_OF_THE_PAST = Sight()


@dataclass(frozen=True)
class AttentionProducts:
    """softmax(q kᵀ) v over what each query sees, of every query head."""

    n_heads: int
    n_kv_heads: int
    d_key: int
    """Size of a query or key head."""
    d_value: int
    """Size of a value head."""
    rotated: int = 0
    """Features of a query head that rotary positions turn; of a key head as many."""
    makes_latents: bool = False
    """Keys and values are made from a latent, by products that `mla_up` recomputes."""
    sums_heads: bool = False
    """Queries, and keys, are normed over all heads of a token: ranks that share heads add up two numbers a token."""
    sight: Sight = ALL_OF_THE_PAST
    caps_scores: bool = False
    """Scores go through a tanh."""
    has_sinks: bool = False
    """Each head has a logit besides its scores."""

    def is_in(self, layers: Literal["never", "hidden", "always"], *, seq_len: int) -> bool:
        """Whether it is one of those that Execution names: none, where it hides keys or caps scores, or all."""
        if layers == "hidden":
            return self.sight.hides_keys(seq_len) or self.caps_scores
        return layers == "always"

    @property
    def queries(self) -> Width:
        return Width(self.n_heads, self.d_key, "tp")

    @property
    def keys(self) -> Width:
        return Width(self.n_kv_heads, self.d_key, "tp")

    @property
    def values(self) -> Width:
        return Width(self.n_kv_heads, self.d_value, "tp")

    @property
    def outputs(self) -> Width:
        return Width(self.n_heads, self.d_value, "tp")


Exchange = Literal["scores", "choices", "choice weights", "loads"]
"""What routers of ranks that share sequences tell each other: all scores; whom each token chose, and with what weight;
how often each expert was chosen."""


@dataclass(frozen=True)
class Routing:
    """Tokens that are sent to experts and come back."""

    n_experts: int
    top_k: int
    d_model: int
    rows: Callable[[int, int], int]
    """(a rank's tokens, tokens of the micro batch) -> rows that its choices make, spread evenly."""
    exchanges: frozenset[Exchange] = frozenset()
    has_shared: bool = False
    """Some experts are taken by every token."""
    gates_shared: bool = False
    """Their output is weighed, and kept for that."""
    expert_width: Width = Width(1)
    """Features between an expert's products."""


@dataclass(frozen=True)
class Execution:
    """How a layer runs: what decides which tensors it keeps."""

    is_compiled: bool = False
    """Block by block. Otherwise each operation keeps and moves its own tensors."""
    keeps_scores: bool = False
    """Attention is written out as plain operations."""
    copies_values: Literal["never", "hidden", "always"] = "never"
    """Attention takes queries, keys and values that lie by themselves, so that nothing keeps the product that they are
    views of: not at all, in layers where it hides keys or caps scores, or in all."""
    keeps_without_sinks: Literal["never", "hidden", "always"] = "never"
    """Attention's output is kept as it was before sinks scaled it, too: in the same layers."""
    swaps_heads: bool = False
    """Ranks of a sequence swap tokens for heads and back, so that attention's output is kept in both orders."""
    seq_len: int = 0
    """Tokens of a sequence, which say whether a window hides keys."""
    recomputed: frozenset[str] = frozenset()
    """Parts that the backward pass computes again."""
    fused: frozenset[str] = frozenset()
    """Operations of kernels/ that run as kernels of their own, compiled or not, which keep what they take alone."""


@dataclass(frozen=True)
class Kept:
    """A tensor that waits for the backward pass."""

    what: str
    features: tuple[Width, ...]
    """Of a token."""
    tokens: Tokens = "all"
    element: Element = "model"
    freed_by: tuple[str, ...] = ()
    """Parts whose recomputation makes it again."""
    is_routed: bool = False
    """Tokens on their way to experts or back."""
    times: int = 1
    """How many there are of it."""
    for_weights: bool = False
    """Nothing but the weight gradients of the products that it goes into needs it."""
    of_vector: str = ""
    """The module whose own vector's gradient is made of it, too; empty: none is."""


@dataclass(frozen=True)
class Moved:
    """Features of a token that operations between matrix products read or write."""

    part: str
    """What of parallelism.recompute.parts they belong to."""
    forward: tuple[tuple[float, Width], ...]
    """Times, features."""
    backward: tuple[tuple[float, Width], ...]
    tokens: Tokens = "all"
    is_fused: bool = False
    """One kernel whether or not the layer is compiled; other operations cost three times as much uncompiled."""
    operation: str = ""
    """Of kernels/: where that has a kernel of its own, it moves what `of_kernel` says."""
    of_kernel: "Moved | None" = None


def _keeps_nothing(execution: Execution) -> Iterable[Kept]:
    return ()


@dataclass(frozen=True)
class PartFacts:
    """One part of a layer, or of a model's ends. Names are within the layer, or the model."""

    linears: tuple[Linear, ...] = ()
    vectors: tuple[Vector, ...] = ()
    tables: tuple[Table, ...] = ()
    sites: tuple[str, ...] = ()
    """Modules without parameters that act on each token: dropout."""
    head_sums: tuple[Row, ...] = ()
    """Placement of modules that add up numbers over heads."""
    attention: AttentionProducts | None = None
    routing: Routing | None = None
    kept: Callable[[Execution], Iterable[Kept]] = _keeps_nothing
    moved: tuple[Moved, ...] = ()
    gradient: tuple[Width, ...] = ()
    """The largest gradient of an activation that its backward pass holds at once, as features of a token."""
    runs_backward: bool = True
    """Something before its last operation is trained, so that the backward pass goes through those before that."""

    @property
    def weights(self) -> Iterator[Weight]:
        """Those of its linear layers and its vectors that are parameters, in the order of the modules: a module's own
        come before those of modules in it, and norms inside of a mixer behind its linear layers."""
        around = {linear.name.rpartition(".")[0] for linear in self.linears}
        vectors = [vector for vector in self.vectors if vector.is_trained]
        for vector in vectors:
            if vector.module in around:
                yield Weight(vector.name, vector)
        for linear in self.linears:
            yield Weight(f"{linear.name}.weight", linear)
            if linear.bias:
                yield Weight(f"{linear.name}.bias", linear, is_bias=True)
        for vector in vectors:
            if vector.module not in around:
                yield Weight(vector.name, vector)

    def rows(self, prefix: str) -> Iterator[Row]:
        """Its placement; `prefix` stands before each module's name: `layers.*.`."""
        for table in self.tables:
            yield Row(prefix + table.name, table.split)
        for linear in self.linears:
            yield Row(prefix + linear.name, linear.split, linear.heads_per_part)
        modules: dict[str, Kind] = dict.fromkeys(self.sites, "sequence")
        covered = {linear.name for linear in self.linears}
        for vector in self.vectors:
            if vector.by_heads is not None:
                yield Row(prefix + vector.module, "head_vector", (vector.by_heads.count,))
            elif vector.module not in covered:
                modules[vector.module] = "heads" if vector.acts_on == "heads" else "sequence"
        for name, kind in modules.items():
            yield Row(prefix + name, kind)
        for row in self.head_sums:
            yield replace(row, pattern=prefix + row.pattern)
