"""A model's facts: those of its embedding, its layers and its ends, by global name."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import sqrt

from megaspec.core.part_facts import Linear, PartFacts, Table, Vector
from megaspec.core.placement import Row
from megaspec.core.weight_facts import WeightFacts
from megaspec.nn.layer.facts import LayerFacts


@dataclass(frozen=True)
class Matrix:
    """The rows [first, last) of a global two-dimensional parameter, [O, I]."""

    first: int
    last: int


@dataclass(frozen=True)
class InitialValues:
    """What parameters start from, by global name."""

    stds: dict[str, float]
    """Standard deviations of those that are drawn from a normal distribution around 0."""
    constants: dict[str, float]


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """A decoder: tokens, layers, the last norm, the output head."""

    d_model: int
    embedding: PartFacts
    layers: tuple[LayerFacts, ...]
    """Layers that are alike are the same object."""
    norm: PartFacts
    """The last one, before the head."""
    head: PartFacts
    is_tied: bool = False
    """The output head's table is the embedding's."""
    vocab_pad_to: int = 1
    """Each tensor-parallel rank's rows of the vocabulary are padded to a multiple of so many."""
    angles: int = 0
    """Rotary angles of a position, cosine and sine each counted; 0: no rotary positions."""
    head_makes_input_gradient: bool = True
    """Something before the output head is trained."""

    @cached_property
    def kinds(self) -> tuple[LayerFacts, ...]:
        """Layers that differ, each once, in the order in which they first come."""
        return tuple(dict.fromkeys(self.layers))

    def kinds_of(self, numbers: Iterable[int]) -> Counter[LayerFacts]:
        """Layers that differ, by how many of these numbers are of their kind."""
        return Counter(self.layers[number] for number in numbers)

    @cached_property
    def embedding_table(self) -> Table:
        return self.embedding.tables[0]

    @cached_property
    def head_table(self) -> Table:
        return self.head.tables[0]

    @cached_property
    def position_weights(self) -> int:
        """Of learned positions, which every tensor-parallel rank holds whole."""
        return sum(table.rows * table.width for table in self.embedding.tables if table.split == "sequence")

    @cached_property
    def norm_weights(self) -> int:
        """Of the last norm."""
        return sum(vector.size for vector in self.norm.vectors)

    @cached_property
    def trained_position_weights(self) -> int:
        """Of `position_weights`, what is trained."""
        tables = [table for table in self.embedding.tables if table.split == "sequence" and not table.is_frozen]
        return sum(table.rows * table.width for table in tables)

    @cached_property
    def trained_norm_weights(self) -> int:
        """Of `norm_weights`, what is trained."""
        return sum(vector.size for vector in self.norm.vectors if not vector.is_frozen)

    def padded_vocab(self, *, tp: int) -> int:
        """Rows of the output head over all tensor-parallel ranks, padding included."""
        multiple = self.vocab_pad_to * tp
        return -(-self.head_table.rows // multiple) * multiple

    def table_on(self, *, tp: int) -> int:
        """Numbers of the embedding's table, or of the output head's, on one rank, padding included."""
        return self.padded_vocab(tp=tp) // tp * self.d_model

    def head_bias_on(self, *, tp: int) -> int:
        """Numbers of the output head's bias on one rank, padding included."""
        if not self.head_table.bias:
            return 0
        return self.padded_vocab(tp=tp) // tp

    @cached_property
    def placement(self) -> tuple[Row, ...]:
        """How parameters may be split: one row for each module that has some or acts on each token."""
        rows = [*self.embedding.rows("")]
        for kind in self.kinds:
            rows += kind.rows("layers.*.")
        rows += [*self.norm.rows(""), *self.head.rows("")]
        return tuple(dict.fromkeys(rows))

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """Every linear layer by the global name of its module."""
        for number, layer in enumerate(self.layers):
            for linear in layer.linears:
                yield f"layers.{number}.{linear.name}", linear

    def vectors(self) -> Iterator[tuple[str, Vector]]:
        """Every vector by its global name."""
        for number, layer in enumerate(self.layers):
            for vector in layer.vectors:
                yield f"layers.{number}.{vector.name}", vector
        for vector in self.norm.vectors:
            yield vector.name, vector

    def tables(self) -> Iterator[Table]:
        """The embedding's, of tokens and positions, and the output head's, even where they are tied."""
        yield from self.embedding.tables
        yield from self.head.tables

    def initial_values(self, *, std: float) -> InitialValues:
        """Matrices and tables are drawn with `std`; what writes into the residual stream with less, by the root of how
        many do (Radford et al. 2019). Norms start at 1, biases at 0."""
        residuals = sum(len(layer.sublayers) for layer in self.layers)
        stds = {f"{table.name}.weight": std for table in self.tables()}
        constants = {name: vector.start for name, vector in self.vectors()}
        constants |= {f"{table.name}.bias": 0.0 for table in self.tables() if table.bias}
        for name, linear in self.linears():
            stds[f"{name}.weight"] = std
            if linear.is_residual:
                stds[f"{name}.weight"] = std / sqrt(residuals)
            if linear.bias:
                constants[f"{name}.bias"] = 0.0
        return InitialValues(stds, constants)

    def weights(self) -> dict[str, WeightFacts]:
        """What strategies have to know of each parameter; a tied output head's is the embedding's."""
        found = {}
        for table in self.embedding.tables:
            is_embedding = table is self.embedding_table
            is_tied = is_embedding and self.is_tied
            found[f"{table.name}.weight"] = WeightFacts(stands="embedding", is_table=True, is_tied=is_tied)
        for name, linear in self.linears():
            one = WeightFacts(layer=_layer_of(name), is_expert=linear.tokens == "routed")
            found[f"{name}.weight"] = one
            if linear.bias:
                found[f"{name}.bias"] = one
        last_norms = {vector.name for vector in self.norm.vectors}
        for name, vector in self.vectors():
            if not vector.is_trained:
                continue
            if name in last_norms:
                found[name] = WeightFacts(stands="last norm")
            else:
                found[name] = WeightFacts(layer=_layer_of(name))
        if not self.is_tied:
            found[f"{self.head_table.name}.weight"] = WeightFacts(stands="head")
        if self.head_table.bias:
            found[f"{self.head_table.name}.bias"] = WeightFacts(stands="head")
        return found

    @cached_property
    def tied_names(self) -> dict[str, str]:
        """Names under which a parameter of another name is found, too: the output head's, where it is the embedding."""
        if not self.is_tied:
            return {}
        return {f"{self.head_table.name}.weight": f"{self.embedding_table.name}.weight"}

    def matrices(self) -> dict[str, tuple[Matrix, ...]]:
        """The matrices of hidden layers, by the name of the parameter that they lie in, one below the other."""
        found = {}
        for name, linear in self.linears():
            if linear.is_hidden:
                sizes = [width.whole for width in linear.outputs] * linear.n_experts
                found[f"{name}.weight"] = consecutive(*sizes)
        return found


def consecutive(*sizes: int) -> tuple[Matrix, ...]:
    """Matrices that lie one below the other."""
    ends = accumulate(sizes)
    return tuple(Matrix(end - size, end) for size, end in zip(sizes, ends, strict=True))


def _layer_of(name: str) -> int:
    """The number in `layers.3.attn.wo`."""
    return int(name.split(".", 2)[1])
