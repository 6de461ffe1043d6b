"""A model's facts where a part of its parameters is frozen: which gradients are made, and where no backward pass comes.

A parameter's gradient is made where it is trained. The gradient of what goes into an operation is made where something
before it is trained; sub-layers are walked through in the order in which they run.
"""

from dataclasses import dataclass, replace

from megaspec.core.part_facts import Linear, PartFacts, Table, Vector
from megaspec.nn.layer.facts import LayerFacts, SubLayer
from megaspec.nn.model_facts import ModelFacts


def with_frozen(facts: ModelFacts, names: frozenset[str]) -> ModelFacts:
    """The facts of the same model of which `names` are trained, by global name. Layers that are alike, what is trained
    in them and before them included, stay one object."""
    # tables may be tied: then the embedding's name speaks for both
    tied = facts.tied_names
    walk = _Walk(names, tied, is_reached=False)
    embedding = walk.part(facts.embedding, "")
    layers = []
    found: dict[tuple[object, ...], LayerFacts] = {}
    for number, layer in enumerate(facts.layers):
        prefix = f"layers.{number}."
        here = []
        for name in _names_in(layer):
            here.append(f"{prefix}{name}" in names)
        key = (layer, walk.is_reached, *here)
        if key not in found:
            found[key] = _layer(layer, prefix, _Walk(names, tied, walk.is_reached))
        layers.append(found[key])
        walk.is_reached = walk.is_reached or any(here)
    norm = walk.part(facts.norm, "")
    before_head = walk.is_reached
    head = walk.part(facts.head, "")
    return replace(
        facts, embedding=embedding, layers=tuple(layers), norm=norm, head=head, head_makes_input_gradient=before_head
    )


def _names_in(layer: LayerFacts) -> list[str]:
    """Names of a layer's parameters, from the layer on."""
    names = [vector.name for vector in layer.vectors if vector.is_trained]
    for linear in layer.linears:
        names.append(f"{linear.name}.weight")
        if linear.bias:
            names.append(f"{linear.name}.bias")
    return names


@dataclass
class _Walk:
    """Along a model, from the tokens on."""

    names: frozenset[str]
    tied: dict[str, str]
    is_reached: bool
    """Something is trained up to here, so that the backward pass comes here."""

    def part(self, part: PartFacts, prefix: str) -> PartFacts:
        """Its parameters, as they are trained."""
        runs_backward = self.is_reached
        tables = tuple(self._table(table, prefix) for table in part.tables)
        linears = []
        vectors = tuple(self._vector(vector, prefix) for vector in part.vectors)
        at_input = self.is_reached
        for number, linear in enumerate(part.linears):
            # experts take the tokens themselves: a router's scores come in behind their first product
            takes_input = number == 0 or (linear.tokens != part.linears[number - 1].tokens)
            linears.append(self._linear(linear, prefix, is_reached=at_input if takes_input else self.is_reached))
            if number == 0:
                # what is normed or added lies behind the first product
                self.is_reached = self.is_reached or any(one.is_trained and not one.is_frozen for one in vectors)
        self.is_reached = self.is_reached or any(one.is_trained and not one.is_frozen for one in vectors)
        self.is_reached = self.is_reached or not all(one.is_frozen for one in tables)
        routed = [linear for linear in linears if linear.tokens == "routed"]
        if linears:
            runs_backward = (routed or linears)[-1].makes_input_gradient
        return replace(part, tables=tables, linears=tuple(linears), vectors=vectors, runs_backward=runs_backward)

    def _table(self, table: Table, prefix: str) -> Table:
        weight = f"{prefix}{table.name}.weight"
        return replace(
            table,
            is_frozen=self.tied.get(weight, weight) not in self.names,
            is_bias_frozen=f"{prefix}{table.name}.bias" not in self.names,
        )

    def _vector(self, vector: Vector, prefix: str) -> Vector:
        return replace(vector, is_frozen=prefix + vector.name not in self.names)

    def _linear(self, linear: Linear, prefix: str, *, is_reached: bool) -> Linear:
        """`is_reached`: what goes into it has a gradient."""
        is_frozen = f"{prefix}{linear.name}.weight" not in self.names
        is_bias_frozen = not linear.bias or f"{prefix}{linear.name}.bias" not in self.names
        one = replace(linear, is_frozen=is_frozen, is_bias_frozen=is_bias_frozen, makes_input_gradient=is_reached)
        self.is_reached = self.is_reached or not is_frozen or not is_bias_frozen
        return one


def _layer(layer: LayerFacts, prefix: str, walk: _Walk) -> LayerFacts:
    """One layer."""
    at_input = walk.is_reached
    is_reached = at_input
    sublayers = []
    for sublayer in layer.sublayers:
        # side by side all take the layer's input, otherwise what the one before has left
        walk.is_reached = at_input if layer.is_parallel else is_reached
        sublayers.append(_sublayer(sublayer, prefix, walk))
        is_reached = is_reached or walk.is_reached
    return replace(layer, sublayers=tuple(sublayers), runs_backward=is_reached)


def _sublayer(sublayer: SubLayer, prefix: str, walk: _Walk) -> SubLayer:
    changed = {}
    if sublayer.pre is not None:
        changed["pre"] = walk.part(sublayer.pre, prefix)
    before = walk.is_reached
    changed["mix"] = walk.part(sublayer.mix, prefix)
    if sublayer.shared is not None:
        # beside the mixer, from the same input
        behind = walk.is_reached
        walk.is_reached = before
        changed["shared"] = walk.part(sublayer.shared, prefix)
        walk.is_reached = walk.is_reached or behind
    if sublayer.post is not None:
        changed["post"] = walk.part(sublayer.post, prefix)
    return replace(sublayer, **changed)
