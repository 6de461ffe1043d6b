"""`--plugin PACKAGE`: the language with the kinds of a package. Torch-free; runtime/plugins.py has the builders.

A package offers PLUGIN, a `Plugin`. Its specs join the kinds that a Recipe chooses among before one is composed; each
names its builder as "module:name", which only ranks import. Only a command line names a package: no recipe and no run
folder ever makes anything be imported.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from megaspec.core.errors import COMMAND_LINE, Problem, RecipeError
from megaspec.core.frozen import Frozen
from megaspec.core.kinds import Kinds, tags_of
from megaspec.data.spec import SOURCE_KINDS, DataSpec
from megaspec.log.spec import SINK_KINDS
from megaspec.model.decoder.spec import ATTENTION_KINDS, POSITIONS_KINDS, DecoderSpec
from megaspec.nn.attention.spec import AttentionSpec
from megaspec.nn.embedding.spec import PositionsSpec
from megaspec.nn.mlp.spec import MLP_KINDS, MlpSpec
from megaspec.nn.norm.spec import NORM_KINDS, NormSpec
from megaspec.optim.spec import OPTIMIZER_KINDS, AdamWSpec, SgdSpec
from megaspec.recipe import MODEL_KINDS
from megaspec.train.spec import LOSS_KINDS

NAME = "PLUGIN"
_FLAG = "--plugin"
_BUILDER = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Kind:
    """One kind that a plug-in adds."""

    spec: type[Frozen]
    """Its settings; `kind: Literal["..."]` chooses it."""
    build: str
    """`module:name` of what is called with the settings; see the fields of Plugin."""


@dataclass(frozen=True)
class Plugin:
    """What a package adds. Specs inherit from ours, which say what a plan asks of them."""

    models: tuple[Kind, ...] = ()
    """`model.kind`, from DecoderSpec. Built by `(spec, kernels, part builders) -> Decoder`."""
    norms: tuple[Kind, ...] = ()
    """`model.norm.kind`, from NormSpec. Built by `(width, spec) -> Norm`."""
    mlps: tuple[Kind, ...] = ()
    """`model.mlp.kind`, from MlpSpec. Built by `(d_model, d_ffn, spec, *, out) -> FeedForward`."""
    attentions: tuple[Kind, ...] = ()
    """`model.attention.kind`, from AttentionSpec. Built by `(spec, AttentionSetting) -> Attention`."""
    positions: tuple[Kind, ...] = ()
    """`model.positions.kind`, from PositionsSpec. Built by `(spec, *, d_model, d_head, max_seq_len) ->
    PositionModules`."""
    sources: tuple[Kind, ...] = ()
    """`data.kind`, from DataSpec and with `vocab_size`. Built by `(spec, *, split, seed, segments, vocab_size) ->
    Source`."""
    optimizers: tuple[Kind, ...] = ()
    """`optim.kind`, from AdamWSpec or SgdSpec. Built by `(parameters, spec) -> MasterOptimizer`."""
    losses: tuple[Kind, ...] = ()
    """`train.loss`, in place of cross-entropy. Built by `(spec) -> kernel`, a CrossEntropyKernel."""
    sinks: tuple[Kind, ...] = ()
    """Entries of `log.sinks`. Built by `(spec, run_dir, step) -> Sink`."""


@dataclass(frozen=True)
class _Place:
    """Where a recipe chooses among kinds, and what one has to be that is added there."""

    key: str
    kinds: Kinds
    bases: tuple[type[Frozen], ...]
    needs: tuple[str, ...] = ()
    """Fields that a spec has to have."""
    says: tuple[str, ...] = ()
    """What a spec has to say of itself, which its base leaves open."""


_PLACES = {
    "models": _Place("model", MODEL_KINDS, (DecoderSpec,)),
    "norms": _Place("model.norm", NORM_KINDS, (NormSpec,), says=("statistics", "vectors", "wide_copies")),
    "mlps": _Place("model.mlp", MLP_KINDS, (MlpSpec,), says=("facts",)),
    "attentions": _Place("model.attention", ATTENTION_KINDS, (AttentionSpec,), says=("facts",)),
    "positions": _Place("model.positions", POSITIONS_KINDS, (PositionsSpec,)),
    "sources": _Place("data", SOURCE_KINDS, (DataSpec,), ("seq_len", "vocab_size")),
    "optimizers": _Place("optim", OPTIMIZER_KINDS, (AdamWSpec, SgdSpec)),
    "losses": _Place("train.loss", LOSS_KINDS, (Frozen,)),
    "sinks": _Place("log.sinks", SINK_KINDS, (Frozen,)),
}


@dataclass
class _Loaded:
    """What this process has taken in."""

    names: list[str] = field(default_factory=list)
    kinds: dict[str, list[Kind]] = field(default_factory=lambda: {place: [] for place in _PLACES})


_LOADED = _Loaded()


def loaded() -> tuple[str, ...]:
    """Import names of the plugins of this process, sorted."""
    return tuple(sorted(_LOADED.names))


def plugin_flags() -> list[str]:
    """What a command line of another process needs to load the same, where it searches the same folders."""
    return [f"{_FLAG}={name}" for name in loaded()]


def added_kinds(place: str) -> tuple[Kind, ...]:
    """What plugins have added to one of the fields of Plugin."""
    return tuple(_LOADED.kinds[place])


def take_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The packages that `--plugin` names, wherever it stands before `--`, and the other words. Raises RecipeError."""
    names, rest = [], list(arguments)
    end = rest.index("--") if "--" in rest else len(rest)
    position = 0
    while position < end:
        word, equals, value = rest[position].partition("=")
        if word != _FLAG:
            position += 1
            continue
        count = 1 if equals else 2
        value = value if equals else next(iter(rest[position + 1 : end]), "")
        if not value or value.startswith("-"):
            raise RecipeError(f"{_FLAG}: its package is missing; give an import name, or a folder such as ./my_plugin")
        names.append(value)
        del rest[position : position + count]
        end -= count
    return names, rest


def load(packages: Sequence[str]) -> None:
    """Adds plugins to the language. A package is an import name, or the path of a folder or file of Python.

    One that is loaded already is passed over. RecipeError: what is wrong with one, all at once; nothing is added then.
    """
    for package in packages:
        name = _import_name(package)
        if name in _LOADED.names:
            continue
        plugin = getattr(_imported(name, package), NAME, None)
        problems = _problems(plugin)
        if problems:
            raise RecipeError([Problem("", f"{_FLAG} {package}: {p}", COMMAND_LINE, "plugin") for p in problems])
        for place, kind in _all_kinds(plugin):
            _LOADED.kinds[place].append(kind)
            _PLACES[place].kinds.add(kind.spec)
        _LOADED.names.append(name)


def demand(saved: Mapping[str, Any], label: str) -> None:
    """RecipeError: a saved Spec was made with plugins that this process has not loaded. `label`: what holds it."""
    names = saved.get("plugins", [])
    if not isinstance(names, list) or not all(isinstance(n, str) and n.isprintable() for n in names):
        names = ["?"]
    missing = [n for n in names if n not in _LOADED.names]
    if missing:
        flags = " ".join(f"{_FLAG} {n}" for n in missing)
        text = f"{label} was made with plugins, which only a command line can name; add {flags}, or their folders"
        raise RecipeError([Problem("", text, "", "plugin-missing")])


def _is_path(package: str) -> bool:
    return "/" in package or package.endswith(".py")


def _import_name(package: str) -> str:
    """The import name of a package; the folder around a path joins the search path."""
    path = Path(package)
    if _is_path(package):
        if not path.exists():
            raise RecipeError(f"{_FLAG} {package}: no such folder or file")
        folder = str(path.resolve().parent)
        if folder not in sys.path:
            sys.path.append(folder)
        package = path.resolve().stem
    if not all(part.isidentifier() for part in package.split(".")):
        raise RecipeError(f"{_FLAG} {package}: no import name; letters, digits and underscores, with dots between")
    return package


def _imported(name: str, package: str) -> ModuleType:
    had_torch = "torch" in sys.modules
    try:
        module = import_module(name)
    except (ImportError, SyntaxError) as error:
        text = f"{_FLAG} {package}: can't be imported: {error}; install it, or give its folder: {_FLAG} ./{name}"
        raise RecipeError([Problem("", text, COMMAND_LINE, "plugin")]) from None
    if not had_torch and "torch" in sys.modules:
        text = f"{_FLAG} {package}: its specs import torch; name builders as text, module:name"
        raise RecipeError([Problem("", text, COMMAND_LINE, "plugin")])
    file = Path(module.__file__ or "").resolve()
    if _is_path(package) and Path(package).resolve() not in (file, file.parent):
        text = f"{_FLAG} {package}: {file} has the same name and is found first; rename yours"
        raise RecipeError([Problem("", text, COMMAND_LINE, "plugin")])
    return module


def _all_kinds(plugin: Plugin) -> Iterator[tuple[str, Kind]]:
    for place in _PLACES:
        for kind in getattr(plugin, place):
            yield place, kind


def _problems(plugin: Any) -> list[str]:
    """Why a plugin can't be added."""
    if not isinstance(plugin, Plugin):
        return [f"it has no {NAME} = megaspec.plugins.Plugin(...)"]
    found = list(_all_kinds(plugin))
    if not found:
        return [f"its {NAME} adds nothing; give {', '.join(_PLACES)}"]
    taken = _taken_names()
    problems = []
    for place, kind in found:
        wrong = _wrong_kind(_PLACES[place], kind)
        if not wrong:
            name = (place, _tag(kind.spec))
            if name in taken:
                wrong = [f"{_PLACES[place].key}.kind={name[1]} is {taken[name]}'s; choose another name"]
            taken[name] = "its own already"
        problems += [f"{place}: {one}" for one in wrong]
    return problems


def _taken_names() -> dict[tuple[str, str], str]:
    """(place, name of a kind) -> whose it is."""
    taken = {}
    for name, place in _PLACES.items():
        for spec in place.kinds.ours:
            taken[name, _tag(spec)] = "megaspec"
        for spec in place.kinds.added:
            taken[name, _tag(spec)] = "another plugin"
    return taken


def _wrong_kind(place: _Place, kind: Any) -> list[str]:
    """What one kind lacks."""
    spec = getattr(kind, "spec", None)
    if not isinstance(kind, Kind) or not isinstance(spec, type) or not issubclass(spec, Frozen):
        return [f"{kind!r} must be a megaspec.plugins.Kind of a spec class and a builder"]
    problems = []
    if not issubclass(spec, place.bases):
        names = " or ".join(f"{b.__module__}.{b.__name__}" for b in place.bases)
        problems.append(f"{spec.__name__} must inherit from {names}")
    if not _tag(spec):
        problems.append(f'{spec.__name__} lacks kind: Literal["name"], one name, which chooses it')
    absent = [name for name in place.needs if name not in spec.model_fields]
    problems += [f"{spec.__name__} lacks the field {name}" for name in absent]
    unsaid = [name for name in place.says if _is_left_open(spec, name, place.bases)]
    problems += [f"{spec.__name__} doesn't say its {name}" for name in unsaid]
    match = _BUILDER.fullmatch(kind.build) if isinstance(kind.build, str) else None
    if match is None:
        problems.append(f"build={kind.build!r} must be text such as my_plugin.model:MyModel")
    else:
        problems += _wrong_builder(*match.groups())
    return problems


def _is_left_open(spec: type[Frozen], name: str, bases: tuple[type[Frozen], ...]) -> bool:
    """Whether a spec has no `name` but that of the base."""
    said = getattr(spec, name, None)
    return said is None or any(said is getattr(base, name, None) for base in bases)


def _wrong_builder(module: str, name: str) -> list[str]:
    """Why a builder isn't there. Its source is read, not run: it may import torch."""
    try:
        found = find_spec(module)
    except ImportError:
        found = None
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        return [f"build={module}:{name}: there is no module {module}"]
    tree = ast.parse(Path(found.origin).read_text(encoding="utf-8"))
    if name not in set(_top_names(tree)):
        return [f"build={module}:{name}: {module} defines no {name}"]
    return []


def _top_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (t.id for t in targets if isinstance(t, ast.Name))


def _tag(spec: type[Frozen]) -> str:
    """The one name of a spec's `kind`, else ""."""
    names = tags_of(spec)
    return names[0] if len(names) == 1 and isinstance(names[0], str) else ""
