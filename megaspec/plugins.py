"""`--plugin PACKAGE`: the language with the specs of a package. Torch-free; runtime/plugins.py adds the builders.

A package offers PLUGIN, a `Plugin`. Its specs join the unions of a Recipe before one is composed; each names its
builder as "module:name", which only ranks import. Only a command line names a package: no recipe and no run folder
ever makes anything be imported.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from importlib import import_module
from importlib.util import find_spec
from operator import or_
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import Field
from pydantic.fields import FieldInfo

from megaspec.core.errors import COMMAND_LINE, Problem, RecipeError
from megaspec.core.frozen import Frozen
from megaspec.data import facts
from megaspec.data.spec import DataSpec
from megaspec.log.spec import LogSpec
from megaspec.model.gpt.spec import GptSpec
from megaspec.model.llama.spec import LlamaSpec
from megaspec.optim.spec import AdamWSpec, SgdSpec
from megaspec.recipe import Recipe
from megaspec.spec import Spec
from megaspec.train.spec import TrainSpec

NAME = "PLUGIN"
_FLAG = "--plugin"
_BUILDER = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Part:
    """One thing that a plugin adds."""

    spec: type[Frozen]
    """Its settings; `kind: Literal["..."]` chooses it."""
    build: str
    """`module:name` of what is called with the settings; see the fields of Plugin."""


@dataclass(frozen=True)
class Plugin:
    """What a package adds. Specs of models and optimizers inherit from ours, so that the plan can count them."""

    models: tuple[Part, ...] = ()
    """`model.kind`, from LlamaSpec or GptSpec. Built by `(spec, kernels) -> Decoder`."""
    sources: tuple[Part, ...] = ()
    """`data.kind`, from DataSpec and with `vocab_size`. Built by `(spec, *, split, seed, segments, vocab_size) ->
    Source`."""
    optimizers: tuple[Part, ...] = ()
    """`optim.kind`, from AdamWSpec or SgdSpec. Built by `(parameters, spec) -> MasterOptimizer`."""
    losses: tuple[Part, ...] = ()
    """`train.loss`, in place of cross-entropy. Built by `(spec) -> kernel`, a CrossEntropyKernel."""
    sinks: tuple[Part, ...] = ()
    """Entries of `log.sinks`. Built by `(spec, run_dir, step) -> Sink`."""


@dataclass(frozen=True)
class _Place:
    """Where the specs of one kind of part belong."""

    key: str
    bases: tuple[type[Frozen], ...]
    needs: tuple[str, ...] = ()
    """Fields that a spec has to have."""


_PLACES = {
    "models": _Place("model", (LlamaSpec, GptSpec)),
    "sources": _Place("data", (DataSpec,), ("seq_len", "vocab_size")),
    "optimizers": _Place("optim", (AdamWSpec, SgdSpec)),
    "losses": _Place("train.loss", (Frozen,)),
    "sinks": _Place("log.sinks", (Frozen,)),
}
_DESCRIPTIONS = {
    "train.loss": "A plugin's loss. None: cross-entropy.",
    "log.sinks": "A plugin's sinks, beside those of megaspec.",
}


@dataclass
class _Loaded:
    """What this process has taken in."""

    names: list[str] = field(default_factory=list)
    parts: dict[str, list[Part]] = field(default_factory=lambda: {kind: [] for kind in _PLACES})


_LOADED = _Loaded()


def loaded() -> tuple[str, ...]:
    """Import names of the plugins of this process, sorted."""
    return tuple(sorted(_LOADED.names))


def plugin_flags() -> list[str]:
    """What a command line of another process needs to load the same, where it searches the same folders."""
    return [f"{_FLAG}={name}" for name in loaded()]


def parts(kind: str) -> tuple[Part, ...]:
    """What plugins have added: `models`, `sources`, `optimizers`, `losses` or `sinks`."""
    return tuple(_LOADED.parts[kind])


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
        for kind, part in _all_parts(plugin):
            _LOADED.parts[kind].append(part)
        _LOADED.names.append(name)
        _rebuild(plugin)


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


def _all_parts(plugin: Plugin) -> Iterator[tuple[str, Part]]:
    for kind in _PLACES:
        for part in getattr(plugin, kind):
            yield kind, part


def _problems(plugin: Any) -> list[str]:
    """Why a plugin can't be added."""
    if not isinstance(plugin, Plugin):
        return [f"it has no {NAME} = megaspec.plugins.Plugin(...)"]
    found = list(_all_parts(plugin))
    if not found:
        return [f"its {NAME} adds nothing; give {', '.join(_PLACES)}"]
    taken = {(kind, tag): "megaspec" for kind in _PLACES for tag in _own_kinds(kind)}
    taken |= {(kind, _tag(part.spec)): "another plugin" for kind in _PLACES for part in _LOADED.parts[kind]}
    problems = []
    for kind, part in found:
        wrong = _wrong_part(kind, part)
        name = (kind, _tag(part.spec)) if not wrong else None
        if name in taken:
            wrong = [f"{_PLACES[kind].key}.kind={name[1]} is {taken[name]}'s; choose another name"]
        if name is not None:
            taken[name] = "its own already"
        problems += [f"{kind}: {w}" for w in wrong]
    return problems


def _wrong_part(kind: str, part: Any) -> list[str]:
    """What one part lacks."""
    place = _PLACES[kind]
    spec = getattr(part, "spec", None)
    if not isinstance(part, Part) or not isinstance(spec, type) or not issubclass(spec, Frozen):
        return [f"{part!r} must be a megaspec.plugins.Part of a spec class and a builder"]
    problems = []
    if not issubclass(spec, place.bases):
        names = " or ".join(f"{b.__module__}.{b.__name__}" for b in place.bases)
        problems.append(f"{spec.__name__} must inherit from {names}")
    if not _tag(spec):
        problems.append(f'{spec.__name__} lacks kind: Literal["name"], one name, which chooses it')
    absent = [n for n in place.needs if n not in spec.model_fields]
    problems += [f"{spec.__name__} lacks the field {n}" for n in absent]
    match = _BUILDER.fullmatch(part.build) if isinstance(part.build, str) else None
    if match is None:
        problems.append(f"build={part.build!r} must be text such as my_plugin.model:MyModel")
    else:
        problems += _wrong_builder(*match.groups())
    return problems


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
    annotation = spec.model_fields["kind"].annotation if "kind" in spec.model_fields else None
    names = get_args(annotation) if get_origin(annotation) is Literal else ()
    return names[0] if len(names) == 1 and isinstance(names[0], str) else ""


def _own_kinds(kind: str) -> list[str]:
    key = _PLACES[kind].key
    return [] if "." in key else [_tag(s) for s in get_args(_UNIONS[key])]


# The alternatives that megaspec itself has.
_UNIONS = {key: Recipe.model_fields[key].annotation for key in ("model", "data", "optim")}


def _rebuild(plugin: Plugin) -> None:
    """Types the language anew with everything that is loaded. The classes stay: who has imported one sees its union."""
    recipes = (Recipe, Spec)
    for kind in ("models", "sources", "optimizers"):
        key = _PLACES[kind].key
        specs = [part.spec for part in _LOADED.parts[kind]]
        for owner in recipes:
            owner.model_fields[key].annotation = reduce(or_, specs, _UNIONS[key])
    for part in plugin.sources:
        facts.FACTS[part.spec] = facts.made
    losses, sinks = ([part.spec for part in _LOADED.parts[kind]] for kind in ("losses", "sinks"))
    if losses:
        TrainSpec.model_fields["loss"] = _field("train.loss", _one_of(losses) | None, None)
    if sinks:
        LogSpec.model_fields["sinks"] = _field("log.sinks", tuple[_one_of(sinks), ...], ())
    for owner in (TrainSpec, LogSpec, *recipes):
        owner.model_rebuild(force=True)


def _one_of(specs: list[type[Frozen]]) -> Any:
    return Annotated[reduce(or_, specs), Field(discriminator="kind")] if len(specs) > 1 else specs[0]


def _field(key: str, annotation: Any, default: Any) -> FieldInfo:
    return FieldInfo(annotation=annotation, default=default, description=_DESCRIPTIONS[key])
