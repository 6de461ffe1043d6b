"""Which weights of a run are read from which of a source's, by name and row. Pure: rules ask it before a run, ranks
when they start.

Note on rows. Whatever `init` makes of a source's weights, a weight of ours is rows of one of theirs: all of them, those
of a vocabulary that both have, or for each expert those of one feed-forward layer. So there is one list of spans for
all of it, and one reader (runtime/source_weights.py). Rows that no span gives are new.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from megaspec.checkpoint.spec import InitSpec
from megaspec.core.part_facts import Linear
from megaspec.nn.model_facts import ModelFacts

Shapes = Mapping[str, tuple[int, ...]]
"""By the name under which a checkpoint keeps a weight: `model/layers.0.attn.wo.weight`, `router/...` of routers."""


@dataclass(frozen=True)
class Span:
    """Rows of a weight of ours that are rows of one of theirs, in the same order."""

    begin: int
    """The first in ours."""
    count: int
    source_begin: int = 0
    """The first in theirs."""


@dataclass(frozen=True)
class Reading:
    """One weight of ours."""

    source: str
    """The weight of theirs, by its stored name."""
    shape: tuple[int, ...]
    """Of ours, whole."""
    spans: tuple[Span, ...]
    """By their place in ours, apart."""

    @property
    def taken(self) -> int:
        """Rows of ours that are read."""
        return sum(span.count for span in self.spans)

    @property
    def new(self) -> int:
        """Rows of ours that are not."""
        return self.shape[0] - self.taken


@dataclass
class InitialWeights:
    """By stored names, as in Shapes."""

    read: dict[str, Reading] = field(default_factory=dict)
    """Ours that are read, all rows or some."""
    drawn: list[str] = field(default_factory=list)
    """Ours that no source of its kind could have: routers, where experts are copies."""
    missing: list[str] = field(default_factory=list)
    """Others of ours that are not read."""
    misfits: list[str] = field(default_factory=list)
    """Of those that are to be read, what is of another shape, in words."""
    idle: list[tuple[str, str]] = field(default_factory=list)
    """Settings, and what of them fits no weight of ours: (`include`, `layers.9.*`)."""


@dataclass(frozen=True)
class _Weight:
    """One of ours."""

    name: str
    shape: tuple[int, ...]
    is_vocabulary: bool = False
    """A row for each token."""
    linear: Linear | None = None
    is_of_router: bool = False


def weight_shapes(facts: ModelFacts) -> dict[str, tuple[int, ...]]:
    """The whole shape of each weight of a model, the vocabulary without padding."""
    return {stored: weight.shape for stored, weight in _weights(facts).items()}


def initial_weights(init: InitSpec, facts: ModelFacts, *, theirs: Shapes) -> InitialWeights:
    """What `init` says of the weights of a run's model and of those of a source."""
    found = InitialWeights()
    fitting: set[str] = set()
    is_upcycled = init.upcycle != "none"
    for stored, weight in _weights(facts).items():
        room, _, name = stored.partition("/")
        patterns = [one for one in init.include if fnmatchcase(name, one)]
        excluding = [one for one in init.exclude if fnmatchcase(name, one)]
        fitting.update(patterns, excluding)
        source = name
        for renaming in init.rename:
            if name.startswith(renaming.name):
                fitting.add(renaming.name)
                source = renaming.source + name.removeprefix(renaming.name)
                break
        if is_upcycled and weight.linear is not None and weight.linear.dense_name:
            source = _dense(source, weight.linear)
        wanted = f"{room}/{source}"
        is_asked_for = patterns and not excluding
        if is_upcycled and weight.is_of_router:
            found.drawn.append(stored)
        elif not is_asked_for or wanted not in theirs:
            found.missing.append(stored)
        else:
            spans = _spans(init, weight, theirs[wanted])
            if spans is None:
                found.misfits.append(f"{name} has shape {list(weight.shape)}, there {list(theirs[wanted])}")
            else:
                found.read[stored] = Reading(wanted, weight.shape, spans)
    for key, words in (
        ("include", init.include),
        ("exclude", init.exclude),
        ("rename", [one.name for one in init.rename]),
    ):
        found.idle += [(key, word) for word in words if word not in fitting]
    return found


def _spans(init: InitSpec, weight: _Weight, theirs: tuple[int, ...]) -> tuple[Span, ...] | None:
    """Which rows of a weight of ours are which of one of theirs; None: the shapes don't fit."""
    ours = weight.shape
    if len(ours) != len(theirs) or ours[1:] != theirs[1:]:
        return None
    if init.upcycle == "copies" and weight.linear is not None and weight.linear.dense_name:
        rows = weight.linear.columns
        if theirs[0] != rows:
            return None
        return tuple(Span(expert * rows, rows) for expert in range(weight.linear.n_experts))
    if ours[0] == theirs[0]:
        return (Span(0, ours[0]),)
    if init.vocab == "resize" and weight.is_vocabulary:
        return (Span(0, min(ours[0], theirs[0])),)
    return None


def _dense(name: str, linear: Linear) -> str:
    """`layers.3.moe.experts.w_down.weight` -> the same product's name in a layer without experts."""
    module, _, last = name.rpartition(".")
    if not module.endswith(linear.name):
        # renamed by the user to what it is called there
        return name
    return f"{module.removesuffix(linear.name)}{linear.dense_name}.{last}"


def _weights(facts: ModelFacts) -> dict[str, _Weight]:
    """Each weight of a model by its stored name."""
    found: dict[str, _Weight] = {}

    def add(weight: _Weight, room: str = "model") -> None:
        found[f"{room}/{weight.name}"] = weight

    for table in facts.tables():
        is_vocabulary = table.split == "vocab"
        if not (facts.is_tied and table is facts.head_table):
            add(_Weight(f"{table.name}.weight", (table.rows, table.width), is_vocabulary))
        if table.bias:
            add(_Weight(f"{table.name}.bias", (table.rows,), is_vocabulary))
    for name, linear in facts.linears():
        rows = linear.n_experts * linear.columns
        is_of_router = linear.purpose == "router"
        add(_Weight(f"{name}.weight", (rows, linear.inputs.whole), linear=linear, is_of_router=is_of_router))
        if linear.bias:
            add(_Weight(f"{name}.bias", (rows,), linear=linear, is_of_router=is_of_router))
    for name, vector in facts.vectors():
        room = "model" if vector.is_trained else "router"
        add(_Weight(name, (vector.size,), is_of_router=vector.purpose == "router"), room)
    return found
