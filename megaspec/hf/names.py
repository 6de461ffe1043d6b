"""From a family's names to the map of every tensor: a loop over the facts of the model's parts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from megaspec.core.errors import RecipeError
from megaspec.core.part_facts import Linear
from megaspec.hf.blocks import Block, TensorMap, TheirTensor, their_tensors
from megaspec.nn.model_facts import ModelFacts

_Name = TypeVar("_Name")


@dataclass(frozen=True)
class Matrix:
    """What a linear layer of ours is called there.

    `names`: one for each part of its outputs (query, key, value; gate, up), or one for all of them. `{e}` in a name
    stands for the number of an expert, each a tensor of its own; without it, experts are their leading dimension.
    """

    names: tuple[str, ...]
    transposed: bool = False
    """Stored as [inputs, outputs]."""
    alternate: int = 0
    """Where one name holds all parts: so many rows of each part in turn. 0: one whole part after the other."""
    within: tuple[tuple[int, tuple[int, ...]] | None, ...] = ()
    """Of each part: the rows of a group, and their places in it there (blocks.pairs_to_halves). Empty: none differs."""
    weight: str = ".weight"
    """Behind each name, for the weight."""
    bias: str = ".bias"


def matrix(*names: str) -> Matrix:
    """Stored as we store it: a tensor for each part, or one for all."""
    return Matrix(names)


@dataclass(frozen=True)
class Names:
    """A family's names of one model's tensors.

    Keys are our modules' names within a layer (`attn.wqkv`, `norm1`) or in the model (`embed`, `norm`).
    """

    layer: str
    """Before every name of a layer; `{n}` is its number: `model.layers.{n}.`"""
    matrices: Mapping[str, Matrix]
    vectors: Mapping[str, str]
    """Of modules, or of whole parameters where the last word differs."""
    ends: Mapping[str, str]
    """Of modules outside of layers: embed, positions, norm, head."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Patterns of tensors that are no parameters, each with the reason why nothing is lost without them."""


@dataclass(frozen=True)
class WeightTable:
    """Every tensor of a model, ours and theirs."""

    ours: Mapping[str, TensorMap]
    """By the name under which a checkpoint keeps it: `model/layers.0.attn.wqkv.weight`."""
    theirs: Mapping[str, TheirTensor]
    copies: Mapping[str, str]
    """Tensors of theirs that may be there as copies of others: a tied head, by its name and the embedding's."""
    ignored: Mapping[str, str]

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor of theirs is no parameter."""
        return self.why_ignored(name) is not None

    def why_ignored(self, name: str) -> str | None:
        """Why nothing is read of a tensor of theirs; None: it is a parameter, or nothing that the family knows."""
        for pattern, because in self.ignored.items():
            if re.fullmatch(pattern, name):
                return because
        return None


def weight_table(facts: ModelFacts, names: Names) -> WeightTable:
    """The map between a model's tensors and a family's. RecipeError: the family leaves one out."""
    maps: dict[str, TensorMap] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    copies = {}
    for table in facts.tables():
        if table.bias:
            bias = _named(names.ends, table.name, "ends") + ".bias"
            shape = (table.rows,)
            _add(maps, shapes, f"model/{table.name}.bias", shape, (Block(bias, table.rows),), {bias: shape})
        theirs = _named(names.ends, table.name, "ends") + ".weight"
        if facts.is_tied and table is facts.head_table:
            copies[theirs] = _named(names.ends, facts.embedding_table.name, "ends") + ".weight"
            continue
        shape = (table.rows, table.width)
        _add(maps, shapes, f"model/{table.name}.weight", shape, (Block(theirs, table.rows),), {theirs: shape})
    for name, linear in facts.linears():
        _add_linear(maps, shapes, name, linear, names)
    for name, vector in facts.vectors():
        theirs = _vector_name(name, names)
        stored = f"model/{name}" if vector.is_trained else f"router/{name}"
        shape = (vector.size,)
        _add(maps, shapes, stored, shape, (Block(theirs, vector.size),), {theirs: shape})
    return WeightTable(maps, their_tensors(maps, shapes), copies, names.ignored)


def _add(
    maps: dict[str, TensorMap],
    shapes: dict[str, tuple[int, ...]],
    stored: str,
    shape: tuple[int, ...],
    blocks: tuple[Block, ...],
    theirs: Mapping[str, tuple[int, ...]],
) -> None:
    maps[stored] = TensorMap(stored, shape, blocks)
    for name, their_shape in theirs.items():
        known = shapes.setdefault(name, their_shape)
        if known != their_shape:
            raise RecipeError(f"the names of the family give {name} two shapes, {list(known)} and {list(their_shape)}")


def _split_name(name: str) -> tuple[str, str]:
    """`layers.3.attn.wqkv` -> its layer's number and its name in the layer."""
    _, number, rest = name.split(".", 2)
    return number, rest


def _vector_name(name: str, names: Names) -> str:
    """Of a parameter: by its own name, or by its module's with the same last word."""
    prefix = ""
    local = name
    known = names.ends
    section = "ends"
    if name.startswith("layers."):
        number, local = _split_name(name)
        prefix = names.layer.format(n=number)
        known = names.vectors
        section = "vectors"
    if local in known:
        return prefix + known[local]
    module, _, last = local.rpartition(".")
    return f"{prefix}{_named(known, module, section)}.{last}"


def _named(names: Mapping[str, _Name], name: str, section: str) -> _Name:
    """What a family calls something of ours. RecipeError: it says nothing of it."""
    if name not in names:
        raise RecipeError(f"the names of the family say nothing of {name}, which this model has; add it to {section}")
    return names[name]


def _add_linear(
    maps: dict[str, TensorMap], shapes: dict[str, tuple[int, ...]], name: str, linear: Linear, names: Names
) -> None:
    number, local = _split_name(name)
    theirs = _named(names.matrices, local, "matrices")
    prefix = names.layer.format(n=number)
    rows = linear.n_experts * linear.columns
    columns = linear.inputs.whole
    found = _Linear(linear, theirs, prefix)
    weight = found.blocks(theirs.weight, transposed=theirs.transposed)
    shape = (rows, columns)
    _add(maps, shapes, f"model/{name}.weight", shape, weight, found.shapes(theirs.weight, columns))
    if linear.bias:
        bias = found.blocks(theirs.bias, transposed=False)
        _add(maps, shapes, f"model/{name}.bias", (rows,), bias, found.shapes(theirs.bias, None))


@dataclass(frozen=True)
class _Linear:
    """One linear layer and its names."""

    linear: Linear
    theirs: Matrix
    prefix: str

    @property
    def _parts(self) -> list[int]:
        """Rows of each part, of one expert."""
        return [width.whole for width in self.linear.outputs]

    @property
    def _is_per_expert(self) -> bool:
        return "{e}" in self.theirs.names[0]

    def _name(self, part: int, expert: int, suffix: str) -> str:
        names = self.theirs.names
        template = names[0] if len(names) == 1 else names[part]
        return self.prefix + template.replace("{e}", str(expert)) + suffix

    def blocks(self, suffix: str, *, transposed: bool) -> tuple[Block, ...]:
        """Expert by expert, part by part."""
        blocks = []
        in_one = len(self.theirs.names) == 1
        has_experts = self.linear.n_experts > 1
        for expert in range(self.linear.n_experts):
            first = 0
            for part, rows in enumerate(self._parts):
                block = Block(
                    self._name(part, expert, suffix),
                    rows,
                    expert=expert if has_experts and not self._is_per_expert else None,
                    transposed=transposed,
                    **self._order(part, first),
                )
                blocks.append(block)
                if in_one:
                    first += rows
        return tuple(blocks)

    def _order(self, part: int, first: int) -> dict[str, int | tuple[int, ...] | None]:
        """Where the rows of a part lie in the tensor that holds them."""
        alternate = self.theirs.alternate
        if alternate:
            assert len(self.theirs.names) == 1, "parts that alternate lie in one tensor"
            return {"first": part * alternate, "group": alternate, "stride": len(self._parts) * alternate}
        within = self.theirs.within[part] if self.theirs.within else None
        if within is None:
            return {"first": first}
        group, places = within
        return {"first": first, "group": group, "within": places}

    def shapes(self, suffix: str, columns: int | None) -> dict[str, tuple[int, ...]]:
        """Of every tensor of theirs. `columns`: inputs; None: it is a bias."""
        rows_of: dict[str, int] = {}
        for expert in range(self.linear.n_experts if self._is_per_expert else 1):
            for part, rows in enumerate(self._parts):
                name = self._name(part, expert, suffix)
                rows_of[name] = rows_of.get(name, 0) + rows
        lead = () if self._is_per_expert or self.linear.n_experts == 1 else (self.linear.n_experts,)
        found = {}
        for name, rows in rows_of.items():
            if columns is None:
                found[name] = (*lead, rows)
            elif self.theirs.transposed:
                found[name] = (*lead, columns, rows)
            else:
                found[name] = (*lead, rows, columns)
        return found
