"""Which weights of a run are read from which of a source's, by name. Pure: rules ask it before a run, ranks when they
start."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from megaspec.checkpoint.spec import InitSpec
from megaspec.nn.model_facts import ModelFacts

Shapes = Mapping[str, tuple[int, ...]]
"""By the name under which a checkpoint keeps a weight: `model/layers.0.attn.wo.weight`, `router/...` of routers."""


@dataclass
class InitialWeights:
    """By stored names, as in Shapes."""

    read: dict[str, str] = field(default_factory=dict)
    """Ours -> theirs."""
    missing: list[str] = field(default_factory=list)
    """Ours that are not read."""
    misfits: list[str] = field(default_factory=list)
    """Of those that are to be read, what is of another shape, in words."""
    idle: list[tuple[str, str]] = field(default_factory=list)
    """Settings, and what of them fits no weight of ours: (`include`, `layers.9.*`)."""


def weight_shapes(facts: ModelFacts) -> dict[str, tuple[int, ...]]:
    """The whole shape of each weight of a model, the vocabulary without padding."""
    shapes: dict[str, tuple[int, ...]] = {}
    for table in facts.tables():
        if not (facts.is_tied and table is facts.head_table):
            shapes[f"model/{table.name}.weight"] = (table.rows, table.width)
        if table.bias:
            shapes[f"model/{table.name}.bias"] = (table.rows,)
    for name, linear in facts.linears():
        rows = linear.n_experts * linear.columns
        shapes[f"model/{name}.weight"] = (rows, linear.inputs.whole)
        if linear.bias:
            shapes[f"model/{name}.bias"] = (rows,)
    for name, vector in facts.vectors():
        room = "model" if vector.is_trained else "router"
        shapes[f"{room}/{name}"] = (vector.size,)
    return shapes


def initial_weights(init: InitSpec, *, ours: Shapes, theirs: Shapes) -> InitialWeights:
    """What `init` says of the weights `ours` of a run and those of a source."""
    found = InitialWeights()
    fitting: set[str] = set()
    for stored, shape in ours.items():
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
        wanted = f"{room}/{source}"
        if not patterns or excluding or wanted not in theirs:
            found.missing.append(stored)
        elif theirs[wanted] != shape:
            found.misfits.append(f"{name} has shape {list(shape)}, there {list(theirs[wanted])}")
        else:
            found.read[stored] = wanted
    for key, words in (
        ("include", init.include),
        ("exclude", init.exclude),
        ("rename", [one.name for one in init.rename]),
    ):
        found.idle += [(key, word) for word in words if word not in fitting]
    return found
